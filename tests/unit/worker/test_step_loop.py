"""The step loop sleeps only while nothing can be planned, and says what failed."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest

from kvrelay.core_leases import CoreLeases, leases_bytes
from kvrelay.engine.masks.token_masks import GrammarFailed, NoTokenAllowed
from kvrelay.engine.sample.logprobs import BadLogits
from kvrelay.protocol.failure_kind import FailureKind
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.scheduling.plan import HostCopyPlan, StepPlan
from kvrelay.step.batch import DeviceLost, HostCopies, RowsFailed, StepResult, WorkerBatch
from kvrelay.worker.launchers import ThreadLauncher
from kvrelay.worker.step_loop import StepCallbacks, StepLoop, log_failed_step
from tests.fakes.waiting import PATIENCE_S


def runner_that(execute: Any) -> Any:
    runner = Mock(execute=execute)
    runner.spec.block_bytes, runner.spec.block_size = 1, 1
    return runner


def test_a_step_without_rows_is_executed_for_its_copies() -> None:
    """Else what a sequence that preempted itself left for the host would never be free."""
    swaps = HostCopyPlan(HostCopies((3,), (0,)), HostCopies(), (), (), (3,))
    plans = [StepPlan(1, [], host_copies=swaps), StepPlan(2, [])]
    runner = runner_that(lambda batch: StepResult(batch.step, [], 0.0, 0.1))
    committed: list[tuple[StepPlan, float]] = []
    planned: list[int] = []

    def commit(plan: StepPlan, result: StepResult) -> list[Any]:
        committed.append((plan, result.copy_s))
        return []

    scheduler: Any = Mock(schedule=lambda: plans[min(len(planned), 1)], commit=commit, schedule_ahead=lambda: None)
    loop = StepLoop(runner, scheduler)

    async def test() -> None:
        callbacks = StepCallbacks(lambda plan: planned.append(plan.step), Mock(), Mock())
        running = asyncio.create_task(loop.run(callbacks))
        while planned != [1, 2]:
            await asyncio.sleep(0)
        assert committed == [(plans[0], 0.1)]
        loop.stop()
        await running

    asyncio.run(asyncio.wait_for(test(), PATIENCE_S))


def test_a_sequence_that_preempted_itself_is_planned_again_at_once() -> None:
    """It was alone, so the blocks that it lost are the only ones that come back, and nothing else wakes the loop."""
    preempted: Any = Mock()
    plans = [StepPlan(1, [], preempted=[preempted]), StepPlan(2, [])]
    planned: list[int] = []
    scheduler: Any = Mock(schedule=lambda: plans[min(len(planned), 1)])
    loop = StepLoop(runner_that(Mock()), scheduler)

    async def test() -> None:
        callbacks = StepCallbacks(lambda plan: planned.append(plan.step), Mock(), Mock())
        running = asyncio.create_task(loop.run(callbacks))
        while len(planned) < 2:
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)
        assert planned == [1, 2]  # and then it sleeps
        loop.stop()
        await running

    asyncio.run(asyncio.wait_for(test(), PATIENCE_S))


def test_a_loop_that_sleeps_lends_its_cores() -> None:
    """And its steps use those that others lend."""
    swaps = HostCopyPlan(HostCopies((3,), (0,)), HostCopies(), (), (), (3,))
    plans = [StepPlan(1, []), StepPlan(2, [], host_copies=swaps), StepPlan(3, [])]
    memory = memoryview(bytearray(leases_bytes(2)))
    own, others, threads = [0], [0], list[tuple[int, int]]()
    cores = CoreLeases(memory, 0, 2, [1, 1], lambda count: own.__setitem__(0, count))
    other = CoreLeases(memory, 1, 2, [1, 1], lambda count: others.__setitem__(0, count))

    def execute(batch: WorkerBatch) -> StepResult:
        other.begin_step()
        threads.append((own[0], others[0]))
        return StepResult(batch.step, [], 0.0, 0.1)

    planned: list[int] = []
    scheduler: Any = Mock(
        schedule=lambda: plans[min(len(planned), 2)], commit=lambda *_: [], schedule_ahead=lambda: None
    )
    loop = StepLoop(runner_that(execute), scheduler, make_launcher=partial(ThreadLauncher, cores=cores))

    async def test() -> None:
        callbacks = StepCallbacks(lambda plan: planned.append(plan.step), Mock(), Mock())
        running = asyncio.create_task(loop.run(callbacks))
        while not planned:
            await asyncio.sleep(0)
        loop.wake()
        while planned != [1, 2, 3]:
            await asyncio.sleep(0)
        other.begin_step()
        assert (threads, others) == ([(2, 1)], [2])
        loop.stop()
        await running

    asyncio.run(asyncio.wait_for(test(), PATIENCE_S))


@pytest.mark.parametrize("known", [False, True])
def test_the_sampler_forgets_a_sequence_that_the_scheduler_refuses(known: bool) -> None:
    """But not one that goes on under the same key."""
    sequence: Any = Mock(remote=None)
    refuse = Mock(side_effect=ValueError("no"))
    scheduler: Any = Mock(add=refuse, adopt=refuse, get=lambda key: sequence if known else None)
    for join in ("add", "adopt"):
        runner: Any = runner_that(Mock())
        with pytest.raises(ValueError, match="no"):
            getattr(StepLoop(runner, scheduler), join)(sequence)
        assert runner.drop_sequence.called == (not known)


@pytest.mark.parametrize("error", [DeviceLost("GPU 0"), RuntimeError("this step only")])
def test_the_loop_ends_with_its_device_and_with_nothing_less(error: Exception) -> None:
    """Who was in the step hears of it either way."""
    plans = [
        StepPlan(1, [], host_copies=HostCopyPlan(HostCopies((3,), (0,)), HostCopies(), (), (), (3,))),
        StepPlan(2, []),
    ]
    planned: list[int] = []
    sequence: Any = Mock()
    scheduler: Any = Mock(
        schedule=lambda: plans[min(len(planned), 1)], schedule_ahead=lambda: None, fail_step=lambda *_: [sequence]
    )
    failed = Mock()
    loop = StepLoop(runner_that(Mock(side_effect=error)), scheduler)

    async def test() -> None:
        running = asyncio.create_task(loop.run(StepCallbacks(lambda plan: planned.append(plan.step), Mock(), failed)))
        if isinstance(error, DeviceLost):
            with pytest.raises(DeviceLost):
                await running
            assert planned == [1]
        else:
            while planned != [1, 2]:
                await asyncio.sleep(0)
            loop.stop()
            await running
        kind = FailureKind.DEVICE_LOST if isinstance(error, DeviceLost) else FailureKind.ENGINE_ERROR
        failed.assert_called_once_with([sequence], kind, f"{type(error).__name__}: {error}")

    asyncio.run(asyncio.wait_for(test(), PATIENCE_S))


# -- the log line of a step that failed ------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [NoTokenAllowed, GrammarFailed])
def test_what_a_client_got_wrong_is_one_line(error: type[RowsFailed], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "kvrelay.worker.step_loop")
    keys: list[SequenceKey] = [("b", 1, 0), ("a", 1, 0), ("a", 1, 1)]
    log_failed_step(7, error("its grammar ends", keys))
    (record,) = caplog.records
    assert record.levelname == "INFO" and record.exc_info is None
    assert record.getMessage() == "step 7 cannot go on with a, b: its grammar ends"


def test_many_requests_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "kvrelay.worker.step_loop")
    log_failed_step(7, NoTokenAllowed("none is left", [(f"r{number}", 1, 0) for number in range(10)]))
    assert "r0, r1, r2, r3, r4, r5, r6, r7 and 2 more: none is left" in caplog.text


@pytest.mark.parametrize("error", [RuntimeError("out"), RowsFailed("odd", [("a", 1, 0)]), BadLogits([("a", 1, 0)])])
def test_what_the_worker_got_wrong_has_a_traceback(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    log_failed_step(7, error)
    (record,) = caplog.records
    assert (record.levelname, record.getMessage()) == ("ERROR", "step 7 failed")
    assert record.exc_info is not None and record.exc_info[1] is error
