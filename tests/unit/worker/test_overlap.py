"""The step loop with and without overlap: the same tokens through stops, aborts, failures and preemptions, nothing left
behind; and the order of events that overlap promises."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.kv.pool import BlockPool
from kvrelay.kv.prefix_cache import PrefixCache
from kvrelay.protocol.sampling import BeamSpec, Sampling
from kvrelay.scheduling.plan import SequenceOutput, StepPlan
from kvrelay.scheduling.policies import BUILT_IN
from kvrelay.scheduling.scheduler import Scheduler, make_scheduler
from kvrelay.scheduling.scheduler_settings import SchedulerLimits, SchedulerSettings
from kvrelay.step.batch import StepResult, WorkerBatch
from kvrelay.telemetry.metrics_file import (
    Mark,
    MetricsFile,
    StepEvent,
    StepEventName,
    StepRecord,
    StepTrace,
    read_metrics,
)
from kvrelay.telemetry.step_observer import StepObserver
from kvrelay.worker import step_loop
from kvrelay.worker.step_loop import StepCallbacks, StepLoop
from tests.fakes.hash_runner import EOS_TOKEN_ID, HashRunner
from tests.fakes.sequences import new_sequence
from tests.fakes.waiting import PATIENCE_S
from tests.thoroughness import examples
from tests.unit.worker.serving import MOST_DRAFTS, NUM_BLOCKS, Job, Service, check_tokens, failing, jobs, serve


@pytest.mark.parametrize("scheduler", list(BUILT_IN))
@pytest.mark.parametrize("overlap", [True, False])
@settings(max_examples=examples(120), deadline=None)
@given(jobs, st.sampled_from([0, 3, 40]), st.booleans(), MOST_DRAFTS, st.booleans())
def test_tokens_are_right_and_nothing_is_left_behind(
    overlap: bool, scheduler: str, wanted: list[Job], num_slots: int, blame: bool, most_drafts: int, jump_forward: bool
) -> None:
    """On a small pool: with preemption by recomputing and by swapping, aborts, stops, failures, late masks between, and
    with drafts and forced tokens."""
    options: dict[str, Any] = {"most_drafts": most_drafts, "jump_forward": jump_forward}
    service = serve(Service(wanted, scheduler, num_slots, failing(blame=blame), overlap=overlap, **options))
    check_tokens(wanted, service.served, blame=blame)


@settings(max_examples=examples(60), deadline=None)
@given(jobs)
def test_overlap_changes_no_outcome(wanted: list[Job]) -> None:
    """Without aborts, whose moment is another one, nothing depends on what runs beside a sequence. But whether an
    earlier token of a prompt is computed here depends on what the cache holds by then, so the last one fails."""
    wanted = [replace(job, abort_at=None, fail_at=job.fail_at_computed) for job in wanted]
    on, off = (
        serve(Service(wanted, "sarathi", 0, failing(blame=True), overlap=overlap)).served for overlap in (True, False)
    )
    assert on.output == off.output
    assert on.finish == off.finish
    assert on.failed == off.failed


class PatientRunner(HashRunner):
    """A forward ends once the event loop has planned the next step and published the one before, or found that there
    is none: it waits for these events, not for time."""

    def __init__(self) -> None:
        super().__init__()
        self.wait_for: Callable[[int], bool] = lambda step: True

    def execute(self, batch: WorkerBatch) -> StepResult:
        result = super().execute(batch)
        assert self.wait_for(batch.step), f"step {batch.step}: what should be hidden in its forward did not happen"
        return result


class WatchedTrace(StepTrace):
    """Says when an event was noted."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[tuple[str, int]] = set()
        self._changed = threading.Condition()

    def note(self, event: StepEventName, step: int, mark: Mark | None = None) -> None:
        super().note(event, step, mark)
        with self._changed:
            self._seen.add((event, step))
            self._changed.notify_all()

    def wait_for(self, *events: tuple[str, int]) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._seen.issuperset(events), PATIENCE_S)


def test_planning_ahead_and_publishing_lie_inside_a_forward(tmp_path: Path) -> None:
    """One sequence of 12 tokens: steps 1 to 12. Forward N ends only after the plan of N+1 and the publishing of N-1."""
    last, path = 12, tmp_path / "steps.jsonl"
    metrics, runner = MetricsFile(path), PatientRunner()
    trace = metrics.trace = WatchedTrace()

    def hidden_in(step: int) -> bool:
        planned = [("planned", step + 1)] if step < last else []
        published = [("published", step - 1)] if step > 1 else []
        return trace.wait_for(*planned, *published)

    runner.wait_for = hidden_in
    observer = StepObserver("decode", file=metrics)
    run_one(StepLoop(runner, one_scheduler(runner), observer, overlap=True), max_tokens=last)
    records = list(read_metrics(path))
    at = {(e.event, e.step): e.order for e in records if isinstance(e, StepEvent)}
    for step in range(1, last + 1):
        begins, ends = at["forward_begins", step], at["forward_ends", step]
        if step < last:
            assert (
                begins < at["plan_begins", step + 1] < at["planned", step + 1] < ends < at["forward_begins", step + 1]
            )
        if step > 1:
            assert begins < at["committed", step - 1] < at["published", step - 1] < ends
    assert [r.ahead for r in records if isinstance(r, StepRecord)] == [False] + [True] * (last - 1)


