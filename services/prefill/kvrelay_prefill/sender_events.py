"""Events and instructions of the prefill side of a handoff: plain data between the machine and `Sending`."""

from __future__ import annotations

import msgspec

from kvrelay.protocol.failure_kind import FailureKind
from kvrelay.protocol.messages import FirstToken, Granted, PeerRef
from kvrelay.transfer.base import BlockPush, Pushed, SenderDrained, TransferFailed

# -- events from the scheduler ----------------------------------------------------------------------------------------


class PrefillScheduled(msgspec.Struct, frozen=True):
    """The first chunk is scheduled. `blocks` are all blocks of the prompt, in order."""

    blocks: tuple[int, ...]


class BlocksComputed(msgspec.Struct, frozen=True):
    """The KV of the first `num_complete` blocks is complete. Cached blocks count."""

    num_complete: int


class PrefillFinished(msgspec.Struct, frozen=True):
    """The last chunk is computed. If `first_token` has a finish reason, the request ends with it."""

    first_token: FirstToken


# -- events from decode -----------------------------------------------------------------------------------------------


class ReservationGranted(msgspec.Struct, frozen=True):
    """Decode reserved slots for the blocks that its cache lacks."""

    decode: PeerRef
    message: Granted


class ReservationDeferred(msgspec.Struct, frozen=True):
    """Decode is full and will grant when it has room."""

    decode: PeerRef


class ReservationRefused(msgspec.Struct, frozen=True):
    """Decode will not take the sequence."""

    decode: PeerRef
    reason: str


class ReservationReleased(msgspec.Struct, frozen=True):
    """Decode ended the reservation and waits for Drained."""

    decode: PeerRef
    reservation: str
    reason: str


class HandoffCommitted(msgspec.Struct, frozen=True):
    """Decode owns the sequence."""

    reservation: str


class ResendRequested(msgspec.Struct, frozen=True):
    """Blocks did not arrive at decode, or arrived corrupted. `number` counts the requests of one reservation."""

    reservation: str
    indices: tuple[int, ...]
    number: int = 0
    corrupted: bool = False


class DecodeLost(msgspec.Struct, frozen=True):
    """The decode worker's process is gone or silent."""

    decode: PeerRef
    reason: str


# -- events from the router -------------------------------------------------------------------------------------------


class DecodeReassigned(msgspec.Struct, frozen=True):
    """The router named another decode worker. None: no worker is left."""

    decode: PeerRef | None


class SendCancelled(msgspec.Struct, frozen=True):
    """The client is gone, the router is gone, or the deadline has passed."""

    reason: str


SenderHandoffEvent = (
    PrefillScheduled
    | BlocksComputed
    | PrefillFinished
    | ReservationGranted
    | ReservationDeferred
    | ReservationRefused
    | ReservationReleased
    | HandoffCommitted
    | ResendRequested
    | DecodeLost
    | DecodeReassigned
    | SendCancelled
    | Pushed
    | SenderDrained
    | TransferFailed
)

# -- instructions -----------------------------------------------------------------------------------------------------


class SendReserve(msgspec.Struct, frozen=True):
    """Ask this decode worker for a reservation."""

    decode: PeerRef


class SendNeedDecode(msgspec.Struct, frozen=True):
    """Ask the router for another decode worker. `excluded` are ids of workers that cannot take the sequence."""

    reason: str
    excluded: tuple[str, ...]
    lacks: PeerRef | None = None


class PushBlocks(msgspec.Struct, frozen=True):
    """Push these blocks, and hold them until `Pushed` or `SenderDrained`. `rank_endpoints` and `num_stages`: see
    `Granted`."""

    reservation: str
    transport: str
    endpoint: dict[str, str]
    copies: tuple[BlockPush, ...]
    rank_endpoints: tuple[dict[str, str], ...] = ()
    num_stages: int = 1


class SendHandoff(msgspec.Struct, frozen=True):
    """Send the handoff message. `resend` is the number of the last resend request that it answers."""

    decode: PeerRef
    reservation: str
    num_blocks: int
    resend: int = 0


class AbortTransfer(msgspec.Struct, frozen=True):
    """Stop pushing. `SenderDrained` follows when nothing is in flight."""

    reservation: str
    transport: str


class SendAbort(msgspec.Struct, frozen=True):
    """Tell decode that this handoff has ended without a commit."""

    decode: PeerRef
    reservation: str
    reason: str


class SendDrained(msgspec.Struct, frozen=True):
    """Tell decode that no write of this reservation is or will be in flight."""

    decode: PeerRef
    reservation: str


class ReleaseBlocks(msgspec.Struct, frozen=True):
    """Free the sequence's blocks. Nothing reads them any more."""


class SendFailed(msgspec.Struct, frozen=True):
    """Tell the router that this attempt has failed here."""

    kind: FailureKind
    cause: str


SenderInstruction = (
    SendReserve
    | SendNeedDecode
    | PushBlocks
    | SendHandoff
    | AbortTransfer
    | SendAbort
    | SendDrained
    | ReleaseBlocks
    | SendFailed
)
