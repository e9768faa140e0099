"""The prefill side of a handoff: one state machine per sequence, no I/O.

1. QUEUED     waits for its first chunk; decode has not been asked.
2. COMPUTING  chunks are computed; complete blocks are pushed as soon as decode has granted slots.
3. SENDING    all chunks are computed and the first token is out, but no decode worker has granted slots.
4. HANDED     the transport has got all blocks and the handoff message is out; awaits Committed. They stay held, so that
              another decode worker can be served without computing them again.
5. DRAINING   ended, but earlier writes still read the blocks; waits until no write is in flight.
6. RELEASED   holds nothing. Terminal.

`outgoing_handoffs.py` of the prefill service carries out the instructions, and a transport moves the bytes.

The reservation has a state of its own: NONE > ASKED > GRANTED. A decode worker that is full grants later. It can also
refuse (REFUSED: the router names another decode worker, which is asked). A reservation whose blocks did not arrive
counts as refused: each block is pushed once for a reservation.

Events are the messages of decode and router, what the transport reports, and a few of this worker. Messages are legal
in every state, because they cross each other on the network: late ones are ignored or answered. Events of this worker's
own scheduler and transports are legal only in the states that cause them.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec
from msgspec.structs import replace

from kvrelay.handoff.transports.base import BlockPush, SenderDrained, TransferFailed
from kvrelay.protocol.failure_kind import FailureKind
from kvrelay.protocol.messages import (
    Abort,
    Cancel,
    Committed,
    Drained,
    Failed,
    Granted,
    Handoff,
    NeedDecode,
    PeerRef,
    Reassign,
    Refused,
    Released,
)
from kvrelay.state_machine import Transition, TransitionTable, find_transition, transition_table


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
    REFUSED = "refused"


# -- events and instructions that are no messages ---------------------------------------------------------------------


class FromDecode(msgspec.Struct, frozen=True):
    """A message of a decode worker, which may be an earlier one."""

    peer: PeerRef
    body: Granted | Refused | Released | Committed


class PrefillScheduled(msgspec.Struct, frozen=True):
    """The first chunk is scheduled. `blocks` are all blocks of the prompt, in order."""

    blocks: tuple[int, ...]


class BlocksComputed(msgspec.Struct, frozen=True):
    """The KV of the first `num_complete` blocks is complete. Cached blocks count."""

    num_complete: int


class PrefillFinished(msgspec.Struct, frozen=True):
    """The last chunk is computed. `handoff` is what decode needs, for no reservation yet. None: the first token has
    ended the request."""

    handoff: Handoff | None


class DecodeLost(msgspec.Struct, frozen=True):
    """The decode worker's process is gone or silent."""

    decode: PeerRef
    reason: str


SenderHandoffEvent = (
    PrefillScheduled
    | BlocksComputed
    | PrefillFinished
    | FromDecode
    | DecodeLost
    | Reassign
    | Cancel
    | SenderDrained
    | TransferFailed
)


class SendTo(msgspec.Struct, frozen=True):
    """Send a message to decode or to the router."""

    to: PeerRef
    body: Abort | Drained | Handoff | NeedDecode | Failed


class AskDecode(msgspec.Struct, frozen=True):
    """Send Reserve to this decode worker."""

    decode: PeerRef


class PushBlocks(msgspec.Struct, frozen=True):
    """Push these blocks into granted slots. They are held until `ReleaseBlocks`."""

    granted: Granted
    copies: tuple[BlockPush, ...]


class StopPushing(msgspec.Struct, frozen=True):
    """Stop pushing for a reservation. `SenderDrained` follows when nothing is in flight."""

    reservation: str
    transport: str


class ReleaseBlocks(msgspec.Struct, frozen=True):
    """Free the sequence's blocks. Nothing reads them any more."""


SenderInstruction = SendTo | AskDecode | PushBlocks | StopPushing | ReleaseBlocks