def test_a_step_that_runs_much_longer_than_expected_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """In time that the process is awake, and more patiently while nothing is measured or more is expected."""
    monkeypatch.setattr(step_loop, "HANGS_AFTER_S", 2.0)
    monkeypatch.setattr(step_loop, "UNMEASURED_HANGS_AFTER_S", 8.0)
    runner, last = PatientRunner(), 3
    loop = StepLoop(runner, one_scheduler(runner), overlap=True)
    now = [100.0]

    def hanging_after(step: int) -> float:
        """Seconds of step `step` until it is told of. 100: not until then."""
        began = now[0]
        while now[0] < began + 100:
            now[0] += 0.25
            if said := loop.hanging_step(now[0]):
                assert f"step {step} has run" in said
                return now[0] - began
        return 100

    found: dict[int, float] = {}

    def hangs(step: int) -> bool:
        deadline = time.monotonic() + PATIENCE_S
        while loop._open[0].step != step and time.monotonic() < deadline:
            time.sleep(0.001)  # the event loop publishes the step before
        loop.hanging_step(now[0])
        now[0] += 1000.0  # suspended
        assert not loop.hanging_step(now[0])
        expected_s = {1: 0.0, 2: 0.01, 3: 1.0}[step]
        monkeypatch.setattr(loop.speeds, "expected_s", lambda plan: expected_s)
        found[step] = hanging_after(step)
        return True

    runner.wait_for = hangs
    run_one(loop, max_tokens=last)
    assert not loop.hanging_step(now[0] + 1000), "nothing is in flight"
    assert found == {1: pytest.approx(8, abs=1), 2: pytest.approx(2, abs=1), 3: pytest.approx(20, abs=1)}


def test_without_overlap_one_thing_comes_after_the_other(tmp_path: Path) -> None:
    path, runner = tmp_path / "steps.jsonl", HashRunner()
    observer = StepObserver("decode", file=MetricsFile(path))
    run_one(StepLoop(runner, one_scheduler(runner), observer, overlap=False), max_tokens=5)
    records = list(read_metrics(path))
    events = sorted((e for e in records if isinstance(e, StepEvent)), key=lambda e: e.order)
    course = ["plan_begins", "planned", "forward_begins", "forward_ends", "committed", "published"]
    assert [(e.step, e.event) for e in events] == [(step, event) for step in range(1, 6) for event in course]
    assert not any(r.ahead for r in records if isinstance(r, StepRecord))


def test_a_sequence_that_needs_the_host_is_not_planned_ahead() -> None:
    runner = HashRunner()
    loop = StepLoop(runner, one_scheduler(runner), overlap=True)
    run_one(loop, max_tokens=6, beams=BeamSpec(width=1, num_returned=1))
    assert (loop.totals.num_steps, loop.totals.num_steps_ahead) == (6, 0)


def test_a_sequence_that_was_aborted_in_a_step_that_failed_is_forgotten() -> None:
    """It was planned in the step behind, which is cancelled; and no step comes after it."""
    job = Job((1, 2, 3), 9, 0, None, None, 4, False, False)
    service = Service([job], "sarathi", 0, failing(blame=False), overlap=True)
    planned = service.planned

    def planned_and_abort(plan: StepPlan) -> None:
        planned(plan)
        if any(row.position == 5 for row in plan.rows):
            assert service.runner.fail_at  # the step before is in flight, and will fail
            service.end(0)

    service.planned = planned_and_abort  # type: ignore[method-assign]
    asyncio.run(service.serve())
    assert service.served.aborted == {0}
    assert service.runner.num_sequences == 0
    assert service.pool.num_available == NUM_BLOCKS


def one_scheduler(runner: HashRunner) -> Scheduler:
    pool = BlockPool(runner.spec.num_blocks, runner.spec.block_size)
    limits = SchedulerLimits(64, 8, runner.spec.max_model_len, frozenset({EOS_TOKEN_ID}))
    return make_scheduler("sarathi", limits, pool, PrefixCache(pool), SchedulerSettings())


def run_one(loop: StepLoop, max_tokens: int, beams: BeamSpec | None = None) -> None:
    sampling = Sampling(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, beams=beams)
    sequence = new_sequence(("one", 1, 0), [1, 2, 3], sampling, 16)

    def committed(outputs: list[SequenceOutput]) -> None:
        if any(output.finish for output in outputs):
            loop.stop()

    async def run() -> None:
        loop.add(sequence)
        await asyncio.wait_for(
            loop.run(StepCallbacks(lambda plan: None, committed, lambda failed, kind, cause: None)), PATIENCE_S
        )

    asyncio.run(run())
    assert beams is not None or sequence.num_output == max_tokens
