"""Requests on a worker's step loop, with the real scheduler, in this process: no sockets, no HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.gpu.scale import BLOCK_SIZE
from kvrelay.engine.model_runner import ModelRunner
from kvrelay.kv.ablations import NullCache
from kvrelay.kv.hashing import root_hash
from kvrelay.kv.pool import BlockPool
from kvrelay.kv.table import BlockTable
from kvrelay.protocol.failure_kind import FailureKind
from kvrelay.protocol.messages import PeerRef
from kvrelay.protocol.sampling import Sampling
from kvrelay.scheduling.plan import SequenceOutput
from kvrelay.scheduling.scheduler import make_scheduler
from kvrelay.scheduling.scheduler_settings import SchedulerLimits, SchedulerSettings
from kvrelay.scheduling.sequence import Origin, TokenBuffer
from kvrelay.scheduling.sequence import Sequence as Running
from kvrelay.worker.launchers import choose_launcher
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
    scheduler = make_scheduler("sarathi", limits, pool, NullCache(pool), SchedulerSettings())
    loop = StepLoop(runner, scheduler, overlap=overlap, make_launcher=choose_launcher(runner, overlap=overlap))
    sequences = [greedy_sequence(number, job.prompt, job.max_tokens, BLOCK_SIZE) for number, job in enumerate(jobs)]
    by_key = {sequence.key: job for sequence, job in zip(sequences, jobs, strict=True)}
    started = time.perf_counter()

    def committed(outputs: list[SequenceOutput]) -> None:
        now = time.perf_counter() - started
        for output in outputs:
            by_key[output.sequence.key].token_times.append(now)
        if on_step is not None:
            on_step(loop, outputs)
        if not scheduler.has_work:
            loop.stop()

    def failed(sequences: list[Running], kind: FailureKind, cause: str) -> None:
        raise AssertionError(cause)

    for sequence in sequences:
        loop.add(sequence)
    asyncio.run(loop.run(StepCallbacks(lambda plan: None, committed, failed)))
    wall_s = time.perf_counter() - started
    for sequence, job in zip(sequences, jobs, strict=True):
        job.tokens = sequence.tokens.view(sequence.num_prompt, sequence.num_tokens).tolist()
    return Course(jobs, wall_s, loop)


ROOT = root_hash(model="benchmark")


def greedy_sequence(number: int, prompt: np.ndarray, max_tokens: int, block_size: int) -> Running:
    """One of a prompt [tokens], drawn greedily for `max_tokens` whatever they are; `number` names it."""
    return Running(
        key=(str(number), 1, 0),
        tokens=TokenBuffer(prompt.astype(np.int32)),
        num_prompt=len(prompt),
        sampling=Sampling(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
        root=ROOT,
        table=BlockTable(block_size),
        origin=Origin(PeerRef("router", "1", "tcp://nowhere")),
    )
