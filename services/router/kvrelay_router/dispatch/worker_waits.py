"""The sequences that wait for a ready worker, in their order of arrival.

Nothing is polled: the fleet watch calls `look_again` after each event that may have made a worker ready. Thousands of
sequences may wait when a worker comes back, so they are placed in slices, with a turn of the event loop between two.

At most one suspect has an unproven attempt at a time. A suspect is a sequence that was lost with several workers, each
time together with others. So the one that crashes workers exhausts its retry budget without those of the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvrelay_router.dispatch.running_request import ActiveSequence, Search

PLACED_PER_TURN = 16
"""A placement takes 0.1 to 0.3 ms."""


class WorkerWaits:
    """`is_possible` returns whether a search may succeed, at no cost. `look` then searches; if that succeeds, it calls
    `remove`."""

    def __init__(
        self, is_possible: Callable[[ActiveSequence, Search], bool], look: Callable[[ActiveSequence, Search], None]
    ) -> None:
        self._is_possible = is_possible
        self._look = look
        self._waiting: dict[ActiveSequence, None] = {}
        self._left: list[ActiveSequence] = []  # those that the present round has not reached
        self.suspect: ActiveSequence | None = None  # the one whose attempt is not proven

    def __len__(self) -> int:
        return len(self._waiting)

    # -- waiting ------------------------------------------------------------------------------------------------------

    def add(self, sequence: ActiveSequence, search: Search, timeout_s: float, on_timeout: Callable[[], None]) -> None:
        """The sequence waits. After `timeout_s` seconds `on_timeout` is called; it must end the wait."""
        sequence.waiting_for = search
        sequence.waiting_timer = asyncio.get_running_loop().call_later(timeout_s, on_timeout)
        self._waiting[sequence] = None
        sequence.running.worker_awaited(sequence.index)

    def pause(self, sequence: ActiveSequence, delay_s: float, then: Callable[[], None]) -> None:
        """Calls `then` after the delay. A worker that becomes ready does not end it."""
        sequence.waiting_timer = asyncio.get_running_loop().call_later(delay_s, then)

    def remove(self, sequence: ActiveSequence) -> None:
        """Ends the wait or the pause, if any."""
        if sequence.waiting_timer is not None:
            sequence.waiting_timer.cancel()
        sequence.waiting_timer = None
        if sequence.waiting_for is not None:
            sequence.waiting_for = None
            del self._waiting[sequence]
            sequence.running.worker_found(sequence.index)

    def look_again(self) -> None:
        """Looks for workers for all that wait."""
        if self._waiting:
            is_running, self._left = bool(self._left), list(reversed(self._waiting))
            if not is_running:
                self._look_for_some()

    def _look_for_some(self) -> None:
        num_tried = 0
        while self._left and num_tried < PLACED_PER_TURN:
            sequence = self._left.pop()
            search = sequence.waiting_for
            if search is not None and self._is_possible(sequence, search):
                num_tried += 1
                self._look(sequence, search)
        if self._left:
            asyncio.get_running_loop().call_soon(self._look_for_some)

    # -- suspects -----------------------------------------------------------------------------------------------------

    def may_try(self, sequence: ActiveSequence) -> bool:
        """Returns whether a suspect may start its attempt now."""
        return self.suspect in (None, sequence)

    def try_suspect(self, sequence: ActiveSequence) -> None:
        """A suspect starts an attempt."""
        self.suspect = sequence

    def suspect_got_tokens(self) -> None:
        """With enough tokens the suspect is cleared, and the next one may start."""
        if self.suspect is not None and self.suspect.is_proven:
            self.attempt_ended(self.suspect)

    def attempt_ended(self, sequence: ActiveSequence) -> None:
        """The sequence's attempt is over. If it was a suspect's, the next one may start."""
        if sequence is self.suspect:
            self.suspect = None
            if self._waiting:
                asyncio.get_running_loop().call_soon(self.look_again)
