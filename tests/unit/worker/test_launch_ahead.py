"""Steps launched while the one before runs: the same tokens as one after the other, through all that may happen to the
one before; and no block of a step that runs is anybody else's."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.kv.pool import BlockPool
from kvrelay.kv.prefix_cache import PrefixCache
from kvrelay.protocol.failure_kind import FailureKind
from kvrelay.protocol.sampling import BeamSpec, Sampling
from kvrelay.scheduling.plan import SequenceOutput
from kvrelay.scheduling.policies import BUILT_IN
from kvrelay.scheduling.scheduler import make_scheduler
from kvrelay.scheduling.scheduler_settings import SchedulerLimits, SchedulerSettings
from kvrelay.scheduling.sequence import Sequence
from kvrelay.step.batch import DeviceLost
from kvrelay.telemetry.metrics_file import MetricsFile, StepEvent, StepRecord, read_metrics
from kvrelay.telemetry.step_observer import StepObserver
from kvrelay.worker.launchers import AheadLauncher, ThreadLauncher, choose_launcher
from kvrelay.worker.step_loop import StepCallbacks, StepLoop
from tests.fakes.hash_runner import EOS_TOKEN_ID, HashRunner, expected_tokens
from tests.fakes.queued_runner import QueuedRunner
from tests.fakes.sequences import new_sequence
from tests.fakes.waiting import PATIENCE_S, until
from tests.thoroughness import examples
from tests.unit.worker.serving import (
    BLOCK_SIZE,
    LONGEST,
    MOST_DRAFTS,
    NUM_BLOCKS,
    Job,
    Service,
    check_tokens,
    jobs,
    serve,
)
from tests.unit.worker.test_overlap import one_scheduler


def serve_queued(
    wanted: list[Job],
    scheduler: str,
    num_slots: int,
    *,
    overlap: bool = True,
    blame: bool = True,
    fails_at_launch: bool = False,
    mistakes: int = 0,
    **options: Any,
) -> Service:
    made: list[QueuedRunner] = []

    def make(fail_at: dict[tuple[str, int, int], int], num_slots: int) -> QueuedRunner:
        runner = QueuedRunner(
            *(NUM_BLOCKS, BLOCK_SIZE, LONGEST),
            num_host_slots=num_slots,
            fail_at=fail_at,
            blame=blame,
            fails_at_launch=fails_at_launch,
            mistakes=mistakes,
        )
        made.append(runner)
        return runner

    service = serve(Service(wanted, scheduler, num_slots, make, overlap=overlap, **options))
    made[0].close()
    return service


@pytest.mark.everyday(2)
@pytest.mark.parametrize("scheduler", list(BUILT_IN))
@settings(max_examples=examples(80), deadline=None)
@given(
    wanted=jobs,
    num_slots=st.sampled_from([0, 3, 40]),
    failure=st.sampled_from(["rows", "step", "launch"]),
    mistakes=st.sampled_from([0, 0, 2, 5]),
    most_drafts=MOST_DRAFTS,
    jump_forward=st.booleans(),
)
def test_tokens_are_right_and_nothing_is_left_behind(
    scheduler: str, wanted: list[Job], num_slots: int, failure: str, **options: Any
) -> None:
    """The device runs each step as late as can be: whoever gave its blocks away too early is found."""
    blame = failure == "rows"
    service = serve_queued(wanted, scheduler, num_slots, blame=blame, fails_at_launch=failure == "launch", **options)
    check_tokens(wanted, service.served, blame=blame)
    assert service.loop.totals.num_steps_launched_ahead <= service.loop.totals.num_steps_ahead


@settings(max_examples=examples(60), deadline=None)
@given(jobs, st.sampled_from([0, 3]))
def test_launching_ahead_changes_no_outcome(wanted: list[Job], mistakes: int) -> None:
    wanted = [replace(job, abort_at=None, fail_at=job.fail_at_computed) for job in wanted]
    on, off = (serve_queued(wanted, "sarathi", 0, overlap=on, mistakes=mistakes) for on in (True, False))
    assert not off.loop.totals.num_steps_launched_ahead
    assert (on.served.output, on.served.finish) == (off.served.output, off.served.finish)
    assert on.served.failed == off.served.failed


class Crowd:
    """Requests of several samples, beam searches and whole prompts' scores, all at once on a small pool."""

    def __init__(self, requests: list[Request], scheduler: str, *, overlap: bool) -> None:
        self.runner = QueuedRunner(NUM_BLOCKS, BLOCK_SIZE, LONGEST, mistakes=5)
        self.runner.let_run.release(100_000)
        self.pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
        limits = SchedulerLimits(24, 6, LONGEST, frozenset({EOS_TOKEN_ID}))
        self.scheduler = make_scheduler(scheduler, limits, self.pool, PrefixCache(self.pool), SchedulerSettings())
        make = choose_launcher(self.runner, overlap=overlap)
        self.loop = StepLoop(self.runner, self.scheduler, overlap=overlap, make_launcher=make)
        self.tokens: dict[tuple[str, int, int], list[int]] = {}
        self.beams: dict[tuple[str, int, int], list[tuple[int, ...]]] = {}
        for number, request in enumerate(requests):
            for index in range(request.num_samples):
                key = (str(number), 1, index)
                sampling = request.sampling
                self.loop.add(new_sequence(key, request.prompt, sampling, BLOCK_SIZE))
                self.tokens[key] = []

    def committed(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            self.tokens[output.sequence.key] += output.token_ids
            if output.texts:
                self.beams[output.sequence.key] = [tuple(beam.token_ids) for beam in output.texts]
        self.pool.check_integrity()
        if not self.scheduler.has_work:
            self.loop.stop()

    def failed(self, sequences: list[Sequence], kind: FailureKind, cause: str) -> None:
        raise AssertionError(cause)

    def serve(self) -> Crowd:
        callbacks = StepCallbacks(lambda plan: None, self.committed, self.failed)
        asyncio.run(asyncio.wait_for(self.loop.run(callbacks), PATIENCE_S))
        self.runner.close()
        assert self.pool.num_available == NUM_BLOCKS and self.runner.num_sequences == 0
        return self


@dataclass(frozen=True)
class Request:
    prompt: tuple[int, ...]
    num_samples: int
    max_tokens: int
    width: int  # of a beam search; 0: samples

    @property
    def sampling(self) -> Sampling:
        beams = BeamSpec(width=self.width, num_returned=self.width) if self.width else None
        return Sampling(temperature=1.0, seed=3, max_tokens=self.max_tokens, beams=beams)


requests = st.builds(
    lambda prompt, number, max_tokens, is_search: Request(
        tuple(prompt), 1 if is_search else number, max_tokens, min(number, 3) if is_search else 0
    ),
    st.lists(st.integers(1, 2), min_size=1, max_size=14),
    st.integers(1, 4),
    st.integers(1, 8),
    st.sampled_from([False, False, True]),
)


@pytest.mark.everyday(1)
@pytest.mark.parametrize("scheduler", ["sarathi", "vllm"])
@settings(max_examples=examples(60), deadline=None)
@given(st.lists(requests, min_size=1, max_size=5))
def test_samples_and_beams_wait_for_the_host_where_they_must(scheduler: str, wanted: list[Request]) -> None:
    """The runner takes nothing behind another step that is copied, kept or searched; and the results are the same."""
    ahead, alone = (Crowd(wanted, scheduler, overlap=overlap).serve() for overlap in (True, False))
    assert ahead.tokens == alone.tokens
    assert ahead.beams == alone.beams
    for number, request in enumerate(wanted):
        for index in range(request.num_samples if not request.width else 0):
            expected = expected_tokens(request.prompt, request.sampling, LONGEST, index)
            assert ahead.tokens[str(number), 1, index] == expected


LONG = Job((1, 2, 3), 12, 0, None, None, None, False, False)


def test_a_step_behind_a_mistaken_draw_runs_again() -> None:
    service = serve_queued([LONG], "sarathi", 0, mistakes=2)
    runner = service.runner
    assert isinstance(runner, QueuedRunner) and runner.num_run_again
    check_tokens([LONG], service.served, blame=True)


# -- one sequence, held in its steps ----------------------------------------------------------------------------------


class Watched:
    """One sequence of so many tokens on a device that runs a step when told, and what is told of it."""

    def __init__(self, num_tokens: int, path: Path) -> None:
        self.runner = QueuedRunner(16, 16, 256)
        self.metrics, self.path = MetricsFile(path), path
        scheduler = one_scheduler(self.runner)
        make = choose_launcher(self.runner, overlap=True)
        self.loop = StepLoop(
            self.runner, scheduler, StepObserver("decode", file=self.metrics), overlap=True, make_launcher=make
        )
        sampling = Sampling(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        self.sequence = new_sequence(("one", 1, 0), [1, 2, 3], sampling, 16)
        self.tokens: list[int] = []
        self.failed: list[str] = []
        self.pool = scheduler.blocks.pool

    async def run(self) -> None:
        await asyncio.wait_for(self.loop.run(StepCallbacks(lambda plan: None, self._committed, self._fail)), PATIENCE_S)

    def _committed(self, outputs: list[SequenceOutput]) -> None:
        self.tokens += [token_id for output in outputs for token_id in output.token_ids]
        if any(output.finish for output in outputs):
            self.loop.stop()

    def _fail(self, failed: list[Sequence], kind: FailureKind, cause: str) -> None:
        self.failed.append(cause)
        self.loop.stop()

    def events(self) -> dict[tuple[str, int], int]:
        """Their places in the order."""
        self.metrics.close()
        return {(e.event, e.step): e.order for e in read_metrics(self.path) if isinstance(e, StepEvent)}


@contextmanager
def watched(num_tokens: int, path: Path) -> Iterator[Watched]:
    one = Watched(num_tokens, path)
    yield one
    one.runner.let_run.release(100)
    one.runner.close()


def test_the_next_step_is_launched_before_this_one_has_landed(tmp_path: Path) -> None:
    last = 6

    async def test(one: Watched) -> None:
        running = asyncio.create_task(one.run())
        one.loop.add(one.sequence)
        for step in range(1, last + 1):
            # Nothing more can be: what the step behind this one draws is not even asked for.
            await until(lambda at=step: one.runner.launched == list(range(1, min(at + 1, last) + 1)))  # type: ignore[misc]
            assert len(one.tokens) == step - 1
            one.runner.let_run.release()
            await until(lambda at=step: len(one.tokens) == at)  # type: ignore[misc]
        await running

    with watched(last, tmp_path / "steps.jsonl") as one:
        asyncio.run(test(one))
        at = one.events()
        assert (one.loop.totals.num_steps, one.loop.totals.num_steps_launched_ahead) == (last, last - 1)
    for step in range(1, last):
        assert at["forward_begins", step + 1] < at["forward_ends", step] < at["forward_ends", step + 1]
        assert at["published", step] < at["forward_ends", step + 1]
    records = [record for record in read_metrics(one.path) if isinstance(record, StepRecord)]
    assert [record.launched_ahead for record in records] == [False] + [True] * (last - 1)


def test_what_was_launched_behind_a_step_that_fails_ends_before_its_plan_is_cancelled(tmp_path: Path) -> None:
    async def test(one: Watched) -> None:
        one.loop.add(one.sequence)
        one.runner.fail_at[one.sequence.key] = 3  # in step 2
        one.runner.let_run.release(2)
        await one.run()

    with watched(9, tmp_path / "steps.jsonl") as one:
        asyncio.run(test(one))
        at = one.events()
        assert len(one.tokens) == 1 and len(one.failed) == 1
        assert one.runner.launched == [1, 2, 3]
        assert at["forward_ends", 2] < at["forward_ends", 3] < at["plan_cancelled", 3] < at["failed", 2]
        assert one.runner.num_sequences == 0 and one.pool.num_available == one.pool.num_blocks


def test_what_was_launched_when_the_loop_is_stopped_ends_and_is_nobodys(tmp_path: Path) -> None:
    async def test(one: Watched) -> None:
        running = asyncio.create_task(one.run())
        one.loop.add(one.sequence)
        await until(lambda: one.runner.launched == [1, 2])
        one.loop.stop()
        one.runner.let_run.release()
        await running

    with watched(9, tmp_path / "steps.jsonl") as one:
        asyncio.run(test(one))
        at = one.events()
        assert len(one.tokens) == 1
        assert at["forward_ends", 2] < at["plan_cancelled", 2] < at["committed", 1]
        assert not one.runner._not_ended


@pytest.mark.parametrize("at_once", [True, False])
def test_a_device_that_is_lost_behind_a_step_ends_the_loop(at_once: bool, tmp_path: Path) -> None:
    """With the step before, which fails as well; or after it, which is published."""

    async def test(one: Watched) -> None:
        one.loop.add(one.sequence)
        one.runner.lost_in = 3
        if at_once:
            one.runner.fail_at[one.sequence.key] = 3
        one.runner.let_run.release(9)
        with pytest.raises(DeviceLost):
            await one.run()

    with watched(9, tmp_path / "steps.jsonl") as one:
        asyncio.run(test(one))
        assert len(one.tokens) == (1 if at_once else 2) and len(one.failed) == 1


def test_who_is_aborted_while_it_is_in_two_steps_is_forgotten_after_both(tmp_path: Path) -> None:
    async def test(one: Watched) -> None:
        running = asyncio.create_task(one.run())
        one.loop.add(one.sequence)
        await until(lambda: one.runner.launched == [1, 2])
        one.loop.abort(one.sequence.key)
        one.runner.let_run.release()
        await until(lambda: one.loop.totals.num_steps == 1)
        assert one.runner.num_sequences == 1 and one.pool.num_available < one.pool.num_blocks
        one.runner.let_run.release()
        await until(lambda: one.loop.totals.num_steps == 2)
        assert one.runner.num_sequences == 0 and one.pool.num_available == one.pool.num_blocks
        one.loop.stop()
        await running

    with watched(9, tmp_path / "steps.jsonl") as one:
        asyncio.run(test(one))


def test_only_where_steps_are_planned_ahead_on_a_device_with_a_queue_they_are_launched_so() -> None:
    queued = QueuedRunner(16, 16, 256)
    assert choose_launcher(queued, overlap=True) is AheadLauncher
    assert choose_launcher(queued, overlap=False) is ThreadLauncher
    assert choose_launcher(HashRunner(), overlap=True) is ThreadLauncher
    queued.close()
