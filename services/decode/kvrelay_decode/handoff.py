"""The decode side of a handoff, one machine per sequence: events in, instructions out, no I/O.

1. ASKED        wished for but deferred: holds nothing; asked for again when there is room.
2. RESERVED     slots are granted, the cached prefix is pinned; nothing has come yet.
3. FILLING      blocks land, or the handoff message is here; both must be complete.
4. RUNNING      committed: the scheduler owns the sequence. Terminal for the handoff, unless the scheduler does not
                take it.
5. QUARANTINED  given up while the sender may still write into the slots; they wait for Drained, or for proof that the
                sender is gone.
6. FREED        holds nothing. Terminal.

Decode never runs before every block of the prompt has landed and the handoff has come, in whatever order. Blocks that
do not come, or come corrupted, are asked for again, a bounded number of times. Where the sender writes one-sidedly, its
answer to the last of these questions is awaited too: until then a repeated write may be under way, and would hit a tail
block into which this worker writes its own tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from kvrelay.protocol.messages import Handoff
from kvrelay.worker.transitions import moved

MAX_SILENT_ROUNDS = 6
"""So often blocks are asked for again without any of them coming."""
MAX_CORRUPTIONS = 3
"""So often one block may come corrupted."""


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
    """Ask prefill to push these blocks again. `number` counts the questions of this reservation."""

    reservation: str
    blocks: tuple[int, ...]
    number: int
    corrupted: bool


@dataclass(frozen=True, slots=True)
class TellReleased:
    """Tell prefill that the reservation was given up; `transport_failed`: because blocks did not come, or not true."""

    reservation: str
    reason: str
    transport_failed: bool = False


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
        self._num_asked = 0
        self._num_silent_rounds = 0
        self._num_corruptions: Counter[int] = Counter()

    @property
    def num_silent_rounds(self) -> int:
        """How often blocks were asked for again since the last one landed."""
        return self._num_silent_rounds

    @property
    def awaits_blocks(self) -> bool:
        """Whether the handoff message came, and blocks or the answer to a question for them did not."""
        return self.state is ReceiverState.FILLING and self._handoff is not None

    @property
    def awaits_resend(self) -> bool:
        """Whether blocks were asked for again, and the handoff is not complete yet."""
        return self.state is ReceiverState.FILLING and self._num_asked > 0

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
        self._num_silent_rounds = 0
        return self._commit_if_complete()

    def corrupted(self, reservation: str, indices: Iterable[int]) -> list[Instruction]:
        """Blocks came with other bytes than were sent."""
        if reservation != self.reservation or self.state not in (ReceiverState.RESERVED, ReceiverState.FILLING):
            return []
        if self.state is ReceiverState.RESERVED:
            self._move(ReceiverState.FILLING)
        wrong = self._missing.intersection(indices)
        if not wrong:
            return []
        self._num_corruptions.update(wrong)
        worst, num_times = max(self._num_corruptions.items(), key=lambda item: item[1])
        if num_times > MAX_CORRUPTIONS:
            return self._give_up(f"block {worst} came corrupted {num_times} times", transport_failed=True)
        return [self._ask_for(wrong, corrupted=True)]

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
        """The handoff came a while ago, and blocks or the answer to a question are still missing."""
        if not self.awaits_blocks:
            return []
        if self._num_silent_rounds == MAX_SILENT_ROUNDS:
            cause = f"{len(self._missing)} blocks did not come, although asked for {MAX_SILENT_ROUNDS} times"
            return self._give_up(cause, transport_failed=True)
        self._num_silent_rounds += 1
        return [self._ask_for(self._missing, corrupted=False)]

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
        if self._needs_quarantine and self._handoff.resend < self._num_asked:
            return []
        self._move(ReceiverState.RUNNING)
        return [StopReceiving(self.reservation), Commit(self._handoff)]

    def _ask_for(self, blocks: Iterable[int], *, corrupted: bool) -> AskForMissing:
        self._num_asked += 1
        return AskForMissing(self.reservation, tuple(sorted(blocks)), self._num_asked, corrupted)

    def _give_up(self, tell: str | None, *, transport_failed: bool = False) -> list[Instruction]:
        if self.state is ReceiverState.ASKED:
            self._move(ReceiverState.FREED)
            return []
        if self.state not in (ReceiverState.RESERVED, ReceiverState.FILLING):
            return []
        instructions: list[Instruction] = [StopReceiving(self.reservation)]
        if tell is not None:
            instructions.append(TellReleased(self.reservation, tell, transport_failed))
        if self._needs_quarantine:
            self._move(ReceiverState.QUARANTINED)
            return [*instructions, Quarantine()]
        self._move(ReceiverState.FREED)
        return [*instructions, FreeBlocks(self._num_whole())]

    def _num_whole(self) -> int:
        return min(self._missing, default=self._num_blocks)

    def _move(self, state: ReceiverState) -> None:
        self.state = moved(TRANSITIONS, self.state, state)
