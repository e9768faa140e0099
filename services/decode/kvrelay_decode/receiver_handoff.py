"""The decode side of a handoff: one state machine per sequence, events in and instructions out, no I/O.

1. ASKED        deferred: holds nothing, and is granted when there is room.
2. RESERVED     slots are granted and the cached prefix is pinned; nothing has arrived yet.
3. FILLING      some blocks or the handoff message have arrived; the commit needs all blocks and the message.
4. RUNNING      committed: the scheduler owns the sequence. Terminal, unless the scheduler refuses the sequence.
5. QUARANTINED  ended without a commit, but the sender may still write into the slots. They are freed after Drained, or
                when the sender's process has provably ended.
6. FREED        holds nothing. Terminal.

Decode never runs before every block of the prompt has landed and the handoff message has arrived, in either order.
Blocks that are missing or corrupted are requested again, a bounded number of times. If the transport writes
one-sidedly, the commit also waits for the answer to the last of these requests. Until then a repeated write may be in
flight, and it would overwrite the last block of the prompt, into which this worker writes its own tokens. A repeated
write may also have damaged a block that had landed before, so the repeated blocks are then compared with their
checksums once more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from enum import StrEnum

from kvrelay.protocol.messages import Handoff
from kvrelay.state_machine import Transition, TransitionTable, find_transition, transition_table
from kvrelay.transfer.base import Corrupted, Landed
from kvrelay_decode.receiver_events import (
    AdoptionRefused,
    Commit,
    FreeBlocks,
    HandoffAborted,
    HandoffOverdue,
    HandoffReceived,
    PrefillLost,
    QuarantineBlocks,
    ReceiveCancelled,
    ReceiverHandoffEvent,
    ReceiverInstruction,
    RecheckBlocks,
    ReservationOpened,
    SendReleased,
    SendResend,
    StopReceiving,
    TransferStalled,
    WritesDrained,
)

MAX_SILENT_ROUNDS = 6
"""Resend requests in a row without a single block arriving, after which the handoff fails."""
MAX_CORRUPTIONS = 3
"""Corrupted arrivals of one block that are tolerated."""


class ReceiverState(StrEnum):
    """The module's docstring describes each state."""

    ASKED = "asked"
    RESERVED = "reserved"
    FILLING = "filling"
    RUNNING = "running"
    QUARANTINED = "quarantined"
    FREED = "freed"