class SenderHandoff:
    """Pass every event to `handle` and carry out the instructions that it returns, in order.

    All blocks of the sequence are held before decode is asked.
    """

    def __init__(self, router: PeerRef, decode: PeerRef | None) -> None:
        self.state = SenderState.QUEUED
        self.reservation_state = ReservationState.NONE
        self.decode = decode
        self._router = router
        self._blocks: tuple[int, ...] = ()
        self._num_complete = 0
        self._handoff: Handoff | None = None
        self._granted: Granted | None = None  # the grant of `decode`
        self._num_pushed = 0  # blocks of the grant that the transport has got
        # Ended reservations whose writes may still be in flight, each with the worker that gets Drained.
        self._draining: dict[str, PeerRef] = {}
        self._excluded: list[str] = []

    def handle(self, event: SenderHandoffEvent) -> list[SenderInstruction]:
        """Raises IllegalEvent, and changes nothing, if the event cannot happen in this state."""
        if isinstance(event, FromDecode):
            return find_transition(TRANSITIONS, self.state, event.body)(self, event.body, event.peer)
        return find_transition(TRANSITIONS, self.state, event)(self, event)

    @classmethod
    def released(cls, router: PeerRef) -> SenderHandoff:
        """A machine that has ended. It answers messages about requests that are not known here any more."""
        machine = cls(router, None)
        machine.state = SenderState.RELEASED
        return machine

    @property
    def blocks(self) -> tuple[int, ...]:
        """The sequence's blocks; empty before the first chunk is scheduled."""
        return self._blocks

    def transport_of(self, reservation: str) -> str | None:
        """The transport of the current reservation; None for any other reservation."""
        return self._granted.transport if self._granted is not None and self._is_granted(reservation) else None

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
        self._handoff = event.handoff
        if event.handoff is None:
            return self._end("the first token ended the request")
        if self.decode is None and self.reservation_state is ReservationState.NONE:
            return [SendTo(self._router, NeedDecode(reason="no decode worker was named", excluded=[]))]
        return self._push()

    # -- from decode --------------------------------------------------------------------------------------------------

    def _grant(self, granted: Granted, peer: PeerRef) -> list[SenderInstruction]:
        if peer != self.decode or self.reservation_state is not ReservationState.ASKED:
            return self._return_grant(granted, peer)
        if granted.first_block + len(granted.slots) != len(self._blocks):
            reason = f"{len(granted.slots)} slots from block {granted.first_block} on, of {len(self._blocks)}"
            return [*self._return_grant(granted, peer), *self._replace_decode(peer, reason)]
        self.reservation_state = ReservationState.GRANTED
        self._granted, self._num_pushed = granted, 0
        return self._push()

    def _return_grant(self, granted: Granted, peer: PeerRef) -> list[SenderInstruction]:
        """The reservation is not wanted any more. Nothing was pushed for it, so it is drained at once."""
        abort = Abort(reservation=granted.reservation, reason="no longer wanted")
        return [SendTo(peer, abort), SendTo(peer, Drained(reservation=granted.reservation))]

    def _refuse(self, message: Refused, peer: PeerRef) -> list[SenderInstruction]:
        return self._replace_decode(peer, message.reason)

    def _release(self, message: Released, peer: PeerRef) -> list[SenderInstruction]:
        if message.reservation in self._draining:
            return []  # Drained follows
        if peer != self.decode or not self._is_granted(message.reservation):
            return [SendTo(peer, Drained(reservation=message.reservation))]
        return self._replace_decode(peer, message.reason)

    def _commit(self, message: Committed, peer: PeerRef) -> list[SenderInstruction]:
        if peer != self.decode or not self._is_granted(message.reservation):
            return []
        self._granted = None
        return self._release_when_drained()

    def _decode_lost(self, event: DecodeLost) -> list[SenderInstruction]:
        return self._replace_decode(event.decode, event.reason)

    def _decode_lost_while_queued(self, event: DecodeLost) -> list[SenderInstruction]:
        if event.decode != self.decode:
            return []
        self.decode = None
        return self._need_decode(event.decode, event.reason)

    # -- from the router ----------------------------------------------------------------------------------------------

    def _reassign(self, message: Reassign) -> list[SenderInstruction]:
        if message.decode is None:
            return self._fail_without_decode()
        if message.decode == self.decode and self.reservation_state is not ReservationState.REFUSED:
            return []  # asked already
        instructions = self._abort("reassigned")
        if self.state is SenderState.HANDED:
            self.state = SenderState.SENDING
        self.decode = message.decode
        return [*instructions, *self._reserve()]

    def _reassign_while_queued(self, message: Reassign) -> list[SenderInstruction]:
        if message.decode is None:
            return self._fail_without_decode()
        self.decode = message.decode
        self.reservation_state = ReservationState.NONE
        return []

    def _reassign_late(self, message: Reassign) -> list[SenderInstruction]:
        return [self._failed(FailureKind.WORKER_LOST, "the request is no longer held here")]

    def _cancel(self, message: Cancel) -> list[SenderInstruction]:
        return self._end(message.reason)

    # -- from the transport -------------------------------------------------------------------------------------------

    def _transfer_failed(self, event: TransferFailed) -> list[SenderInstruction]:
        if self.decode is None or not self._is_granted(event.reservation):
            return []
        return self._replace_decode(self.decode, f"transfer failed: {event.cause}")

    def _drained(self, event: SenderDrained) -> list[SenderInstruction]:
        decode = self._draining.pop(event.reservation, None)
        return [SendTo(decode, Drained(reservation=event.reservation))] if decode is not None else []

    def _drained_at_end(self, event: SenderDrained) -> list[SenderInstruction]:
        return [*self._drained(event), *self._release_when_drained()]

    def _ignore(self, *about: Any) -> list[SenderInstruction]:
        return []

    # -- inside -------------------------------------------------------------------------------------------------------

    def _is_granted(self, reservation: str) -> bool:
        return self._granted is not None and self._granted.reservation == reservation

    def _reserve(self) -> list[SenderInstruction]:
        if self.decode is None:
            return []
        self.reservation_state = ReservationState.ASKED
        return [AskDecode(self.decode)]

    def _push(self) -> list[SenderInstruction]:
        """Pushes blocks that are complete, granted and not pushed yet; after the last one, the handoff message."""
        granted = self._granted
        if granted is None or self.state not in (SenderState.COMPUTING, SenderState.SENDING):
            return []
        instructions: list[SenderInstruction] = []
        first = granted.first_block + self._num_pushed
        ready = range(first, max(first, self._num_complete))
        if ready:
            self._num_pushed += len(ready)
            slots = granted.slots[first - granted.first_block :]
            copies = (BlockPush(index, self._blocks[index], slot) for index, slot in zip(ready, slots, strict=False))
            instructions.append(PushBlocks(granted, tuple(copies)))
        if self.state is SenderState.SENDING and self._handoff is not None and self.decode is not None:
            self.state = SenderState.HANDED
            handoff = replace(self._handoff, reservation=granted.reservation, num_blocks=len(granted.slots))
            instructions.append(SendTo(self.decode, handoff))
        return instructions

    def _replace_decode(self, decode: PeerRef, reason: str) -> list[SenderInstruction]:
        """This worker cannot take the sequence. The router is asked for another one, once; it cancels the sequence on
        this one, so no Abort is sent."""
        if decode != self.decode or self.reservation_state is ReservationState.REFUSED:
            return []
        instructions = self._stop_pushing()
        if self.state is SenderState.HANDED:
            self.state = SenderState.SENDING
        return [*instructions, *self._need_decode(decode, reason)]

    def _need_decode(self, decode: PeerRef, reason: str) -> list[SenderInstruction]:
        self.reservation_state = ReservationState.REFUSED
        self._excluded.append(decode.peer_id)
        return [SendTo(self._router, NeedDecode(reason=reason, excluded=list(self._excluded), unable=decode))]

    def _stop_pushing(self) -> list[SenderInstruction]:
        """Ends the current reservation. Its writes are drained while the sequence may go on elsewhere."""
        granted, self._granted = self._granted, None
        if granted is None or self.decode is None:
            return []
        self._draining[granted.reservation] = self.decode
        return [StopPushing(granted.reservation, granted.transport)]

    def _abort(self, reason: str) -> list[SenderInstruction]:
        """Ends the current reservation and tells decode."""
        if self._granted is None or self.decode is None:
            return []
        abort = SendTo(self.decode, Abort(reservation=self._granted.reservation, reason=reason))
        return [abort, *self._stop_pushing()]

    def _failed(self, kind: FailureKind, cause: str) -> SendTo:
        return SendTo(self._router, Failed(failure=kind, cause=cause, retriable=True))

    def _fail_without_decode(self) -> list[SenderInstruction]:
        reason = "no decode worker is left"
        return [self._failed(FailureKind.NO_DECODE_WORKER, reason), *self._end(reason)]

    def _end(self, reason: str) -> list[SenderInstruction]:
        instructions = self._abort(reason)
        if self.reservation_state is ReservationState.ASKED and self.decode is not None:
            instructions.append(SendTo(self.decode, Abort(reservation="", reason=reason)))
        self.reservation_state = ReservationState.NONE
        return [*instructions, *self._release_when_drained()]

    def _release_when_drained(self) -> list[SenderInstruction]:
        if self._draining:  # writes for an earlier decode worker still read the blocks
            self.state = SenderState.DRAINING
            return []
        self.state = SenderState.RELEASED
        return [ReleaseBlocks()]


