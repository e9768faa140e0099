"""Requests on a worker's step loop, with the real scheduler, in this process: no sockets, no HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.gpu.scale import BLOCK_SIZE
from kvrelay.engine.batch import ModelRunner
from kvrelay.kv.ablations import NullCache
from kvrelay.kv.hashing import root_hash
from kvrelay.kv.pool import BlockPool
from kvrelay.kv.table import BlockTable
from kvrelay.protocol.messages import PeerRef
from kvrelay.protocol.sampling import Sampling
from kvrelay.scheduling.base import SchedulerLimits, SchedulerSettings
from kvrelay.scheduling.plan import SequenceOutput
from kvrelay.scheduling.registry import make_scheduler
from kvrelay.scheduling.sequence import Sequence as Running
from kvrelay.scheduling.sequence import TokenBuffer
from kvrelay.worker.step_loop import StepCallbacks, StepLoop


@dataclass
class Job:
    """A request, and when its tokens came, in seconds since all were handed in."""

    prompt: np.ndarray
    max_tokens: int
    token_times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


@dataclass
class Course:
    """A run of jobs."""

    jobs: list[Job]
    wall_s: float
    loop: StepLoop


def serve(
    runner: ModelRunner,
    jobs: list[Job],
    *,
    token_budget: int,
    max_running: int = 256,
    overlap: bool = True,
    on_step: Callable[[StepLoop, Sequence[SequenceOutput]], None] | None = None,
) -> Course:
    """All jobs at once, greedily and whatever the stop tokens, until the last ends; without a prefix cache."""
    pool = BlockPool(runner.spec.num_blocks, BLOCK_SIZE)
    limits = SchedulerLimits(token_budget, max_running, runner.spec.max_model_len, frozenset())
    scheduler = make_scheduler("sarathi", limits, pool, NullCache(), SchedulerSettings())
    loop = StepLoop(runner, scheduler, overlap=overlap)
    by_key = {(str(number), 1, 0): job for number, job in enumerate(jobs)}
    started = time.perf_counter()

    def committed(outputs: list[SequenceOutput]) -> None:
        now = time.perf_counter() - started
        for output in outputs:
            by_key[output.sequence.key].token_times.append(now)
        if on_step is not None:
            on_step(loop, outputs)
        if not scheduler.has_work:
            loop.stop()

    def failed(sequences: list[Running], cause: str) -> None:
        raise AssertionError(cause)

    sequences = [_sequence(key, job) for key, job in by_key.items()]
    for sequence in sequences:
        loop.add(sequence)
    asyncio.run(loop.run(StepCallbacks(lambda plan: None, committed, failed)))
    wall_s = time.perf_counter() - started
    for sequence, job in zip(sequences, jobs, strict=True):
        job.tokens = sequence.tokens.view(sequence.num_prompt, sequence.num_tokens).tolist()
    return Course(jobs, wall_s, loop)


def _sequence(key: tuple[str, int, int], job: Job) -> Running:
    return Running(
        key=key,
        tokens=TokenBuffer(job.prompt),
        num_prompt=len(job.prompt),
        sampling=Sampling(temperature=0.0, max_tokens=job.max_tokens, ignore_eos=True),
        root=root_hash(model="benchmark"),
        table=BlockTable(BLOCK_SIZE),
        router=PeerRef("router", "1", "tcp://nowhere"),
    )
