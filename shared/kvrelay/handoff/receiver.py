"""The decode side of a handoff: one state machine per sequence, no I/O.

1. ASKED        waits in the queue and holds nothing; is granted when there is room.
2. RESERVED     slots are granted and the cached prefix is pinned; nothing has arrived yet.
3. FILLING      some blocks or the handoff message have arrived; the commit needs all blocks and the message.
4. RUNNING      committed: the scheduler owns the sequence. Terminal, unless the scheduler refuses the sequence.
5. QUARANTINED  ended without a commit, but the sender may still write into the slots. They are freed after Drained, or
                when the sender's process has provably ended.
6. FREED        holds nothing. Terminal.

Decode never runs before every block of the prompt has landed and the handoff message has arrived, in either order. Each
block is written once for a reservation. If one arrives corrupted, or does not arrive, the reservation ends, and prefill
makes another one.

`incoming_handoffs.py` of the decode service carries out the instructions. Events are prefill's messages, this worker's
own grant, what the transport reports, and a few of this worker.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from kvrelay.handoff.transports.base import Corrupted, Landed
from kvrelay.protocol.messages import Abort, Cancel, Granted, Handoff, Refused, Released
from kvrelay.state_machine import Transition, TransitionTable, find_transition, transition_table


class ReceiverState(StrEnum):
    """The module's docstring describes each state."""

    ASKED = "asked"
    RESERVED = "reserved"
    FILLING = "filling"
    RUNNING = "running"
    QUARANTINED = "quarantined"
    FREED = "freed"


class BlocksOverdue(msgspec.Struct, frozen=True):
    """The handoff message is here, and its blocks are not, although they are due."""

    reason: str


class PrefillLost(msgspec.Struct, frozen=True):
    """The prefill worker is silent or gone. This alone does not prove that no write will land."""


class SlotsSafe(msgspec.Struct, frozen=True):
    """The sender has answered Drained, or its process has provably ended: no write will land in the slots."""


class CommitRefused(msgspec.Struct, frozen=True):
    """The scheduler did not take the committed sequence. Prefill still holds its KV."""

    reason: str


ReceiverHandoffEvent = (
    Granted | Landed | Corrupted | Handoff | BlocksOverdue | Abort | Cancel | PrefillLost | SlotsSafe | CommitRefused
)


class Commit(msgspec.Struct, frozen=True):
    """All blocks and the handoff message are here: pass the sequence to the scheduler and send Committed."""

    handoff: Handoff


class StopReceiving(msgspec.Struct, frozen=True):
    """Accept no more blocks of this reservation."""

    reservation: str


class KeepBlocks(msgspec.Struct, frozen=True):
    """The slots may still be written. Do not reuse them before `SlotsSafe`."""


class FreeBlocks(msgspec.Struct, frozen=True):
    """Free the reservation's blocks. The first `num_whole` blocks of the prompt are complete and may be cached."""

    num_whole: int


ReceiverInstruction = Commit | StopReceiving | KeepBlocks | FreeBlocks | Refused | Released
"""`Refused` and `Released` are messages to prefill."""


