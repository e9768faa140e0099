"""Whatever the scheduler, the queue's order, the cache and the pressure: the tokens are those of transformers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvrelay.engine.load.causal_model import CausalModel, load_model
from kvrelay.engine.load.model_source import open_source
from kvrelay.engine.run.graphs import GraphSettings
from kvrelay.engine.run.transformers_runner import TransformersRunner
from kvrelay.kv.ablations import NullCache
from kvrelay.kv.pool import BlockPool
from kvrelay.kv.prefix_cache import PrefixCache
from kvrelay.protocol.failure_kind import FailureKind
from kvrelay.protocol.sampling import Sampling, SpeculationMethod
from kvrelay.scheduling.memory import swapping
from kvrelay.scheduling.plan import PlanBuilder, SequenceOutput, StepPlan
from kvrelay.scheduling.policies import BUILT_IN
from kvrelay.scheduling.scheduler import Scheduler, make_scheduler
from kvrelay.scheduling.scheduler_settings import (
    QueueOrderName,
    SchedulerLimits,
    SchedulerSettings,
    SpeculationSettings,
)
from kvrelay.scheduling.sequence import Sequence
from kvrelay.scheduling.speculation.speculator import DraftLength
from kvrelay.scheduling.step_planner import StepPlanner
from kvrelay.worker.launchers import choose_launcher
from kvrelay.worker.step_loop import StepCallbacks, StepLoop
from tests.component.engine.conftest import BLOCK_SIZE
from tests.fakes.fake_cuda_graphs import CapturableTorchBackend, FakeRecorder
from tests.fakes.sequences import new_sequence
from tests.fakes.waiting import PATIENCE_S

STEPS: dict[str, Any] = {
    "launched ahead": {"overlap": True, "launches_ahead": True},
    "planned ahead": {"overlap": True, "launches_ahead": False},
    "one after the other": {"overlap": False, "launches_ahead": True},
}
NUM_BLOCKS = 24  # of 8 tokens: at most two or three of the sequences below fit at a time
LONGEST = 150


@pytest.fixture(scope="module")
def capturable_model(model_dir: Path) -> CausalModel:
    torch.set_num_threads(1)
    source = open_source(str(model_dir), "float32", max_model_len=LONGEST)
    return load_model(source, BLOCK_SIZE, CapturableTorchBackend())


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> Callable[[tuple[int, ...], int], list[int]]:
    reference = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()

    @cache
    def greedy(prompt: tuple[int, ...], max_tokens: int) -> list[int]:
        with torch.inference_mode():
            output = reference.generate(
                torch.tensor([prompt]), max_new_tokens=max_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
            )
        tokens: list[int] = output[0, len(prompt) :].tolist()
        return tokens

    return greedy


def jobs() -> list[tuple[tuple[int, ...], int]]:
    """Prompts that share prefixes, of very different lengths."""
    rng = random.Random(1)
    shared = [rng.choices(range(4, 250), k=40) for _ in range(2)]
    made = []
    for _ in range(14):
        prompt = rng.choice(shared)[: rng.randint(0, 40)] + rng.choices(range(4, 250), k=rng.randint(1, 60))
        made.append((tuple(prompt), rng.randint(1, 40)))
    return made


def until(tokens: list[int], stop: int | None) -> list[int]:
    """Up to the stop token and with it."""
    return tokens[: tokens.index(stop) + 1] if stop in tokens else tokens


def run(
    scheduler: Scheduler, runner: TransformersRunner, stops: list[int | None], *, overlap: bool
) -> tuple[list[list[int]], StepLoop]:
    """All jobs on a worker's step loop, three of them arriving with each step."""
    sequences = [
        new_sequence(
            (str(number), 1, 0),
            prompt,
            Sampling(
                temperature=0.0, max_tokens=max_tokens, ignore_eos=True, stop_token_ids=() if stop is None else (stop,)
            ),
            BLOCK_SIZE,
            text_owner="",
        )
        for number, ((prompt, max_tokens), stop) in enumerate(zip(jobs(), stops, strict=True))
    ]
    waiting = list(sequences)
    loop = StepLoop(runner, scheduler, overlap=overlap, make_launcher=choose_launcher(runner, overlap=overlap))

    def arrive() -> None:
        for sequence in waiting[:3]:
            loop.add(sequence)
        del waiting[:3]

    def committed(outputs: list[SequenceOutput]) -> None:
        scheduler.blocks.pool.check_integrity()
        arrive()
        if not scheduler.has_work:
            loop.stop()

    def failed(failed: list[Sequence], kind: FailureKind, cause: str) -> None:
        raise AssertionError(cause)

    arrive()
    asyncio.run(asyncio.wait_for(loop.run(StepCallbacks(lambda plan: None, committed, failed)), PATIENCE_S))
    return [s.tokens.view(s.num_prompt, s.num_tokens).tolist() for s in sequences], loop


