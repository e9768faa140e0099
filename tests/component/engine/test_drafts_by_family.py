"""Drafts change no token, log-probability and finish reason, whatever the architecture and the sampling parameters."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from kvrelay.engine.load.causal_model import CausalModel, load_model
from kvrelay.engine.load.model_source import open_source
from kvrelay.engine.run.transformers_runner import TransformersRunner
from kvrelay.kv.pool import BlockPool
from kvrelay.kv.prefix_cache import PrefixCache
from kvrelay.protocol.failure_kind import FailureKind
from kvrelay.protocol.sampling import FinishReason, Sampling, SpeculationMethod, TokenLogprobs
from kvrelay.scheduling.plan import SequenceOutput
from kvrelay.scheduling.scheduler import make_scheduler
from kvrelay.scheduling.scheduler_settings import SchedulerLimits, SchedulerSettings, SpeculationSettings
from kvrelay.scheduling.sequence import Sequence
from kvrelay.scheduling.speculation.speculator import DraftLength
from kvrelay.worker.step_loop import StepCallbacks, StepLoop
from tests.component.engine.conftest import BLOCK_SIZE
from tests.fakes.sequences import new_sequence
from tests.fakes.waiting import PATIENCE_S
from tests.tiny_models import build_model

NUM_BLOCKS = 40  # of 8 tokens: sequences are preempted
LONGEST = 150
NUM_JOBS = 10


@dataclass
class Outcome:
    """Of one sequence."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: FinishReason | None = None


@dataclass(frozen=True)
class Job:
    prompt: list[int]
    sampling: Sampling
    num_samples: int


def make_jobs(seed: int) -> list[Job]:
    """Prompts that repeat themselves and each other; each job comes twice, so its output is an earlier one then."""
    rng = random.Random(seed)
    phrase = rng.choices(range(4, 250), k=16)
    jobs = []
    for _ in range(NUM_JOBS // 2):
        prompt = [*phrase, *rng.choices(range(4, 250), k=rng.randint(1, 30)), *phrase[: rng.randint(4, 16)]]
        sampling = Sampling(
            temperature=rng.choice([0.0, 0.0, 0.3]),
            top_p=rng.choice([1.0, 0.9]),
            top_k=rng.choice([0, 4]),
            presence_penalty=rng.choice([0.0, 0.0, 0.7]),
            frequency_penalty=rng.choice([0.0, 0.0, 0.3]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.1]),
            seed=rng.getrandbits(32),
            logprobs=rng.choice([None, 0, 3]),
            max_tokens=rng.randint(2, 40),
            min_tokens=rng.choice([0, 0, 5]),
            stop_token_ids=tuple(rng.sample(range(4, 250), rng.choice([0, 8]))),
            bad_words=rng.choice([(), ((phrase[3],), (phrase[5], phrase[6]))]),
            allowed_token_ids=tuple(sorted(phrase[: rng.choice([0, 5, 12])])),
            ignore_eos=rng.random() < 0.5,
        )
        jobs.append(Job(prompt, sampling, rng.choice([1, 1, 3])))
    return [*jobs, *jobs]


def run(model: CausalModel, jobs: list[Job], method: SpeculationMethod) -> tuple[list[Outcome], StepLoop]:
    """All jobs on a worker's step loop, one more arriving with each step, in chunks, with a prefix cache."""
    pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
    limits = SchedulerLimits(48, 8, LONGEST, frozenset({256}))
    settings = SchedulerSettings(speculation=SpeculationSettings(method, prompt_lookup_min=2))
    scheduler = make_scheduler("sarathi", limits, pool, PrefixCache(pool), settings)
    loop = StepLoop(TransformersRunner(model, NUM_BLOCKS), scheduler, overlap=False)
    outcomes: dict[tuple[str, int, int], Outcome] = {}
    waiting = list(enumerate(jobs))

    def arrive() -> None:
        if not waiting:
            return
        number, job = waiting.pop(0)
        for index in range(job.num_samples):
            key = (str(number), 1, index)
            outcomes[key] = Outcome()
            group = str(number) if job.num_samples > 1 else ""
            loop.add(new_sequence(key, job.prompt, job.sampling, BLOCK_SIZE, text_owner="", sample_group=group))

    def committed(outputs: list[SequenceOutput]) -> None:
        pool.check_integrity()
        for output in outputs:
            outcome = outcomes[output.sequence.key]
            outcome.token_ids += output.token_ids
            outcome.logprobs += output.logprobs
            outcome.finish = output.finish
        arrive()
        if not scheduler.has_work:
            loop.stop()

    def failed(failed: list[Sequence], kind: FailureKind, cause: str) -> None:
        raise AssertionError(cause)

    arrive()
    asyncio.run(asyncio.wait_for(loop.run(StepCallbacks(lambda plan: None, committed, failed)), PATIENCE_S))
    assert pool.num_available == NUM_BLOCKS
    return list(outcomes.values()), loop


def model_of(family: str, directory: Path) -> CausalModel:
    torch.set_num_threads(1)
    return load_model(open_source(str(build_model(family, directory)), "float32"), BLOCK_SIZE)


@pytest.mark.everyday(2)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma"])
def test_outcomes_are_those_without_drafts(tmp_path: Path, family: str, seed: int) -> None:
    model, jobs = model_of(family, tmp_path), make_jobs(seed)
    expected, _ = run(model, jobs, "off")
    assert all(outcome.finish for outcome in expected)
    methods: tuple[SpeculationMethod, ...] = ("ngram", "suffix")
    for method in methods:
        # Whatever steps are measured to take.
        with patch.multiple(
            DraftLength, choose=lambda self, own, kind, shares: (len(shares), len(shares)), may_pay=True
        ):
            outcomes, loop = run(model, jobs, method)
        accepted, drafted = loop.totals.num_accepted_tokens, loop.totals.num_drafted_tokens
        assert accepted < drafted and (accepted or method == "ngram")
        for got, alone in zip(outcomes, expected, strict=True):
            assert (got.token_ids, got.finish) == (alone.token_ids, alone.finish)
            assert [entry.token_id for entry in got.logprobs] == [entry.token_id for entry in alone.logprobs]
            for entry, other in zip(got.logprobs, alone.logprobs, strict=True):
                assert entry.logprob == pytest.approx(other.logprob, abs=1e-4)