class ReceiverHandoff:
    """Pass every event to `handle` and carry out the instructions that it returns, in order.

    `is_one_sided`: the sender writes into the slots itself, so writes may land after the reservation has ended.
    """

    def __init__(self, *, is_one_sided: bool) -> None:
        self.state = ReceiverState.ASKED
        self._is_one_sided = is_one_sided
        self._granted: Granted | None = None
        self._missing: set[int] = set()
        self._handoff: Handoff | None = None

    def handle(self, event: ReceiverHandoffEvent) -> list[ReceiverInstruction]:
        """Raises IllegalEvent, and changes nothing, if the event cannot happen in this state."""
        return find_transition(TRANSITIONS, self.state, event)(self, event)

    @property
    def reservation(self) -> str:
        """The name of the reservation; empty before the grant."""
        return self._granted.reservation if self._granted is not None else ""

    @property
    def awaits_blocks(self) -> bool:
        """Returns whether the handoff message is here and blocks are missing."""
        return self.state is ReceiverState.FILLING and self._handoff is not None

    @property
    def num_granted(self) -> int:
        """Blocks that prefill pushes."""
        return len(self._granted.slots) if self._granted is not None else 0

    @property
    def num_received(self) -> int:
        """Granted blocks that have landed."""
        return self.num_granted - len(self._missing)

    @property
    def first_block(self) -> int:
        """Index of the first block that prefill sends; those before it were in decode's cache."""
        return self._granted.first_block if self._granted is not None else 0

    # -- transitions --------------------------------------------------------------------------------------------------

    def _grant(self, granted: Granted) -> list[ReceiverInstruction]:
        self.state = ReceiverState.RESERVED
        self._granted = granted
        self._missing = set(range(granted.first_block, granted.first_block + len(granted.slots)))
        return []

    def _landed(self, event: Landed) -> list[ReceiverInstruction]:
        if event.reservation != self.reservation:
            return []
        self.state = ReceiverState.FILLING
        self._missing.difference_update(event.blocks)
        return self._commit_if_complete()

    def _corrupted(self, event: Corrupted) -> list[ReceiverInstruction]:
        if event.reservation != self.reservation:
            return []
        return self._end(f"blocks {list(event.blocks)} came corrupted", transport_failed=True)

    def _received(self, message: Handoff) -> list[ReceiverInstruction]:
        if message.reservation != self.reservation:
            return []
        self.state = ReceiverState.FILLING
        self._handoff = message
        return self._commit_if_complete()

    def _overdue(self, event: BlocksOverdue) -> list[ReceiverInstruction]:
        return self._end(f"{len(self._missing)} blocks are missing: {event.reason}", transport_failed=True)

    def _aborted(self, event: Abort | PrefillLost) -> list[ReceiverInstruction]:
        return self._end(None)

    def _cancelled(self, message: Cancel) -> list[ReceiverInstruction]:
        return self._end(message.reason)

    def _safe(self, event: SlotsSafe) -> list[ReceiverInstruction]:
        return self._free()

    def _commit_refused(self, event: CommitRefused) -> list[ReceiverInstruction]:
        """Prefill still holds the KV and finds another decode worker."""
        return [Released(reservation=self.reservation, reason=event.reason), *self._free()]

    def _refuse(self, message: Cancel) -> list[ReceiverInstruction]:
        return [Refused(reason=message.reason), *self._free()]

    def _leave_queue(self, event: Abort | PrefillLost) -> list[ReceiverInstruction]:
        return self._free()

    def _ignore(self, *about: Any) -> list[ReceiverInstruction]:
        return []

    # -- inside -------------------------------------------------------------------------------------------------------

    def _commit_if_complete(self) -> list[ReceiverInstruction]:
        if self._missing or self._handoff is None:
            return []
        self.state = ReceiverState.RUNNING
        return [StopReceiving(self.reservation), Commit(self._handoff)]

    def _end(self, reason: str | None, *, transport_failed: bool = False) -> list[ReceiverInstruction]:
        """Ends a reservation without a commit. Without a reason prefill knows already, and gets no Released."""
        instructions: list[ReceiverInstruction] = [StopReceiving(self.reservation)]
        if reason is not None:
            released = Released(reservation=self.reservation, reason=reason, transport_failed=transport_failed)
            instructions.append(released)
        if self._is_one_sided:
            self.state = ReceiverState.QUARANTINED
            return [*instructions, KeepBlocks()]
        return [*instructions, *self._free()]

    def _free(self) -> list[ReceiverInstruction]:
        self.state = ReceiverState.FREED
        return [FreeBlocks(min(self._missing, default=self.first_block + self.num_granted))]


_M = ReceiverHandoff
_Row = dict[type[object], Transition[ReceiverInstruction]]

_WHILE_ASKED: _Row = {
    Granted: _M._grant,
    Handoff: _M._ignore,
    Abort: _M._leave_queue,
    Cancel: _M._refuse,
    PrefillLost: _M._leave_queue,
}
_WHILE_RECEIVING: _Row = {
    Landed: _M._landed,
    Corrupted: _M._corrupted,
    Handoff: _M._received,
    Abort: _M._aborted,
    Cancel: _M._cancelled,
    PrefillLost: _M._aborted,
}
# Messages and blocks that were under way when the reservation ended still arrive.
_AFTERWARDS: _Row = {
    Landed: _M._ignore,
    Corrupted: _M._ignore,
    Handoff: _M._ignore,
    Abort: _M._ignore,
    Cancel: _M._ignore,
    PrefillLost: _M._ignore,
}
TRANSITIONS: TransitionTable[ReceiverInstruction] = transition_table(
    {
        ReceiverState.ASKED: _WHILE_ASKED,
        ReceiverState.RESERVED: _WHILE_RECEIVING,
        ReceiverState.FILLING: _WHILE_RECEIVING | {BlocksOverdue: _M._overdue},
        ReceiverState.RUNNING: _AFTERWARDS | {CommitRefused: _M._commit_refused},
        ReceiverState.QUARANTINED: _AFTERWARDS | {SlotsSafe: _M._safe},
        ReceiverState.FREED: _AFTERWARDS,
    }
)
