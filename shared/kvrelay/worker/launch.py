"""How a step's forward runs beside the event loop: on a thread of its own, or as a time that passes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from kvrelay.engine.batch import ModelRunner, StepResult, WorkerBatch
from kvrelay.telemetry.step_trace import StepTrace


class Launcher(Protocol):
    """Runs one forward at a time. All methods are called on the event loop's thread."""

    async def launch(self, batch: WorkerBatch, *, ahead: bool) -> asyncio.Future[StepResult]:
        """Returns once the forward runs. `ahead`: it was planned while the one before ran, which has just landed."""
        ...

    def close(self) -> None:
        """Waits for a forward that runs."""
        ...


MakeLauncher = Callable[[ModelRunner, StepTrace | None], Launcher]


class ThreadLauncher:
    """The runner computes, on a thread."""

    def __init__(self, runner: ModelRunner, trace: StepTrace | None) -> None:
        self._runner = runner
        self._trace = trace
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="step")

    async def launch(self, batch: WorkerBatch, *, ahead: bool) -> asyncio.Future[StepResult]:
        """Waits until the thread has begun: this one holds the interpreter's lock, and would keep it waiting."""
        loop, begun = asyncio.get_running_loop(), asyncio.Event()
        forward = loop.run_in_executor(self._executor, self._execute, batch, loop, begun)
        await begun.wait()
        return forward

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


class TimedLauncher:
    """The runner answers at once, and the forward lands when the time that it names has passed: a timer, no thread.

    A step that was planned ahead begins when the one before it ended, however late the timer was: a device with a queue
    does not wait for the host either.
    """

    def __init__(self, runner: ModelRunner, trace: StepTrace | None) -> None:
        self._runner = runner
        self._trace = trace
        self._ended_at = 0.0

    async def launch(self, batch: WorkerBatch, *, ahead: bool) -> asyncio.Future[StepResult]:
        """Does not wait. What the runner raises, the future does."""
        loop = asyncio.get_running_loop()
        begins_at = self._ended_at if ahead else loop.time()
        forward: asyncio.Future[StepResult] = loop.create_future()
        if self._trace is not None:
            self._trace.note("forward_begins", batch.step)
        try:
            result = self._runner.execute(batch)
        except Exception as error:
            forward.set_exception(error)
            return forward
        self._ended_at = begins_at + result.forward_s + result.copy_s
        loop.call_at(self._ended_at, self._land, forward, result)
        return forward

    def close(self) -> None:
        """No forward outlives the loop that awaits it."""

    def _land(self, forward: asyncio.Future[StepResult], result: StepResult) -> None:
        if self._trace is not None:
            self._trace.note("forward_ends", result.step)
        if not forward.done():
            forward.set_result(result)
