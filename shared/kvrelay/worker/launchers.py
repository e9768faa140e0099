"""Runs a step's forward beside the event loop: on a thread, on a device with a queue, or as a timer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Protocol

from kvrelay.core_leases import CoreLeases
from kvrelay.device_profiles import PipelineClock
from kvrelay.engine.model_runner import LaunchedStep, ModelRunner
from kvrelay.ranks.lockstep_group import LockstepGroup
from kvrelay.step.batch import DeviceLost, StepResult, WorkerBatch
from kvrelay.telemetry.metrics_file import StepEventName, StepTrace


class Flight(Protocol):
    """A step that is running or queued. Exactly one of the methods is called, once, on the event loop's thread."""

    def land(self) -> asyncio.Future[StepResult]:
        """Returns a future of the step's result. It raises what the launch or the forward raised."""
        ...

    async def discard(self) -> None:
        """Waits for the step and drops its result. Only for a step that was launched behind one that is not committed.
        Raises DeviceLost."""
        ...


class Launcher:
    """Starts steps. All methods are called on the event loop's thread."""

    def can_launch_behind(self, batch: WorkerBatch) -> bool:
        """Returns whether the step may be launched before the one in flight has landed."""
        return False

    async def launch(self, batch: WorkerBatch, *, ahead: bool, behind: bool = False) -> Flight:
        """Returns once the step's launch has begun. `ahead`: the step was planned while the previous one ran. `behind`:
        the previous one has not landed, and `can_launch_behind` returned True."""
        raise NotImplementedError

    def rest(self) -> None:
        """Called when no step is running and none follows for now."""

    def close(self) -> None:
        """Waits for running work, then stops the threads."""


MakeLauncher = Callable[[ModelRunner, StepTrace | None], Launcher]


def overlaps_steps(runner: ModelRunner, overlap: str, *, is_simulated: bool) -> bool:
    """Returns whether the step loop plans ahead, for `overlap` on, off or auto (see `WorkerConfig.overlap`)."""
    if overlap == "auto":
        return is_simulated or runner.launches_ahead
    return overlap == "on"


def choose_launcher(runner: ModelRunner, *, overlap: bool, cores: CoreLeases | None = None) -> MakeLauncher:
    """The launcher for a real device. With `overlap`, a runner that can launch steps ahead does so. `cores`: those of a
    runner that computes on the CPU."""
    if overlap and runner.launches_ahead:
        return AheadLauncher
    return ThreadLauncher if cores is None else partial(ThreadLauncher, cores=cores)


class _Future:
    """A step whose result is a future of the event loop."""

    def __init__(self, landed: asyncio.Future[StepResult]) -> None:
        self._landed = landed

    def land(self) -> asyncio.Future[StepResult]:
        return self._landed

    async def discard(self) -> None:
        await asyncio.wait([self._landed])
        self._landed.exception()  # it counts as retrieved


class ThreadLauncher(Launcher):
    """Computes each step on a thread. The next step is launched when this one has landed."""

    def __init__(self, runner: ModelRunner, trace: StepTrace | None, *, cores: CoreLeases | None = None) -> None:
        self._runner = runner
        self._trace = trace
        self._cores = cores
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="step")

    async def launch(self, batch: WorkerBatch, *, ahead: bool, behind: bool = False) -> Flight:
        """Waits until the thread has begun. Otherwise this thread would keep the interpreter's lock and delay the
        forward."""
        loop, begun = asyncio.get_running_loop(), asyncio.Event()
        forward = loop.run_in_executor(self._executor, self._execute, batch, loop, begun)
        await begun.wait()
        return _Future(forward)

    def rest(self) -> None:
        if self._cores is not None:
            self._cores.end()

    def close(self) -> None:
        self._executor.shutdown(wait=True)
        self.rest()

    def _execute(self, batch: WorkerBatch, loop: asyncio.AbstractEventLoop, begun: asyncio.Event) -> StepResult:
        """Runs on the worker thread."""
        if self._trace is not None:
            self._trace.note("forward_begins", batch.step)
        loop.call_soon_threadsafe(begun.set)
        if self._cores is not None:
            self._cores.begin_step()
        try:
            return self._runner.execute(batch)
        finally:
            if self._cores is not None:
                self._cores.end_step()
            if self._trace is not None:
                self._trace.note("forward_ends", batch.step)


