"""The prefill side of a handoff: one state machine per sequence, events in and instructions out, no I/O.

1. QUEUED     waits for its first chunk; decode has not been asked.
2. COMPUTING  chunks are computed; complete blocks are pushed as soon as decode has granted slots.
3. SENDING    all chunks are computed and the first token is out, but no decode worker has granted slots.
4. HANDED     the transport has all blocks and the handoff message is out; awaits Committed. The blocks stay held, so
              that another decode worker can be served without computing them again.
5. DRAINING   ended, but earlier writes still read the blocks; waits until no write is in flight.
6. RELEASED   holds nothing. Terminal.

The reservation has a state of its own: NONE > ASKED > GRANTED. Instead of granting, a decode worker can defer
(DEFERRED: it is full and grants later) or refuse (REFUSED: the router names another decode worker, which is asked).

Messages of peers are legal in every state, because they cross each other on the network: those that come too late are
ignored or answered. Events of this worker's own scheduler and transports are legal only in the states that cause them.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from kvrelay.protocol.failure_kind import FailureKind
from kvrelay.protocol.messages import FirstToken, PeerRef
from kvrelay.state_machine import Transition, TransitionTable, find_transition, transition_table
from kvrelay.transfer.base import Pushed, SenderDrained, TransferFailed
from kvrelay_prefill.grant import Grant
from kvrelay_prefill.sender_events import (
    AbortTransfer,
    BlocksComputed,
    DecodeLost,
    DecodeReassigned,
    HandoffCommitted,
    PrefillFinished,
    PrefillScheduled,
    PushBlocks,
    ReleaseBlocks,
    ResendRequested,
    ReservationDeferred,
    ReservationGranted,
    ReservationRefused,
    ReservationReleased,
    SendAbort,
    SendCancelled,
    SendDrained,
    SenderHandoffEvent,
    SenderInstruction,
    SendFailed,
    SendHandoff,
    SendNeedDecode,
    SendReserve,
)


class SenderState(StrEnum):
    """The module's docstring describes each state."""

    QUEUED = "queued"
    COMPUTING = "computing"
    SENDING = "sending"
    HANDED = "handed"
    DRAINING = "draining"
    RELEASED = "released"


class ReservationState(StrEnum):
    """The answer of the current decode worker to Reserve."""

    NONE = "none"
    ASKED = "asked"
    GRANTED = "granted"
    DEFERRED = "deferred"
    REFUSED = "refused"


