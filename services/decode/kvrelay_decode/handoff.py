"""The decode side of a handoff, one machine per sequence: events in, instructions out, no I/O.

1. ASKED        wished for but deferred: holds nothing; asked for again when there is room.
2. RESERVED     slots are granted, the cached prefix is pinned; nothing has come yet.
3. FILLING      blocks land, or the handoff message is here; both must be complete.
4. RUNNING      committed: the scheduler owns the sequence. Terminal for the handoff, unless the scheduler does not
                take it.
5. QUARANTINED  given up while the sender may still write into the slots; they wait for Drained, or for proof that the
                sender is gone.
6. FREED        holds nothing. Terminal.

Decode never runs before every block of the prompt has landed and the handoff has come, in whatever order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from kvrelay.protocol.messages import Handoff
from kvrelay.worker.transitions import moved


class ReceiverState(StrEnum):
    """See the module's text."""

    ASKED = "asked"
    RESERVED = "reserved"
    FILLING = "filling"
    RUNNING = "running"
    QUARANTINED = "quarantined"
    FREED = "freed"


TRANSITIONS: dict[ReceiverState, frozenset[ReceiverState]] = {
    ReceiverState.ASKED: frozenset({ReceiverState.RESERVED, ReceiverState.FREED}),
    ReceiverState.RESERVED: frozenset({ReceiverState.FILLING, ReceiverState.QUARANTINED, ReceiverState.FREED}),
    ReceiverState.FILLING: frozenset({ReceiverState.RUNNING, ReceiverState.QUARANTINED, ReceiverState.FREED}),
    ReceiverState.RUNNING: frozenset({ReceiverState.FREED}),
    ReceiverState.QUARANTINED: frozenset({ReceiverState.FREED}),
    ReceiverState.FREED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class Commit:
    """Everything is here: hand the sequence to the scheduler and tell prefill."""

    handoff: Handoff


@dataclass(frozen=True, slots=True)
class StopReceiving:
    """Nothing of this reservation may be taken in any more."""

    reservation: str


@dataclass(frozen=True, slots=True)
class Quarantine:
    """The slots may still be written: nobody may use them."""


@dataclass(frozen=True, slots=True)
class FreeBlocks:
    """Let go of the reservation's blocks. The first `num_whole` prompt blocks are complete and true."""

    num_whole: int


@dataclass(frozen=True, slots=True)
class AskForMissing:
    """Ask prefill to push these blocks again."""

    reservation: str
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TellReleased:
    """Tell prefill that the reservation was given up."""

    reservation: str
    reason: str


Instruction = Commit | StopReceiving | Quarantine | FreeBlocks | AskForMissing | TellReleased


class ReceiverHandoff:
    """The machine. `needs_quarantine`: the transport writes one-sidedly, so giving up is not enough."""

    def __init__(self) -> None:
        self.state = ReceiverState.ASKED
        self.reservation = ""
        self._needs_quarantine = False
        self._first_block = 0
        self._num_blocks = 0
        self._missing: set[int] = set()
        self._handoff: Handoff | None = None

    @property
    def num_missing(self) -> int:
        """Granted blocks that have not landed."""
        return len(self._missing)

    @property
    def num_received(self) -> int:
        """Granted blocks that have landed."""
        return self._num_blocks - self._first_block - len(self._missing)

    @property
    def first_block(self) -> int:
        """Blocks before this one were in decode's cache."""
        return self._first_block

    def granted(self, reservation: str, first_block: int, num_blocks: int, *, needs_quarantine: bool) -> None:
        """Slots are held for the prompt's blocks [first_block, num_blocks)."""
        self._move(ReceiverState.RESERVED)
        self.reservation = reservation
        self._first_block = first_block
        self._num_blocks = num_blocks
        self._needs_quarantine = needs_quarantine
        self._missing = set(range(first_block, num_blocks))

    def landed(self, reservation: str, indices: Iterable[int]) -> list[Instruction]:
        """Blocks are completely in their slots. Those of another reservation count for nothing."""
        if reservation != self.reservation or self.state not in (ReceiverState.RESERVED, ReceiverState.FILLING):
            return []
        if self.state is ReceiverState.RESERVED:
            self._move(ReceiverState.FILLING)
        self._missing.difference_update(indices)
        return self._commit_if_complete()

    def handed(self, message: Handoff) -> list[Instruction]:
        """Prefill's last word on the sequence. A repeated one changes nothing."""
        if message.reservation != self.reservation or self.state not in (
            ReceiverState.RESERVED,
            ReceiverState.FILLING,
        ):
            return []
        if self.state is ReceiverState.RESERVED:
            self._move(ReceiverState.FILLING)
        self._handoff = message
        return self._commit_if_complete()

    def overdue(self) -> list[Instruction]:
        """The handoff came a while ago and blocks are still missing: they were lost on the way.

        Where the sender writes by itself nothing is lost, a write is late or its sender knows that it failed; asked for
        again, the late one would land when the slots may have another owner.
        """
        if self.state is not ReceiverState.FILLING or self._handoff is None or not self._missing:
            return []
        if self._needs_quarantine:
            return []
        return [AskForMissing(self.reservation, tuple(sorted(self._missing)))]

    def aborted(self) -> list[Instruction]:
        """Prefill gave up; it sends Drained when nothing is in flight."""
        return self._give_up(tell=None)

    def cancel(self, reason: str) -> list[Instruction]:
        """The client is gone, the router is, or this worker is leaving."""
        return self._give_up(tell=reason)

    def sender_lost(self) -> list[Instruction]:
        """Prefill is silent, or gone. That alone does not prove that nothing will land."""
        return self._give_up(tell=None)

    def drained(self) -> list[Instruction]:
        """No write is or will be in flight: prefill says so, or its process is no more."""
        if self.state is not ReceiverState.QUARANTINED:
            return []
        self._move(ReceiverState.FREED)
        return [FreeBlocks(self._num_whole())]

    def not_adopted(self, reason: str) -> list[Instruction]:
        """The scheduler did not take what was committed. Prefill still holds it and finds another decode worker."""
        self._move(ReceiverState.FREED)
        return [TellReleased(self.reservation, reason), FreeBlocks(self._num_whole())]

    def _commit_if_complete(self) -> list[Instruction]:
        if self._missing or self._handoff is None:
            return []
        self._move(ReceiverState.RUNNING)
        return [StopReceiving(self.reservation), Commit(self._handoff)]

    def _give_up(self, tell: str | None) -> list[Instruction]:
        if self.state is ReceiverState.ASKED:
            self._move(ReceiverState.FREED)
            return []
        if self.state not in (ReceiverState.RESERVED, ReceiverState.FILLING):
            return []
        instructions: list[Instruction] = [StopReceiving(self.reservation)]
        if tell is not None:
            instructions.append(TellReleased(self.reservation, tell))
        if self._needs_quarantine:
            self._move(ReceiverState.QUARANTINED)
            return [*instructions, Quarantine()]
        self._move(ReceiverState.FREED)
        return [*instructions, FreeBlocks(self._num_whole())]

    def _num_whole(self) -> int:
        return min(self._missing, default=self._num_blocks)

    def _move(self, state: ReceiverState) -> None:
        self.state = moved(TRANSITIONS, self.state, state)
