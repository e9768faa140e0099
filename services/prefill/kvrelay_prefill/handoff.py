"""The prefill side of a handoff, one machine per sequence: events in, instructions out, no I/O.

States of the sequence:

1. QUEUED     waits for its first chunk; nothing was asked of decode.
2. COMPUTING  chunks are computed; blocks that are complete leave as soon as decode granted slots.
3. SENDING    all computed, the first token is out; the tail is in flight or the reservation is still awaited.
4. HANDED     everything left, the handoff message too; awaits Committed. The blocks stay held: until then another
              decode worker can be served without computing again.
5. DRAINING   given up; awaits the transport's word that no write is in flight.
6. RELEASED   holds nothing. Terminal.

Beside it the reservation: NONE > ASKED > GRANTED, or DEFERRED (decode is full and grants later), or REFUSED, upon
which the router names another decode worker and the asking starts again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from kvrelay.protocol.messages import FirstToken, Granted, PeerRef
from kvrelay.transfer.base import BlockCopy
from kvrelay.worker.transitions import IllegalTransition, moved
from kvrelay_prefill.grant import Grant

PushWhen = Literal["chunk", "prompt"]
"""Whether blocks leave as soon as their chunk is computed, or all after the last one."""


class SenderState(StrEnum):
    """See the module's text."""

    QUEUED = "queued"
    COMPUTING = "computing"
    SENDING = "sending"
    HANDED = "handed"
    DRAINING = "draining"
    RELEASED = "released"


class Reservation(StrEnum):
    """Where the asking stands."""

    NONE = "none"
    ASKED = "asked"
    GRANTED = "granted"
    DEFERRED = "deferred"
    REFUSED = "refused"