def check(
    model: CausalModel,
    expected: Callable[[tuple[int, ...], int], list[int]],
    name: str,
    settings: SchedulerSettings,
    *,
    with_cache: bool,
    overlap: bool,
    recorder: FakeRecorder | None = None,
    launches_ahead: bool | None = None,
) -> Scheduler:
    """Every third job ends early, by a stop token that nobody knew to come. With a recorder, decodes are captured.

    `launches_ahead`: see `TransformersRunner`."""
    pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
    kept: PrefixCache = PrefixCache(pool) if with_cache else NullCache(pool)
    limits = SchedulerLimits(48, 8, LONGEST, frozenset())
    scheduler = make_scheduler(name, limits, pool, kept, settings)
    outputs = [expected(prompt, max_tokens) for prompt, max_tokens in jobs()]
    stops = [None if number % 3 else output[len(output) // 2] for number, output in enumerate(outputs)]
    num_slots = settings.num_host_slots
    runner = TransformersRunner(
        model,
        NUM_BLOCKS,
        num_host_slots=num_slots,
        with_scratch=recorder is not None,
        launches_ahead=launches_ahead,
    )
    if recorder is not None:
        runner.try_graphs(GraphSettings((1, 2, 3, 5, 8, 16), lambda _: recorder))
        num_checks = recorder.num_replayed
    got, loop = run(scheduler, runner, stops, overlap=overlap)
    assert got == [until(output, stop) for output, stop in zip(outputs, stops, strict=True)]
    assert pool.num_available == NUM_BLOCKS
    assert loop.totals.num_captured_steps == (recorder.num_replayed - num_checks if recorder is not None else 0)
    if settings.speculation.method != "off":
        assert 0 < loop.totals.num_accepted_tokens < loop.totals.num_drafted_tokens
        return scheduler
    assert bool(loop.totals.num_steps_ahead) is overlap
    assert bool(loop.totals.num_steps_launched_ahead) is (overlap and runner.launches_ahead)
    return scheduler


@pytest.mark.everyday(12)
@pytest.mark.parametrize("steps", list(STEPS))
@pytest.mark.parametrize("with_cache", [True, False])
@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_every_scheduler(
    model: CausalModel,
    expected: Callable[[tuple[int, ...], int], list[int]],
    name: str,
    with_cache: bool,
    steps: str,
) -> None:
    check(model, expected, name, SchedulerSettings(), with_cache=with_cache, **STEPS[steps])


@pytest.mark.everyday(4)
@pytest.mark.parametrize("steps", list(STEPS))
@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_captured_steps(
    capturable_model: CausalModel,
    expected: Callable[[tuple[int, ...], int], list[int]],
    name: str,
    steps: str,
) -> None:
    recorder, settings = FakeRecorder(), SchedulerSettings(num_host_slots=12)
    check(capturable_model, expected, name, settings, with_cache=True, recorder=recorder, **STEPS[steps])
    assert recorder.num_replayed > 10


@pytest.mark.everyday(2)
@pytest.mark.parametrize("steps", list(STEPS))
@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_captured_steps_with_drafts(
    capturable_model: CausalModel,
    expected: Callable[[tuple[int, ...], int], list[int]],
    method: SpeculationMethod,
    steps: str,
) -> None:
    recorder, settings = FakeRecorder(), SchedulerSettings(speculation=SpeculationSettings(method, prompt_lookup_min=2))
    with patch.multiple(DraftLength, choose=lambda self, own, kind, shares: (len(shares), len(shares)), may_pay=True):
        check(capturable_model, expected, "sarathi", settings, with_cache=True, recorder=recorder, **STEPS[steps])
    assert recorder.num_replayed > 10


@pytest.mark.parametrize("order", get_args(QueueOrderName))
def test_every_queue_order(
    model: CausalModel, expected: Callable[[tuple[int, ...], int], list[int]], order: QueueOrderName
) -> None:
    settings = SchedulerSettings(queue_order=order, chunking="dynamic")
    check(model, expected, "sarathi", settings, with_cache=True, overlap=True)


@pytest.mark.parametrize("steps", list(STEPS))
def test_preemption(model: CausalModel, expected: Callable[[tuple[int, ...], int], list[int]], steps: str) -> None:
    settings = SchedulerSettings(retraction="least_progress")
    scheduler = check(model, expected, "sarathi", settings, with_cache=True, **STEPS[steps])
    assert scheduler.num_preemptions > 0


@pytest.mark.everyday(6)
@pytest.mark.parametrize("steps", list(STEPS))
@pytest.mark.parametrize("method", ["ngram", "suffix"])
@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_drafts(
    model: CausalModel,
    expected: Callable[[tuple[int, ...], int], list[int]],
    name: str,
    method: SpeculationMethod,
    steps: str,
) -> None:
    """The model's greedy output falls into loops, which are guessed, and leaves them, so that drafts are rejected."""
    settings = SchedulerSettings(speculation=SpeculationSettings(method, prompt_lookup_min=2))
    # Whatever steps are measured to take on a loaded machine.
    with patch.multiple(DraftLength, choose=lambda self, own, kind, shares: (len(shares), len(shares)), may_pay=True):
        scheduler = check(model, expected, name, settings, with_cache=True, **STEPS[steps])
    scheduler.blocks.pool.check_integrity()


@pytest.mark.everyday(6)
@pytest.mark.parametrize("with_cache", [True, False])
@pytest.mark.parametrize("num_slots", [12, 100])
@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_preemption_by_swapping(
    model: CausalModel,
    expected: Callable[[tuple[int, ...], int], list[int]],
    name: str,
    num_slots: int,
    with_cache: bool,
) -> None:
    """Both ways of preemption in turn, by force; with few slots copies are given up, too."""
    rng = random.Random(num_slots)
    settings = SchedulerSettings(num_host_slots=num_slots)
    schedule = Scheduler.schedule

    def schedule_after_preemptions(self: Scheduler) -> StepPlan:
        """A fifth of the steps begin with a preemption."""
        fill = self.policy.fill

        def fill_with_one_less(planner: StepPlanner, builder: PlanBuilder) -> None:
            if self.running and rng.random() < 0.2:
                victim = rng.choice(list(self.running.values()))
                self.lifecycle.preempt(victim, builder)
                builder.preempt(victim)
            fill(planner, builder)

        with patch.object(self.policy, "fill", fill_with_one_less):
            return schedule(self)

    with (
        patch.object(Scheduler, "schedule", schedule_after_preemptions),
        patch.object(swapping, "prefers_swap", lambda *_: rng.random() < 0.8),
    ):
        scheduler = check(model, expected, name, settings, with_cache=with_cache, overlap=False)
    use = scheduler.lifecycle.offload.use
    assert use.num_blocks_out > 0 and use.num_blocks_in > 0
    assert use.num_preemptions < scheduler.num_preemptions
    assert use.num_used_slots == 0
    scheduler.blocks.pool.check_integrity()