class SenderHandoff:
    """Pass every event to `handle` and carry out the instructions that it returns, in order.

    All blocks of the sequence are held before decode is asked.
    """

    def __init__(self, decode: PeerRef | None) -> None:
        self.state = SenderState.QUEUED
        self.reservation_state = ReservationState.NONE
        self.decode = decode
        self.first_token: FirstToken | None = None
        self._blocks: tuple[int, ...] = ()
        self._num_complete = 0
        self._grant: Grant | None = None
        # Ended reservations whose writes may still be in flight, each with the worker that gets Drained. None: that
        # worker is lost.
        self._draining: dict[str, PeerRef | None] = {}
        self._excluded: list[str] = []

    def handle(self, event: SenderHandoffEvent) -> list[SenderInstruction]:
        """Raises IllegalEvent, and changes nothing, if the event cannot happen in this state."""
        return find_transition(TRANSITIONS, self.state, event)(self, event)

    @property
    def blocks(self) -> tuple[int, ...]:
        """The sequence's blocks; empty before the first chunk is scheduled."""
        return self._blocks

    def transport_of(self, reservation: str) -> str | None:
        """The transport of the current reservation; None for any other reservation."""
        grant = self._grant_of(reservation)
        return grant.transport if grant is not None else None

    # -- from the scheduler -------------------------------------------------------------------------------------------

    def _scheduled(self, event: PrefillScheduled) -> list[SenderInstruction]:
        self.state = SenderState.COMPUTING
        self._blocks = event.blocks
        return self._reserve()

    def _computed(self, event: BlocksComputed) -> list[SenderInstruction]:
        self._num_complete = event.num_complete
        return self._push()

    def _finished(self, event: PrefillFinished) -> list[SenderInstruction]:
        self.state = SenderState.SENDING
        self._num_complete = len(self._blocks)
        self.first_token = event.first_token
        if event.first_token.finish is not None:
            return self._end("the first token ended the request")
        if self.decode is None and self.reservation_state is ReservationState.NONE:
            return [SendNeedDecode("no decode worker was named", ()), *self._push()]
        return self._push()

    # -- from decode --------------------------------------------------------------------------------------------------

    def _granted(self, event: ReservationGranted) -> list[SenderInstruction]:
        is_awaited = self.reservation_state in (ReservationState.ASKED, ReservationState.DEFERRED)
        if event.decode != self.decode or not is_awaited:
            return self._return_grant(event)
        message = event.message
        if message.first_block + len(message.slots) != len(self._blocks):
            reason = (
                f"slots from block {message.first_block} to {message.first_block + len(message.slots)} were granted"
            )
            return [
                *self._return_grant(event),
                *self._replace_decode(event.decode, f"{reason}, of {len(self._blocks)}"),
            ]
        self.reservation_state = ReservationState.GRANTED
        self._grant = Grant(
            event.decode,
            message.reservation,
            message.first_block,
            message.slots,
            message.transport,
            message.endpoint,
            tuple(message.rank_endpoints),
            message.num_stages or 1,
        )
        return self._push()

    def _return_grant(self, event: ReservationGranted) -> list[SenderInstruction]:
        """The reservation is not wanted any more. Nothing was pushed for it, so it is drained at once."""
        reservation = event.message.reservation
        return [SendAbort(event.decode, reservation, "no longer wanted"), SendDrained(event.decode, reservation)]

    def _deferred(self, event: ReservationDeferred) -> list[SenderInstruction]:
        if event.decode == self.decode and self.reservation_state is ReservationState.ASKED:
            self.reservation_state = ReservationState.DEFERRED
        return []

    def _refused(self, event: ReservationRefused) -> list[SenderInstruction]:
        return self._replace_decode(event.decode, event.reason)

    def _released(self, event: ReservationReleased) -> list[SenderInstruction]:
        if event.reservation in self._draining:
            # The worker may have been lost meanwhile. It is back, so it gets Drained after all.
            self._draining[event.reservation] = event.decode
            return []
        grant = self._grant_of(event.reservation)
        if grant is None or grant.decode != event.decode:
            return [SendDrained(event.decode, event.reservation)]
        return self._replace_decode(event.decode, event.reason)

    def _decode_lost(self, event: DecodeLost) -> list[SenderInstruction]:
        instructions = self._replace_decode(event.decode, event.reason)
        return [*instructions, *self._forget_lost_decode(event)]

    def _decode_lost_while_queued(self, event: DecodeLost) -> list[SenderInstruction]:
        if event.decode != self.decode:
            return []
        self.decode = None
        return self._need_decode(event.decode, event.reason)

    def _forget_lost_decode(self, event: DecodeLost) -> list[SenderInstruction]:
        for reservation, decode in self._draining.items():
            if decode == event.decode:
                self._draining[reservation] = None
        return []

    def _committed(self, event: HandoffCommitted) -> list[SenderInstruction]:
        if self._grant_of(event.reservation) is None:
            return []
        self._grant = None
        if self._draining:  # writes for an earlier decode worker still read the blocks
            self.state = SenderState.DRAINING
            return []
        self.state = SenderState.RELEASED
        return [ReleaseBlocks()]

    def _resend(self, event: ResendRequested) -> list[SenderInstruction]:
        """The answer, a repeated handoff message, goes out when all of these blocks have left."""
        grant = self._grant_of(event.reservation)
        if grant is None:
            return []
        again = grant.request_resend(event.indices, event.number, corrupted=event.corrupted)
        return [*self._push_indices(grant, again), *self._answer_resend(grant)]

    # -- from the router ----------------------------------------------------------------------------------------------

    def _reassigned(self, event: DecodeReassigned) -> list[SenderInstruction]:
        if event.decode is None:
            return self._fail_without_decode()
        if event.decode == self.decode and self.reservation_state is not ReservationState.REFUSED:
            return []  # asked already
        instructions: list[SenderInstruction] = []
        if self._grant is not None:
            instructions.append(SendAbort(self._grant.decode, self._grant.reservation, "reassigned"))
            instructions += self._drop_grant()
        if self.state is SenderState.HANDED:
            self.state = SenderState.SENDING
        self.decode = event.decode
        return [*instructions, *self._reserve()]

    def _reassigned_while_queued(self, event: DecodeReassigned) -> list[SenderInstruction]:
        if event.decode is None:
            return self._fail_without_decode()
        self.decode = event.decode
        self.reservation_state = ReservationState.NONE
        return []

    def _reassigned_late(self, event: DecodeReassigned) -> list[SenderInstruction]:
        return [SendFailed(FailureKind.WORKER_LOST, "the request is no longer held here")]

    def _cancelled(self, event: SendCancelled) -> list[SenderInstruction]:
        return self._end(event.reason)

    # -- from the transport -------------------------------------------------------------------------------------------

    def _pushed(self, event: Pushed) -> list[SenderInstruction]:
        grant = self._grant_of(event.reservation)
        if grant is None:
            return []
        return [*self._push_indices(grant, grant.note_left(event.blocks)), *self._answer_resend(grant)]

    def _transfer_failed(self, event: TransferFailed) -> list[SenderInstruction]:
        grant = self._grant_of(event.reservation)
        if grant is None:
            return []
        return self._replace_decode(grant.decode, f"transfer failed: {event.cause}")

    def _drained(self, event: SenderDrained) -> list[SenderInstruction]:
        decode = self._draining.pop(event.reservation, None)
        return [SendDrained(decode, event.reservation)] if decode is not None else []

    def _drained_at_end(self, event: SenderDrained) -> list[SenderInstruction]:
        instructions = self._drained(event)
        if self._draining:
            return instructions
        self.state = SenderState.RELEASED
        return [*instructions, ReleaseBlocks()]

    def _ignore(self, event: SenderHandoffEvent) -> list[SenderInstruction]:
        return []

    # -- inside -------------------------------------------------------------------------------------------------------

    def _grant_of(self, reservation: str) -> Grant | None:
        return self._grant if self._grant is not None and self._grant.reservation == reservation else None

    def _reserve(self) -> list[SenderInstruction]:
        if self.decode is None:
            return []
        self.reservation_state = ReservationState.ASKED
        return [SendReserve(self.decode)]

    def _push(self) -> list[SenderInstruction]:
        """Pushes blocks that are complete, granted and not pushed yet; after the last one, the handoff message."""
        grant = self._grant
        if grant is None or self.state not in (SenderState.COMPUTING, SenderState.SENDING):
            return []
        instructions = self._push_indices(grant, grant.take_ready(self._num_complete))
        if self.state is SenderState.SENDING and self.first_token is not None:
            self.state = SenderState.HANDED
            instructions.append(self._handoff(grant))
        return instructions

    def _answer_resend(self, grant: Grant) -> list[SenderInstruction]:
        if not grant.take_resend_answer():
            return []
        return [self._handoff(grant)] if self.state is SenderState.HANDED else []

    @staticmethod
    def _handoff(grant: Grant) -> SendHandoff:
        return SendHandoff(grant.decode, grant.reservation, len(grant.slots), grant.answered)

    def _push_indices(self, grant: Grant, indices: Iterable[int]) -> list[SenderInstruction]:
        copies = grant.copies(indices, self._blocks)
        if not copies:
            return []
        addresses = grant.endpoint, copies, grant.rank_endpoints, grant.num_stages
        return [PushBlocks(grant.reservation, grant.transport, *addresses)]

    def _replace_decode(self, decode: PeerRef, reason: str) -> list[SenderInstruction]:
        """This worker cannot take the sequence. The router is asked for another one, once."""
        if decode != self.decode or self.reservation_state is ReservationState.REFUSED:
            return []
        instructions = self._drop_grant()
        if self.state is SenderState.HANDED:
            self.state = SenderState.SENDING
        return [*instructions, *self._need_decode(decode, reason)]

    def _need_decode(self, decode: PeerRef, reason: str) -> list[SenderInstruction]:
        self.reservation_state = ReservationState.REFUSED
        self._excluded.append(decode.peer_id)
        return [SendNeedDecode(reason, tuple(self._excluded), decode)]

    def _drop_grant(self) -> list[SenderInstruction]:
        """Ends the current reservation. Its writes are drained while the sequence may go on elsewhere."""
        grant, self._grant = self._grant, None
        if grant is None:
            return []
        self._draining[grant.reservation] = grant.decode
        return [AbortTransfer(grant.reservation, grant.transport)]

    def _fail_without_decode(self) -> list[SenderInstruction]:
        reason = "no decode worker is left"
        return [SendFailed(FailureKind.NO_DECODE_WORKER, reason), *self._end(reason)]

    def _end(self, reason: str) -> list[SenderInstruction]:
        instructions: list[SenderInstruction] = []
        if self._grant is not None:
            instructions.append(SendAbort(self._grant.decode, self._grant.reservation, reason))
        elif self.reservation_state in (ReservationState.ASKED, ReservationState.DEFERRED) and self.decode is not None:
            instructions.append(SendAbort(self.decode, "", reason))
        instructions += self._drop_grant()
        self.reservation_state = ReservationState.NONE
        if self._draining:
            self.state = SenderState.DRAINING
            return instructions
        self.state = SenderState.RELEASED
        return [*instructions, ReleaseBlocks()]