TRANSITIONS: dict[SenderState, frozenset[SenderState]] = {
    SenderState.QUEUED: frozenset({SenderState.COMPUTING, SenderState.RELEASED}),
    SenderState.COMPUTING: frozenset({SenderState.SENDING, SenderState.DRAINING, SenderState.RELEASED}),
    SenderState.SENDING: frozenset({SenderState.HANDED, SenderState.DRAINING, SenderState.RELEASED}),
    SenderState.HANDED: frozenset({SenderState.SENDING, SenderState.DRAINING, SenderState.RELEASED}),
    SenderState.DRAINING: frozenset({SenderState.RELEASED}),
    SenderState.RELEASED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class AskDecode:
    """Send Reserve to this decode worker."""

    decode: PeerRef


@dataclass(frozen=True, slots=True)
class AskRouter:
    """Send NeedDecode: the named worker cannot take the request."""

    reason: str
    excluded: tuple[str, ...]
    lacks: PeerRef | None = None


@dataclass(frozen=True, slots=True)
class PushBlocks:
    """Push these blocks; hold them as in flight from now on."""

    reservation: str
    transport: str
    endpoint: dict[str, str]
    copies: tuple[BlockCopy, ...]


@dataclass(frozen=True, slots=True)
class SendHandoff:
    """Send Handoff for this reservation; `resend`: the last question for blocks that is answered with it."""

    decode: PeerRef
    reservation: str
    num_blocks: int
    resend: int = 0


@dataclass(frozen=True, slots=True)
class AbortTransfer:
    """Stop pushing; the transport answers when nothing is in flight any more."""

    reservation: str
    transport: str


@dataclass(frozen=True, slots=True)
class SendAbort:
    """Tell decode that the handoff is given up."""

    decode: PeerRef
    reservation: str
    reason: str


@dataclass(frozen=True, slots=True)
class SendDrained:
    """Tell decode that no write of this reservation is or will be in flight."""

    decode: PeerRef
    reservation: str


@dataclass(frozen=True, slots=True)
class ReleaseBlocks:
    """Let go of the sequence's blocks: nothing reads them any more."""


@dataclass(frozen=True, slots=True)
class FailRequest:
    """Tell the router that this attempt ended here."""

    cause: str


Instruction = (
    AskDecode
    | AskRouter
    | PushBlocks
    | SendHandoff
    | AbortTransfer
    | SendAbort
    | SendDrained
    | ReleaseBlocks
    | FailRequest
)


class SenderHandoff:
    """The machine. `blocks` are the sequence's blocks in order, all of them held before decode is asked."""

    def __init__(self, decode: PeerRef | None, push_when: PushWhen = "chunk") -> None:
        self._push_when = push_when
        self.state = SenderState.QUEUED
        self.reservation = Reservation.NONE
        self.decode = decode
        self.first_token: FirstToken | None = None
        self._blocks: list[int] = []
        self._num_complete = 0
        self._grant: Grant | None = None
        # Reservations given up whose writes may still be in flight, and who is to be told when they are not.
        self._draining: dict[str, PeerRef | None] = {}
        self._excluded: list[str] = []

    @property
    def blocks(self) -> list[int]:
        """The sequence's blocks; empty before the first chunk was scheduled."""
        return self._blocks

    def transport_of(self, reservation: str) -> str | None:
        """By which the blocks of the reservation that is held now travel; None for any other."""
        return self._grant.transport if self._grant is not None and self._grant.reservation == reservation else None

    # -- from the scheduler -------------------------------------------------------------------------------------------

    def scheduled(self, blocks: list[int]) -> list[Instruction]:
        """The first chunk is scheduled; the whole prompt's blocks are held."""
        self._move(SenderState.COMPUTING)
        self._blocks = blocks
        return self._ask()

    def computed(self, num_complete: int) -> list[Instruction]:
        """K/V of the first `num_complete` blocks is complete (a cached prefix counts)."""
        self._expect(SenderState.COMPUTING)
        self._num_complete = num_complete
        return self._push()

    def prefilled(self, first_token: FirstToken) -> list[Instruction]:
        """The last chunk is done and gave the first token. With a finish reason nothing follows it."""
        self._move(SenderState.SENDING)
        self._num_complete = len(self._blocks)
        self.first_token = first_token
        if first_token.finish is not None:
            return self._give_up("the first token ended the request")
        if self.decode is None and self.reservation is Reservation.NONE:
            return [AskRouter("no decode worker was named", ()), *self._push()]
        return self._push()

    # -- from decode --------------------------------------------------------------------------------------------------

    def granted(self, decode: PeerRef, message: Granted) -> list[Instruction]:
        """Decode holds slots for the missing blocks. One that is no longer wanted is given back."""
        if decode != self.decode or self.reservation not in (Reservation.ASKED, Reservation.DEFERRED):
            return [
                SendAbort(decode, message.reservation, "no longer wanted"),
                SendDrained(decode, message.reservation),
            ]
        self.reservation = Reservation.GRANTED
        self._grant = Grant(
            decode, message.reservation, message.first_block, message.slots, message.transport, message.endpoint
        )
        return self._push()

    def deferred(self, decode: PeerRef) -> list[Instruction]:
        """Decode is full and will grant when there is room. Computing goes on."""
        if decode == self.decode and self.reservation is Reservation.ASKED:
            self.reservation = Reservation.DEFERRED
        return []

    def refused(self, decode: PeerRef, reason: str) -> list[Instruction]:
        """Decode will not take it: refused, lost, or it gave the reservation up."""
        if decode != self.decode or self.state in (SenderState.DRAINING, SenderState.RELEASED, SenderState.QUEUED):
            return []
        if self.reservation is Reservation.REFUSED:
            return []  # the router was asked for another one
        instructions = self._drop_grant()
        if self.state is SenderState.HANDED:
            self._move(SenderState.SENDING)
        self.reservation = Reservation.REFUSED
        self._excluded.append(decode.peer_id)
        return [*instructions, AskRouter(reason, tuple(self._excluded), decode)]

    def decode_lost(self, decode: PeerRef, reason: str) -> list[Instruction]:
        """The decode worker's process is gone; nobody is left there to be told anything."""
        if self.state is SenderState.QUEUED and decode == self.decode:
            self.decode = None
            self.reservation = Reservation.REFUSED
            self._excluded.append(decode.peer_id)
            return [AskRouter(reason, tuple(self._excluded), decode)]
        instructions = self.refused(decode, reason)
        for reservation, told in self._draining.items():
            if told == decode:
                self._draining[reservation] = None
        return instructions

    def released(self, decode: PeerRef, reservation: str, reason: str) -> list[Instruction]:
        """Decode gave the reservation up."""
        grant = self._grant
        if reservation in self._draining:
            self._draining[reservation] = decode  # it fell silent, came back, and asks again
            return []
        if grant is None or grant.decode != decode or grant.reservation != reservation:
            return [SendDrained(decode, reservation)]
        return self.refused(decode, reason)

    def committed(self, reservation: str) -> list[Instruction]:
        """Decode owns the request."""
        if self._grant is None or self._grant.reservation != reservation or self.state is not SenderState.HANDED:
            return []
        self._grant = None
        if self._draining:  # a grant of another decode worker, given up before: its writes still read the blocks
            self._move(SenderState.DRAINING)
            return []
        self._move(SenderState.RELEASED)
        return [ReleaseBlocks()]

    def resend(
        self, reservation: str, indices: Iterable[int], number: int = 0, *, corrupted: bool = False
    ) -> list[Instruction]:
        """Decode misses blocks although the handoff came, or blocks came corrupted.

        The answer, a repeated Handoff, goes out when all of them have left.
        """
        grant = self._grant
        if grant is None or grant.reservation != reservation:
            return []
        instructions = self._push_indices(grant, grant.ask(indices, number, corrupted=corrupted))
        return [*instructions, *self._answer_resend(grant)]

    # -- from the router ----------------------------------------------------------------------------------------------

    def reassigned(self, decode: PeerRef | None) -> list[Instruction]:
        """The router names another decode worker, or says that there is none."""
        if self.state in (SenderState.DRAINING, SenderState.RELEASED):
            return [FailRequest("the request is no longer held here")]
        if decode is None:
            return [FailRequest("no decode worker is left"), *self._give_up("no decode worker is left")]
        if decode == self.decode and self.reservation is not Reservation.REFUSED:
            return []  # asked already
        instructions: list[Instruction] = []
        if self._grant is not None:
            instructions.append(SendAbort(self._grant.decode, self._grant.reservation, "reassigned"))
            instructions += self._drop_grant()
        if self.state is SenderState.HANDED:
            self._move(SenderState.SENDING)
        self.decode = decode
        self.reservation = Reservation.NONE
        if self.state is SenderState.QUEUED:
            return instructions
        return [*instructions, *self._ask()]

    def cancel(self, reason: str) -> list[Instruction]:
        """The client is gone, the router is, or the deadline passed."""
        if self.state in (SenderState.DRAINING, SenderState.RELEASED):
            return []
        return self._give_up(reason)

    # -- from the transport -------------------------------------------------------------------------------------------

    def pushed(self, reservation: str, indices: Iterable[int]) -> list[Instruction]:
        """These blocks have left."""
        grant = self._grant
        if grant is None or grant.reservation != reservation:
            return []
        return [*self._push_indices(grant, grant.left(indices)), *self._answer_resend(grant)]

    def transfer_failed(self, reservation: str, cause: str) -> list[Instruction]:
        """The transport cannot reach decode's pool."""
        if self._grant is None or self._grant.reservation != reservation:
            return []
        return self.refused(self._grant.decode, f"transfer failed: {cause}")

    def drained(self, reservation: str) -> list[Instruction]:
        """No write of this reservation is or will be in flight."""
        decode = self._draining.pop(reservation, None)
        told: list[Instruction] = [SendDrained(decode, reservation)] if decode is not None else []
        if self.state is SenderState.DRAINING:
            return [*told, *self._finish_draining()]
        return told

    # -- inside -------------------------------------------------------------------------------------------------------

    def _move(self, state: SenderState) -> None:
        self.state = moved(TRANSITIONS, self.state, state)

    def _expect(self, *states: SenderState) -> None:
        if self.state not in states:
            raise IllegalTransition(f"not in {self.state}")

    def _ask(self) -> list[Instruction]:
        if self.decode is None:
            return []
        self.reservation = Reservation.ASKED
        return [AskDecode(self.decode)]

    def _push(self) -> list[Instruction]:
        """Whatever is complete, granted and not pushed yet; after the last of it, the handoff message."""
        grant = self._grant
        if grant is None or self.state not in (SenderState.COMPUTING, SenderState.SENDING):
            return []
        if self._push_when == "prompt" and self.state is SenderState.COMPUTING:
            return []
        instructions = self._push_indices(grant, grant.take_ready(self._num_complete))
        if self.state is SenderState.SENDING and self.first_token is not None:
            self._move(SenderState.HANDED)
            instructions.append(self._handoff(grant))
        return instructions

    def _answer_resend(self, grant: Grant) -> list[Instruction]:
        if not grant.take_answer():
            return []
        return [self._handoff(grant)] if self.state is SenderState.HANDED else []

    @staticmethod
    def _handoff(grant: Grant) -> SendHandoff:
        return SendHandoff(grant.decode, grant.reservation, len(grant.slots), grant.answered)

    def _push_indices(self, grant: Grant, indices: list[int]) -> list[Instruction]:
        if not indices:
            return []
        copies = grant.copies(indices, self._blocks)
        return [PushBlocks(grant.reservation, grant.transport, grant.endpoint, copies)]

    def _drop_grant(self) -> list[Instruction]:
        """Gives a grant back; its writes are drained while the sequence may go on elsewhere."""
        grant, self._grant = self._grant, None
        if grant is None:
            return []
        self._draining[grant.reservation] = grant.decode
        return [AbortTransfer(grant.reservation, grant.transport)]

    def _give_up(self, reason: str) -> list[Instruction]:
        instructions: list[Instruction] = []
        if self._grant is not None:
            instructions.append(SendAbort(self._grant.decode, self._grant.reservation, reason))
        elif self.reservation in (Reservation.ASKED, Reservation.DEFERRED) and self.decode is not None:
            instructions.append(SendAbort(self.decode, "", reason))
        instructions += self._drop_grant()
        self.reservation = Reservation.NONE
        if self._draining:
            self._move(SenderState.DRAINING)
            return instructions
        self._move(SenderState.RELEASED)
        return [*instructions, ReleaseBlocks()]

    def _finish_draining(self) -> list[Instruction]:
        if self._draining:
            return []
        self._move(SenderState.RELEASED)
        return [ReleaseBlocks()]