class AheadLauncher(Launcher):
    """For a device with a queue. One thread launches steps and another waits for them to land, both in step order.

    So step N+1 is launched while N runs, and the landing of N is noticed while N+1 is being launched.
    """

    def __init__(self, runner: ModelRunner, trace: StepTrace | None) -> None:
        self._runner = runner
        self._trace = trace
        self._launching = ThreadPoolExecutor(1, thread_name_prefix="launch")
        self._landing = ThreadPoolExecutor(1, thread_name_prefix="land")

    def can_launch_behind(self, batch: WorkerBatch) -> bool:
        return self._runner.can_launch_behind(batch)

    async def launch(self, batch: WorkerBatch, *, ahead: bool, behind: bool = False) -> Flight:
        """Waits until the launching thread has begun, as `ThreadLauncher` does."""
        loop, begun = asyncio.get_running_loop(), asyncio.Event()
        launched = self._launching.submit(self._launch, batch, loop, begun)
        await begun.wait()
        return _Launched(batch.step, launched, self._landing, self._note)

    def close(self) -> None:
        self._launching.shutdown(wait=True)
        self._landing.shutdown(wait=True)

    def _launch(self, batch: WorkerBatch, loop: asyncio.AbstractEventLoop, begun: asyncio.Event) -> LaunchedStep:
        """Runs on the launching thread."""
        self._note("forward_begins", batch.step)
        loop.call_soon_threadsafe(begun.set)
        return self._runner.launch(batch)

    def _note(self, event: StepEventName, step: int) -> None:
        if self._trace is not None:
            self._trace.note(event, step)


class _Launched:
    """A step of `AheadLauncher`."""

    def __init__(
        self,
        step: int,
        launched: Future[LaunchedStep],
        landing: ThreadPoolExecutor,
        note: Callable[[StepEventName, int], None],
    ) -> None:
        self._step = step
        self._launched = launched
        self._landing = landing
        self._note = note

    def land(self) -> asyncio.Future[StepResult]:
        return asyncio.get_running_loop().run_in_executor(self._landing, self._land)

    async def discard(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._landing, self._discard)

    def _land(self) -> StepResult:
        """Runs on the landing thread, as `_discard` does."""
        try:
            return self._launched.result().land()
        finally:
            self._note("forward_ends", self._step)

    def _discard(self) -> None:
        error = self._launched.exception()
        try:
            if error is None:
                self._launched.result().discard()
            elif isinstance(error, DeviceLost):
                raise error
            # If the launch failed, the step has ended, and its plan is already being cancelled.
        finally:
            self._note("forward_ends", self._step)


class TimedLauncher(Launcher):
    """For a simulated device. The runner returns at once, and a timer lands the step after the time that the result
    names.

    A step that was planned ahead begins when the previous one ended, however late the timer fired, because a real
    device with a queue does not wait for the host either.
    """

    def __init__(self, runner: ModelRunner, trace: StepTrace | None) -> None:
        self._runner = runner
        self._trace = trace
        self._ended_at = 0.0

    async def launch(self, batch: WorkerBatch, *, ahead: bool, behind: bool = False) -> Flight:
        """Waits for other ranks only. An error of the runner is raised by the landing."""
        loop = asyncio.get_running_loop()
        forward: asyncio.Future[StepResult] = loop.create_future()
        if self._trace is not None:
            self._trace.note("forward_begins", batch.step)
        own_s, result = 0.0, None
        try:
            result = self._runner.execute(batch)
            own_s = result.forward_s + result.copy_s
        except Exception as error:
            forward.set_exception(error)
        took_s = await self._slowest_s(own_s)
        if result is not None:
            if took_s != own_s:
                result = replace(result, forward_s=took_s - result.copy_s)
            loop.call_at(self._ends_at(loop.time(), took_s, ahead=ahead), self._land, forward, result)
        return _Future(forward)

    async def _slowest_s(self, own_s: float) -> float:
        return own_s

    def _ends_at(self, now: float, took_s: float, *, ahead: bool) -> float:
        self._ended_at = (self._ended_at if ahead else now) + took_s
        return self._ended_at

    def _land(self, forward: asyncio.Future[StepResult], result: StepResult) -> None:
        """Runs when the step's time is over."""
        if self._trace is not None:
            self._trace.note("forward_ends", result.step)
        if not forward.done():
            forward.set_result(result)


class PipelinedTimedLauncher(TimedLauncher):
    """For a simulated pipeline: a step takes the time that the result names on each part, and the first part takes
    the next step as soon as it is free. Results exist at launch, as steps in flight do not need each other's tokens."""

    def __init__(self, runner: ModelRunner, trace: StepTrace | None, *, pipeline_depth: int) -> None:
        super().__init__(runner, trace)
        self._pipeline = PipelineClock(pipeline_depth)

    def can_launch_behind(self, batch: WorkerBatch) -> bool:
        return batch.is_plain

    def _ends_at(self, now: float, took_s: float, *, ahead: bool) -> float:
        return self._pipeline.enter(now, took_s)


class LockstepTimedLauncher(TimedLauncher):
    """For simulated ranks with data-parallel attention: a step takes as long as the longest one of the ranks would
    alone, since all ranks wait for the slowest one, and compute MLPs for as many tokens of each rank."""

    def __init__(self, runner: ModelRunner, trace: StepTrace | None, *, group: LockstepGroup) -> None:
        super().__init__(runner, trace)
        self._group = group

    async def _slowest_s(self, own_s: float) -> float:
        every = await self._group.exchange([round(own_s * 1e9)])
        return max(nanoseconds for (nanoseconds,) in every) / 1e9
