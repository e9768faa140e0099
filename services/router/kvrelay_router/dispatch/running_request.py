"""The HTTP layer's end of a running request: passes deltas on to the sink, or keeps them until they are taken.

Waking a task per token costs more than handling the token, so deltas go to the sink in a callback. It runs once in a
turn of the event loop, for all requests: tokens of one sequence that arrived together go out together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from msgspec.structs import replace

from kvrelay.text.sequence_delta import SequenceDelta, join_deltas
from kvrelay_router.dispatch.interface import DeltaSink, GenerateRequest, RequestFailed, ServedBy
from kvrelay_router.loop_share import LoopShare

MAX_TAKEN = 128
"""Deltas that are taken at a time: a few milliseconds of work, even if each brings 20 log-probabilities."""
MAX_TAKEN_TOKENS = 2048
"""As are their tokens: forced tokens come many at a time, and each may have to be compared with stop strings."""

LIGHT_PUSHES = 16
"""Pushes of one token each, after which the time is asked for: about a millisecond with 20 log-probabilities each."""


class PushQueue:
    """The requests that have deltas for their sinks."""

    def __init__(self) -> None:
        self._requests: list[RunningRequest] = []

    def add(self, request: RunningRequest) -> None:
        """Pushes the request's deltas in the next turn of the event loop."""
        if not self._requests:
            asyncio.get_running_loop().call_soon(self._push)
        self._requests.append(request)

    def _push(self) -> None:
        """Pushes for the time of a slice. The requests that are left come first in the next turn."""
        requests, self._requests = self._requests, []
        if len(requests) == 1:
            requests[0].push()
            return
        share = LoopShare()
        for number, request in enumerate(requests, 1):
            # Asking for the time after each token would cost as much as a tenth of the push.
            if (request.push() or not number % LIGHT_PUSHES) and share.is_used_up and number < len(requests):
                if not self._requests:
                    asyncio.get_running_loop().call_soon(self._push)
                self._requests = requests[number:] + self._requests
                return


class RunningRequest:
    """`on_stop` and `on_cancel` belong to the dispatcher, whose requests share one `queue`.

    `error` is set if the request failed; deltas that came before can still be taken.
    """

    def __init__(
        self,
        request: GenerateRequest,
        on_stop: Callable[[RunningRequest, int], None],
        on_cancel: Callable[[RunningRequest], None],
        queue: PushQueue | None = None,
    ) -> None:
        self.request = request
        self.served_by = ServedBy()
        self.error: RequestFailed | None = None
        self._on_stop = on_stop
        self._on_cancel = on_cancel
        self._queue = queue or PushQueue()
        self._unfinished = set(range(request.num_sequences))
        self._deltas: list[SequenceDelta] = []  # deltas in their order of arrival
        self._sink: DeltaSink | None = None
        self._sink_was_ready = False
        self._awaiting_worker: set[int] = set()

    @property
    def awaits_worker(self) -> bool:
        """True while no worker is ready for a sequence. The sink is woken when that begins."""
        return bool(self._awaiting_worker) and not self.is_over

    @property
    def is_over(self) -> bool:
        """True if nothing more will be delivered."""
        return not self._unfinished or self.error is not None

    @property
    def has_deltas(self) -> bool:
        """True if `take` would return deltas."""
        return bool(self._deltas)

    # -- for the HTTP layer -------------------------------------------------------------------------------------------

    def connect(self, sink: DeltaSink) -> None:
        """From now on the sink gets all deltas, in order, while it can take them. Other deltas wait for `take`."""
        self._sink = sink

    def disconnect(self) -> None:
        """The sink gets nothing more. Must be called, because the two refer to each other."""
        self._sink = None

    def take(self) -> list[SequenceDelta]:
        """Returns the deltas that wait, joined to one per sequence. If they are many, some wait for the next call."""
        deltas, self._deltas = self._deltas, []
        if len(deltas) <= 1:
            return [self._first_texts(deltas[0])] if deltas and deltas[0].beams else deltas
        num_taken = num_tokens = 0
        for delta in deltas[:MAX_TAKEN]:
            num_tokens += len(delta.token_ids)
            if num_taken and num_tokens > MAX_TAKEN_TOKENS:
                break
            num_taken += 1
        if num_taken < len(deltas):
            deltas, self._deltas = deltas[:num_taken], deltas[num_taken:]
        return self._joined(deltas)

    def _first_texts(self, delta: SequenceDelta) -> SequenceDelta:
        """Takes the first texts of a beam search. The others wait for the next call."""
        num_taken = num_tokens = 0
        for beam in delta.beams:
            num_tokens += len(beam.token_ids)
            if num_taken and num_tokens > MAX_TAKEN_TOKENS:
                break
            num_taken += 1
        num_left = len(delta.beams) - num_taken
        if not num_left:
            return delta
        self._deltas = [replace(delta, beams=delta.beams[num_taken:], cached_tokens=None, usage=None)]
        return replace(delta, beams=delta.beams[:num_taken], beams_left=num_left)

    def _joined(self, deltas: list[SequenceDelta]) -> list[SequenceDelta]:
        """Joins deltas to one per sequence."""
        if self.request.num_sequences == 1:
            return [join_deltas(deltas)]
        by_sequence: dict[int, list[SequenceDelta]] = {}
        for delta in deltas:
            by_sequence.setdefault(delta.sequence, []).append(delta)
        return [join_deltas(each) for each in by_sequence.values()]

    def stop(self, sequence: int) -> None:
        """Ends a sequence whose text has a stop string. Its later tokens are dropped."""
        self._deltas = [delta for delta in self._deltas if delta.sequence != sequence]
        if sequence in self._unfinished and self.error is None:
            self._on_stop(self, sequence)

    def cancel(self) -> None:
        """Frees everything of this request on all workers. Idempotent, and without effect after the end."""
        if not self.is_over:
            self._on_cancel(self)

    # -- for the dispatcher -------------------------------------------------------------------------------------------

    def deliver(self, delta: SequenceDelta) -> None:
        if self._deltas:  # the sink has been told
            self._deltas.append(delta)
            return
        self._deltas.append(delta)
        sink = self._sink
        if sink is None:
            return
        if self._sink_was_ready or (sink.is_waiting and sink.can_take()):
            self._sink_was_ready = True
            self._queue.add(self)
        else:
            # A stream's first delta waits for its task, which writes the HTTP head. Waking the task now and not in the
            # next turn lets heads go out before the deltas of other requests.
            sink.wake()

    def push(self) -> bool:
        """Gives the deltas to the sink. Returns whether they brought more than one token."""
        sink, deltas = self._sink, self._deltas
        if sink is None or not deltas:
            return False
        if not (sink.is_waiting and sink.can_take()):
            sink.wake()
            return False
        if len(deltas) == 1 and not deltas[0].beams:  # nearly always: as `take`, without the call
            self._deltas = []
            sink.take(deltas)
            return len(deltas[0].token_ids) > 1
        sink.take(self.take())
        if self._deltas:
            self._queue.add(self)
        return True

    def worker_awaited(self, sequence: int) -> None:
        """This sequence starts to wait for a worker."""
        self._awaiting_worker.add(sequence)
        self._wake()

    def worker_found(self, sequence: int) -> None:
        """The sequence's wait is over."""
        self._awaiting_worker.discard(sequence)

    def finish(self, sequence: int) -> None:
        self._unfinished.discard(sequence)
        self._wake()

    def fail(self, error: RequestFailed) -> None:
        if not self.is_over:
            self.error = error
            self._wake()

    def _wake(self) -> None:
        if self._sink is not None:
            self._sink.wake()