_M = SenderHandoff
_Row = dict[type[object], Transition[SenderInstruction]]

_QUEUED: _Row = {
    PrefillScheduled: _M._scheduled,
    ReservationGranted: _M._return_grant,
    ReservationDeferred: _M._ignore,
    ReservationRefused: _M._ignore,
    ReservationReleased: _M._released,
    DecodeLost: _M._decode_lost_while_queued,
    HandoffCommitted: _M._ignore,
    ResendRequested: _M._ignore,
    DecodeReassigned: _M._reassigned_while_queued,
    SendCancelled: _M._cancelled,
}
_ACTIVE: _Row = {
    ReservationGranted: _M._granted,
    ReservationDeferred: _M._deferred,
    ReservationRefused: _M._refused,
    ReservationReleased: _M._released,
    DecodeLost: _M._decode_lost,
    HandoffCommitted: _M._ignore,
    ResendRequested: _M._resend,
    DecodeReassigned: _M._reassigned,
    SendCancelled: _M._cancelled,
    Pushed: _M._pushed,
    SenderDrained: _M._drained,
    TransferFailed: _M._transfer_failed,
}
_OVER: _Row = {
    ReservationGranted: _M._return_grant,
    ReservationDeferred: _M._ignore,
    ReservationRefused: _M._ignore,
    ReservationReleased: _M._released,
    DecodeLost: _M._forget_lost_decode,
    HandoffCommitted: _M._ignore,
    ResendRequested: _M._ignore,
    DecodeReassigned: _M._reassigned_late,
    SendCancelled: _M._ignore,
    Pushed: _M._ignore,
    SenderDrained: _M._ignore,
    TransferFailed: _M._ignore,
}
TRANSITIONS: TransitionTable[SenderInstruction] = transition_table(
    {
        SenderState.QUEUED: _QUEUED,
        SenderState.COMPUTING: _ACTIVE | {BlocksComputed: _M._computed, PrefillFinished: _M._finished},
        SenderState.SENDING: _ACTIVE,
        SenderState.HANDED: _ACTIVE | {HandoffCommitted: _M._committed},
        SenderState.DRAINING: _OVER | {SenderDrained: _M._drained_at_end},
        SenderState.RELEASED: _OVER,
    }
)
