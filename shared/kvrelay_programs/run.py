"""One run of a program: its calls, its deadline, its cancellation, and the streams of its states."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvrelay_programs.endpoint import Caller, Endpoint
from kvrelay_programs.errors import (
    DeadlineExceeded,
    EndpointError,
    Location,
    ProgramCancelled,
    ProgramError,
    caller_location,
)
from kvrelay_programs.graph import Beginnings
from kvrelay_programs.program_loop import program_loop
from kvrelay_programs.results import Usage

ResultT = TypeVar("ResultT")

CANCELLATION_S = 5.0  # that a call may take to end at the deadline; its own error names its line


@dataclass(frozen=True, slots=True)
class RunOptions:
    """`sampling`: fields of every request that a `gen` leaves out. `parallel` False makes each call wait for the one
    before, also of other forks. `fork_hint` False does not announce forks to the endpoint. With `surplus_tokens`, a
    call asks for at least so many tokens without its stop strings, and later steps use what it has too many.
    `beginnings`: with what all states of a fork begin, by the fork's line.
    """

    sampling: Mapping[str, Any] = field(default_factory=dict)
    stream: bool = False
    parallel: bool = True
    fork_hint: bool = True
    surplus_tokens: int = 0
    beginnings: Beginnings = field(default_factory=dict)


class Run:
    """What the states of a run share. Its methods but `cancel` and `wait` run on the program loop."""

    def __init__(self, endpoint: Endpoint, options: RunOptions, deadline_s: float | None) -> None:
        self.endpoint = endpoint
        self.options = options
        self.session = f"program-{uuid.uuid4().hex[:16]}"
        self.loop = program_loop()
        self.usage = Usage()
        self.failure: ProgramError | None = None  # set when the run is cancelled
        self.handled: set[ProgramError] = set()  # raised to the program by a read, which may catch them
        self._deadline = None if deadline_s is None else time.monotonic() + deadline_s
        self._streams: list[OrderedStream] = []

    def wait(self, future: Future[ResultT]) -> ResultT:
        """The result of an operation, for a thread of the program. Raises DeadlineExceeded if a call outlasts it."""
        limit_s = None if self._deadline is None else max(self._deadline - time.monotonic(), 0) + CANCELLATION_S
        try:
            return future.result(limit_s)
        except TimeoutError as error:
            raise DeadlineExceeded("a call has not ended after the deadline", caller_location()) from error

    async def call(self, what: str, location: Location, request: Callable[[Caller], Awaitable[ResultT]]) -> ResultT:
        """Raises ProgramError, which names the line, if the endpoint fails or the deadline passes."""
        left = None if self._deadline is None else self._deadline - time.monotonic()
        try:
            async with asyncio.timeout(left):
                return await request(Caller(self.session, left, self.usage))
        except TimeoutError as error:
            raise DeadlineExceeded(f"{what} was not complete at the deadline", location) from error
        except EndpointError as error:
            raise ProgramError(f"{what}: {error}", location) from error

    def new_stream(self) -> OrderedStream:
        """Callable from any thread."""
        stream = OrderedStream(self)
        self._streams.append(stream)
        return stream

    def cancel(self) -> None:
        """Ends all calls; the endpoint sees their connections close. Callable from any thread, more than once."""
        self.loop.call_soon_threadsafe(self._cancel)

    def end_session(self) -> None:
        """The program has ended, so the endpoint need not keep what only its calls share. Does not wait."""
        asyncio.run_coroutine_threadsafe(self._end_session(), self.loop)

    async def _end_session(self) -> None:
        await self.endpoint.end_session(self.session)

    def _cancel(self) -> None:
        if self.failure is None:
            self.failure = ProgramCancelled("the program was cancelled")
            for stream in self._streams:
                stream.cancel()


@dataclass(slots=True)
class Operation:
    """`run` may raise ProgramError. `fail` is called instead of it if an operation before failed, and after it if it
    fails itself.
    """

    run: Callable[[], Awaitable[None]]
    fail: Callable[[ProgramError], None]


class OrderedStream:
    """Runs the operations of one state one after another, on the program loop."""

    def __init__(self, run: Run) -> None:
        self.error: ProgramError | None = None
        self._run = run
        self._waiting: deque[Operation] = deque()
        self._task: asyncio.Task[None] | None = None
        self._is_in_operation = False

    def submit(self, operation: Operation) -> None:
        """Callable from any thread."""
        self._run.loop.call_soon_threadsafe(self._add, operation)

    def cancel(self) -> None:
        self.error = self.error or self._run.failure
        # A task that has not begun would end without failing its operations, which see the error instead.
        if self._task is not None and self._is_in_operation:
            self._task.cancel()

    def _add(self, operation: Operation) -> None:
        self._waiting.append(operation)
        if self._task is None:
            self._task = self._run.loop.create_task(self._work())

    async def _work(self) -> None:
        while self._waiting:
            operation = self._waiting.popleft()
            self.error = self.error or self._run.failure
            if self.error is None:
                self.error = await self._outcome(operation)
            if self.error is not None:
                operation.fail(self.error)
        self._task = None

    async def _outcome(self, operation: Operation) -> ProgramError | None:
        self._is_in_operation = True
        try:
            await operation.run()
        except ProgramError as error:
            return error
        except asyncio.CancelledError:
            return self._run.failure or ProgramCancelled("the program was cancelled")
        except Exception as error:  # a fault of this package must not leave the program waiting
            return ProgramError(f"{type(error).__name__}: {error}")
        finally:
            self._is_in_operation = False
        return None