class ReceiverHandoff:
    """Pass every event to `handle` and carry out the instructions that it returns, in order."""

    def __init__(self) -> None:
        self.state = ReceiverState.ASKED
        self.reservation = ""
        self._needs_quarantine = False
        self._first_block = 0
        self._num_blocks = 0
        self._missing: set[int] = set()
        # Requested again where writes are one-sided, and not compared with their checksums since.
        self._repeated: set[int] = set()
        self._handoff: Handoff | None = None
        self._num_resend_requests = 0
        self._num_silent_rounds = 0
        self._num_corruptions: Counter[int] = Counter()

    def handle(self, event: ReceiverHandoffEvent) -> list[ReceiverInstruction]:
        """Raises IllegalEvent, and changes nothing, if the event cannot happen in this state."""
        return find_transition(TRANSITIONS, self.state, event)(self, event)

    @property
    def num_silent_rounds(self) -> int:
        """Resend requests since the last block landed."""
        return self._num_silent_rounds

    @property
    def awaits_blocks(self) -> bool:
        """Returns whether the handoff message is here, and blocks or the answer to a resend request are missing."""
        return self.state is ReceiverState.FILLING and self._handoff is not None

    @property
    def is_answered(self) -> bool:
        """Returns whether prefill has said of the last resend request that its blocks have left."""
        return self._handoff is not None and self._handoff.resend >= self._num_resend_requests

    @property
    def awaits_resend(self) -> bool:
        """Returns whether blocks were requested again and the sequence is not committed yet."""
        return self.state is ReceiverState.FILLING and self._num_resend_requests > 0

    @property
    def num_missing(self) -> int:
        """Granted blocks that have not landed."""
        return len(self._missing)

    @property
    def num_granted(self) -> int:
        """Blocks that prefill pushes."""
        return self._num_blocks - self._first_block

    @property
    def num_resend_requests(self) -> int:
        """Resend requests so far."""
        return self._num_resend_requests

    @property
    def num_received(self) -> int:
        """Granted blocks that have landed."""
        return self.num_granted - len(self._missing)

    @property
    def first_block(self) -> int:
        """Index of the first block that prefill sends; those before it were in decode's cache."""
        return self._first_block

    # -- transitions --------------------------------------------------------------------------------------------------

    def _open(self, event: ReservationOpened) -> list[ReceiverInstruction]:
        self.state = ReceiverState.RESERVED
        self.reservation = event.reservation
        self._first_block = event.first_block
        self._num_blocks = event.num_blocks
        self._needs_quarantine = event.needs_quarantine
        self._missing = set(range(event.first_block, event.num_blocks))
        return []

    def _landed(self, event: Landed) -> list[ReceiverInstruction]:
        if event.reservation != self.reservation:
            return []
        self.state = ReceiverState.FILLING
        self._missing.difference_update(event.blocks)
        self._num_silent_rounds = 0
        return self._commit_if_complete()

    def _corrupted(self, event: Corrupted) -> list[ReceiverInstruction]:
        if event.reservation != self.reservation:
            return []
        self.state = ReceiverState.FILLING
        wrong = self._missing.intersection(event.blocks)
        if not wrong:
            return []
        self._num_corruptions.update(wrong)
        worst, num_times = max(self._num_corruptions.items(), key=lambda item: item[1])
        if num_times > MAX_CORRUPTIONS:
            return self._end(f"block {worst} came corrupted {num_times} times", transport_failed=True)
        return [self._request_again(wrong, corrupted=True)]

    def _received(self, event: HandoffReceived) -> list[ReceiverInstruction]:
        if event.message.reservation != self.reservation:
            return []
        self.state = ReceiverState.FILLING
        self._handoff = event.message
        return self._commit_if_complete()

    def _overdue(self, event: HandoffOverdue) -> list[ReceiverInstruction]:
        if not self.awaits_blocks:
            return []
        if self._num_silent_rounds == MAX_SILENT_ROUNDS:
            cause = f"{len(self._missing)} blocks did not come, although asked for {MAX_SILENT_ROUNDS} times"
            return self._end(cause, transport_failed=True)
        self._num_silent_rounds += 1
        return [self._request_again(self._missing, corrupted=False)]

    def _stalled(self, event: TransferStalled) -> list[ReceiverInstruction]:
        return self._end(event.cause, transport_failed=True) if self.awaits_blocks else []

    def _aborted(self, event: HandoffAborted | PrefillLost) -> list[ReceiverInstruction]:
        return self._end(None)

    def _cancelled(self, event: ReceiveCancelled) -> list[ReceiverInstruction]:
        return self._end(event.reason)

    def _drained(self, event: WritesDrained) -> list[ReceiverInstruction]:
        self.state = ReceiverState.FREED
        return [FreeBlocks(self._num_whole())]

    def _adoption_refused(self, event: AdoptionRefused) -> list[ReceiverInstruction]:
        """Prefill still holds the KV and finds another decode worker."""
        self.state = ReceiverState.FREED
        return [SendReleased(self.reservation, event.reason), FreeBlocks(self._num_whole())]

    def _leave_queue(self, event: HandoffAborted | ReceiveCancelled | PrefillLost) -> list[ReceiverInstruction]:
        self.state = ReceiverState.FREED
        return []

    def _ignore(self, event: ReceiverHandoffEvent) -> list[ReceiverInstruction]:
        return []

    # -- inside -------------------------------------------------------------------------------------------------------

    def _commit_if_complete(self) -> list[ReceiverInstruction]:
        if self._missing or self._handoff is None:
            return []
        if self._needs_quarantine and self._handoff.resend < self._num_resend_requests:
            return []
        if self._repeated:
            self._missing, self._repeated = self._repeated, set()
            return [RecheckBlocks(self.reservation, tuple(sorted(self._missing)))]
        self.state = ReceiverState.RUNNING
        return [StopReceiving(self.reservation), Commit(self._handoff)]

    def _request_again(self, blocks: Iterable[int], *, corrupted: bool) -> SendResend:
        blocks = sorted(blocks)
        self._num_resend_requests += 1
        if self._needs_quarantine:
            self._repeated.update(blocks)
        return SendResend(self.reservation, tuple(blocks), self._num_resend_requests, corrupted)

    def _end(self, reason: str | None, *, transport_failed: bool = False) -> list[ReceiverInstruction]:
        """Ends a reservation without a commit. Without a reason prefill knows already, and gets no Released."""
        instructions: list[ReceiverInstruction] = [StopReceiving(self.reservation)]
        if reason is not None:
            instructions.append(SendReleased(self.reservation, reason, transport_failed))
        if self._needs_quarantine:
            self.state = ReceiverState.QUARANTINED
            return [*instructions, QuarantineBlocks()]
        self.state = ReceiverState.FREED
        return [*instructions, FreeBlocks(self._num_whole())]

    def _num_whole(self) -> int:
        return min(self._missing | self._repeated, default=self._num_blocks)


_M = ReceiverHandoff
_Row = dict[type[object], Transition[ReceiverInstruction]]

_WHILE_DEFERRED: _Row = {
    ReservationOpened: _M._open,
    HandoffReceived: _M._ignore,
    HandoffOverdue: _M._ignore,
    TransferStalled: _M._ignore,
    HandoffAborted: _M._leave_queue,
    ReceiveCancelled: _M._leave_queue,
    PrefillLost: _M._leave_queue,
}
_WHILE_RECEIVING: _Row = {
    Landed: _M._landed,
    Corrupted: _M._corrupted,
    HandoffReceived: _M._received,
    HandoffOverdue: _M._overdue,
    TransferStalled: _M._stalled,
    HandoffAborted: _M._aborted,
    ReceiveCancelled: _M._cancelled,
    PrefillLost: _M._aborted,
    WritesDrained: _M._ignore,
}
# Messages and blocks that were under way when the reservation ended still arrive.
_AFTERWARDS: _Row = {
    Landed: _M._ignore,
    Corrupted: _M._ignore,
    HandoffReceived: _M._ignore,
    HandoffOverdue: _M._ignore,
    TransferStalled: _M._ignore,
    HandoffAborted: _M._ignore,
    ReceiveCancelled: _M._ignore,
    PrefillLost: _M._ignore,
    WritesDrained: _M._ignore,
}
TRANSITIONS: TransitionTable[ReceiverInstruction] = transition_table(
    {
        ReceiverState.ASKED: _WHILE_DEFERRED,
        ReceiverState.RESERVED: _WHILE_RECEIVING,
        ReceiverState.FILLING: _WHILE_RECEIVING,
        ReceiverState.RUNNING: _AFTERWARDS | {AdoptionRefused: _M._adoption_refused},
        ReceiverState.QUARANTINED: _AFTERWARDS | {WritesDrained: _M._drained},
        ReceiverState.FREED: _AFTERWARDS,
    }
)
