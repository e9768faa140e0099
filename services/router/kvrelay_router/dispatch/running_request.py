"""The HTTP layer's end of a running request: what was delivered waits here until it is taken, or is pushed on.

A token that wakes a task costs more for the task than for the token. So a stream names who takes its deltas
(`push_to`), and its task sleeps in `deltas` while they pass it by.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

from kvrelay_router.dispatch.interface import (
    DeltaSink,
    GenerateRequest,
    RequestFailed,
    SequenceDelta,
    ServedBy,
    join_deltas,
)


class PushQueue:
    """Pushes what came for many requests in one callback, once everything that arrived with it is there: tokens of one
    sequence that arrived together go out together."""

    def __init__(self) -> None:
        self._due: list[RunningRequest] = []

    def soon(self, request: RunningRequest) -> None:
        """On the next turn of the event loop. More than once is as good as once."""
        if not self._due:
            asyncio.get_running_loop().call_soon(self._push)
        self._due.append(request)

    def _push(self) -> None:
        due, self._due = self._due, []
        for request in due:
            request.push()


class RunningRequest:
    """A `RequestHandle`. `on_stop` and `on_cancel` lead back to the dispatcher, whose requests share `pushes`."""

    def __init__(
        self,
        request: GenerateRequest,
        on_stop: Callable[[RunningRequest, int], None],
        on_cancel: Callable[[RunningRequest], None],
        pushes: PushQueue | None = None,
    ) -> None:
        self.request = request
        self.served_by = ServedBy()
        self._on_stop = on_stop
        self._on_cancel = on_cancel
        self._fresh: list[SequenceDelta] = []  # in the order in which they came
        self._unfinished = set(range(request.num_sequences))
        self._error: RequestFailed | None = None
        self._waiter: asyncio.Future[None] | None = None  # of whoever sleeps in `deltas`
        self._pushes = pushes or PushQueue()
        self._sink: DeltaSink | None = None
        self._sink_began = False  # it was ready once
        self._sink_error: Exception | None = None

    @property
    def is_over(self) -> bool:
        """Nothing more will be delivered."""
        return not self._unfinished or self._error is not None

    # -- for the HTTP layer -------------------------------------------------------------------------------------------

    async def deltas(self) -> AsyncGenerator[list[SequenceDelta], None]:
        """See `RequestHandle`. Whoever leaves it early cancels the request."""
        try:
            while True:
                if self._sink_error is not None:
                    raise self._sink_error
                elif self._fresh:
                    yield self._take()
                elif self._error is not None:
                    raise self._error
                elif not self._unfinished:
                    return
                else:
                    self._waiter = asyncio.get_running_loop().create_future()
                    await self._waiter
        finally:
            self._waiter = None
            self._sink = None  # it knows this request in turn: without a cycle all of it goes at once
            self.cancel()

    def push_to(self, sink: DeltaSink) -> None:
        """See `RequestHandle`."""
        self._sink = sink

    def stop(self, sequence: int) -> None:
        """See `RequestHandle`."""
        self._fresh = [delta for delta in self._fresh if delta.sequence != sequence]
        if sequence in self._unfinished and self._error is None:
            self._on_stop(self, sequence)

    def cancel(self) -> None:
        """See `RequestHandle`."""
        if not self.is_over:
            self._on_cancel(self)

    # -- for the dispatcher -------------------------------------------------------------------------------------------

    def deliver(self, delta: SequenceDelta) -> None:
        """Queues a delta; constant work, whatever waits already."""
        if self._waiter is not None:
            if self._sink is None:
                self._wake()
            elif not self._fresh:
                # The first of all need its task, for an answer's head: at once, before others' tokens are pushed.
                if self._sink_began or self._begin():
                    self._pushes.soon(self)
                else:
                    self._wake()
        self._fresh.append(delta)

    def push(self) -> None:
        """Gives the sink what waits, unless it belongs to `deltas` by now. What the sink raises, `deltas` raises."""
        sink = self._sink
        if sink is None or self._waiter is None or not self._fresh:
            return
        if not sink.is_ready():
            self._wake()
            return
        try:
            sink.take(self._take())
        except Exception as error:
            self._sink_error = error
            self._wake()

    def finish(self, sequence: int) -> None:
        """Nothing more comes of this sequence."""
        self._unfinished.discard(sequence)
        self._wake()

    def fail(self, error: RequestFailed) -> None:
        """Nothing more comes at all; what was delivered can still be taken."""
        if not self.is_over:
            self._error = error
            self._wake()

    def _begin(self) -> bool:
        self._sink_began = self._sink is not None and self._sink.is_ready()
        return self._sink_began

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _take(self) -> list[SequenceDelta]:
        """What waits, as one delta a sequence."""
        fresh, self._fresh = self._fresh, []
        if len(fresh) == 1:
            return fresh
        if self.request.num_sequences == 1:
            return [join_deltas(fresh)]
        by_sequence: dict[int, list[SequenceDelta]] = {}
        for delta in fresh:
            by_sequence.setdefault(delta.sequence, []).append(delta)
        return [join_deltas(deltas) for deltas in by_sequence.values()]
