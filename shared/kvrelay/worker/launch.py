"""How a step's forward runs beside the event loop: on a thread of its own, on a device with a queue, or as a time that
passes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, cast

from kvrelay.engine.batch import DeviceLost, LaunchedStep, LaunchingRunner, ModelRunner, StepResult, WorkerBatch
from kvrelay.telemetry.step_trace import StepEventName, StepTrace


class Flight(Protocol):
    """A step that runs, or will once the one before it has ended. One of the methods is called, once, on the event
    loop's thread."""

    def land(self) -> asyncio.Future[StepResult]:
        """Its end, with what its launch or its forward raised."""
        ...

    async def discard(self) -> None:
        """Waits until it ended; nothing of it is remembered. For what was launched behind a step that is not booked.
        Raises DeviceLost."""
        ...


class Launcher(Protocol):
    """All methods are called on the event loop's thread."""

    def can_launch_behind(self, batch: WorkerBatch) -> bool:
        """Whether the step may be launched before the one in flight has landed."""
        ...

    async def launch(self, batch: WorkerBatch, *, ahead: bool, behind: bool = False) -> Flight:
        """Returns once somebody is at it. `ahead`: it was planned while the one before ran. `behind`: that one has not
        landed, and `can_launch_behind` said yes; else it has."""
        ...

    def close(self) -> None:
        """Waits for what runs."""
        ...


MakeLauncher = Callable[[ModelRunner, StepTrace | None], Launcher]


def overlaps_steps(runner: ModelRunner, overlap: str, *, is_simulated: bool) -> bool:
    """Whether the step loop plans ahead, for `overlap` on, off or auto (see `WorkerConfig.overlap`)."""
    if overlap == "auto":
        return is_simulated or getattr(runner, "launches_ahead", False)
    return overlap == "on"


def choose_launcher(runner: ModelRunner, *, overlap: bool) -> MakeLauncher:
    """The launcher for a real device. With `overlap`, a runner that can launch steps ahead does so."""
    return AheadLauncher if overlap and getattr(runner, "launches_ahead", False) else ThreadLauncher


class _Alone:
    """A step behind which none is launched."""

    def __init__(self, landed: asyncio.Future[StepResult]) -> None:
        self._landed = landed

    def land(self) -> asyncio.Future[StepResult]:
        """See `Flight.land`."""
        return self._landed

    async def discard(self) -> None:
        """Never asked for: it was launched when the one before it had landed."""
        raise RuntimeError("a step that was not launched behind another one cannot be discarded")


class ThreadLauncher:
    """The runner computes, on a thread; the next step is launched when it has landed."""

    def __init__(self, runner: ModelRunner, trace: StepTrace | None) -> None:
        self._runner = runner
        self._trace = trace
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="step")

    def can_launch_behind(self, batch: WorkerBatch) -> bool:
        """Never."""
        return False

    async def launch(self, batch: WorkerBatch, *, ahead: bool, behind: bool = False) -> Flight:
        """Waits until the thread has begun: this one holds the interpreter's lock, and would keep it waiting."""
        loop, begun = asyncio.get_running_loop(), asyncio.Event()
        forward = loop.run_in_executor(self._executor, self._execute, batch, loop, begun)
        await begun.wait()
        return _Alone(forward)

    def close(self) -> None:
        self._executor.shutdown(wait=True)

    def _execute(self, batch: WorkerBatch, loop: asyncio.AbstractEventLoop, begun: asyncio.Event) -> StepResult:
        """On the thread."""
        if self._trace is not None:
            self._trace.note("forward_begins", batch.step)
        loop.call_soon_threadsafe(begun.set)
        if self._trace is None:
            return self._runner.execute(batch)
        try:
            return self._runner.execute(batch)
        finally:
            self._trace.note("forward_ends", batch.step)


class AheadLauncher:
    """The runner's device has a queue: one thread launches, another one waits for landings, both in the order of steps.

    So step N+1 is launched while N runs, and N's landing is noticed while N+1 is being launched.
    """

    def __init__(self, runner: ModelRunner, trace: StepTrace | None) -> None:
        """`runner` is a `LaunchingRunner`."""
        self._runner = cast(LaunchingRunner, runner)
        self._trace = trace
        self._launching = ThreadPoolExecutor(1, thread_name_prefix="launch")
        self._landing = ThreadPoolExecutor(1, thread_name_prefix="land")

    def can_launch_behind(self, batch: WorkerBatch) -> bool:
        """As the runner says."""
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
        """On the launching thread."""
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
        """See `Flight.land`."""
        return asyncio.get_running_loop().run_in_executor(self._landing, self._land)

    async def discard(self) -> None:
        """See `Flight.discard`."""
        await asyncio.get_running_loop().run_in_executor(self._landing, self._discard)

    def _land(self) -> StepResult:
        """On the landing thread, as below."""
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
            # else its launch failed: it has ended, and that its plan is cancelled is no news
        finally:
            self._note("forward_ends", self._step)


class TimedLauncher:
    """The runner answers at once, and the forward lands when the time that it names has passed: a timer, no thread.

    A step that was planned ahead begins when the one before it ended, however late the timer was: a device with a queue
    does not wait for the host either.
    """

    def __init__(self, runner: ModelRunner, trace: StepTrace | None) -> None:
        self._runner = runner
        self._trace = trace
        self._ended_at = 0.0

    def can_launch_behind(self, batch: WorkerBatch) -> bool:
        """Never: it takes no time to launch."""
        return False

    async def launch(self, batch: WorkerBatch, *, ahead: bool, behind: bool = False) -> Flight:
        """Does not wait. What the runner raises, the landing does."""
        loop = asyncio.get_running_loop()
        begins_at = self._ended_at if ahead else loop.time()
        forward: asyncio.Future[StepResult] = loop.create_future()
        if self._trace is not None:
            self._trace.note("forward_begins", batch.step)
        try:
            result = self._runner.execute(batch)
        except Exception as error:
            forward.set_exception(error)
            return _Alone(forward)
        self._ended_at = begins_at + result.forward_s + result.copy_s
        loop.call_at(self._ended_at, self._land, forward, result)
        return _Alone(forward)

    def close(self) -> None:
        """No forward outlives the loop that awaits it."""

    def _land(self, forward: asyncio.Future[StepResult], result: StepResult) -> None:
        if self._trace is not None:
            self._trace.note("forward_ends", result.step)
        if not forward.done():
            forward.set_result(result)