_M = SenderHandoff
_Row = dict[type[object], Transition[SenderInstruction]]

_QUEUED: _Row = {
    PrefillScheduled: _M._scheduled,
    Granted: _M._return_grant,
    Refused: _M._ignore,
    Released: _M._release,
    Committed: _M._ignore,
    DecodeLost: _M._decode_lost_while_queued,
    Reassign: _M._reassign_while_queued,
    Cancel: _M._cancel,
}
_ACTIVE: _Row = {
    Granted: _M._grant,
    Refused: _M._refuse,
    Released: _M._release,
    Committed: _M._ignore,
    DecodeLost: _M._decode_lost,
    Reassign: _M._reassign,
    Cancel: _M._cancel,
    SenderDrained: _M._drained,
    TransferFailed: _M._transfer_failed,
}
_OVER: _Row = {
    Granted: _M._return_grant,
    Refused: _M._ignore,
    Released: _M._release,
    Committed: _M._ignore,
    DecodeLost: _M._ignore,
    Reassign: _M._reassign_late,
    Cancel: _M._ignore,
    SenderDrained: _M._ignore,
    TransferFailed: _M._ignore,
}
TRANSITIONS: TransitionTable[SenderInstruction] = transition_table(
    {
        SenderState.QUEUED: _QUEUED,
        SenderState.COMPUTING: _ACTIVE | {BlocksComputed: _M._computed, PrefillFinished: _M._finished},
        SenderState.SENDING: _ACTIVE,
        SenderState.HANDED: _ACTIVE | {Committed: _M._commit},
        SenderState.DRAINING: _OVER | {SenderDrained: _M._drained_at_end},
        SenderState.RELEASED: _OVER,
    }
)
