"""Events and instructions of the decode side of a handoff: plain data between the machine and `Receiving`."""

from __future__ import annotations

import msgspec

from kvrelay.protocol.messages import Handoff
from kvrelay.transfer.base import Corrupted, Landed

# -- events -----------------------------------------------------------------------------------------------------------


class ReservationOpened(msgspec.Struct, frozen=True):
    """Slots are held for the prompt's blocks [first_block, num_blocks); the blocks before are in decode's cache.

    `needs_quarantine`: the transport writes one-sidedly, so writes may land after the reservation has ended.
    """

    reservation: str
    first_block: int
    num_blocks: int
    needs_quarantine: bool


class HandoffReceived(msgspec.Struct, frozen=True):
    """The handoff message arrived, which prefill sends after the last push. It may be a repeated one."""

    message: Handoff


class HandoffOverdue(msgspec.Struct, frozen=True):
    """Nothing has arrived for this reservation for a while."""


class TransferStalled(msgspec.Struct, frozen=True):
    """The transport of this reservation brings nothing more, so asking again is of no use."""

    cause: str


class HandoffAborted(msgspec.Struct, frozen=True):
    """Prefill ended the handoff. It sends Drained when no write is in flight."""


class ReceiveCancelled(msgspec.Struct, frozen=True):
    """The client is gone, the router is gone, or this worker is leaving."""

    reason: str


class PrefillLost(msgspec.Struct, frozen=True):
    """The prefill worker is silent or gone. This alone does not prove that no write will land."""


class WritesDrained(msgspec.Struct, frozen=True):
    """No write is or will be in flight: prefill has reported it, or its process has ended."""


class AdoptionRefused(msgspec.Struct, frozen=True):
    """The scheduler did not take the committed sequence. Prefill still holds its KV."""

    reason: str


ReceiverHandoffEvent = (
    ReservationOpened
    | Landed
    | Corrupted
    | HandoffReceived
    | HandoffOverdue
    | TransferStalled
    | HandoffAborted
    | ReceiveCancelled
    | PrefillLost
    | WritesDrained
    | AdoptionRefused
)

# -- instructions -----------------------------------------------------------------------------------------------------


class Commit(msgspec.Struct, frozen=True):
    """All blocks and the handoff message are here: pass the sequence to the scheduler and send Committed."""

    handoff: Handoff


class StopReceiving(msgspec.Struct, frozen=True):
    """Accept no more blocks of this reservation."""

    reservation: str


class QuarantineBlocks(msgspec.Struct, frozen=True):
    """The slots may still be written. Do not reuse them before `WritesDrained`."""


class FreeBlocks(msgspec.Struct, frozen=True):
    """Free the reservation's blocks. The first `num_whole` blocks of the prompt are complete and may be cached."""

    num_whole: int


class SendResend(msgspec.Struct, frozen=True):
    """Ask prefill to push these blocks again. `number` counts the requests of this reservation."""

    reservation: str
    blocks: tuple[int, ...]
    number: int
    corrupted: bool


class RecheckBlocks(msgspec.Struct, frozen=True):
    """Compare these blocks, which have landed, with the bytes that were sent. `Landed` or `Corrupted` follows."""

    reservation: str
    blocks: tuple[int, ...]


class SendReleased(msgspec.Struct, frozen=True):
    """Tell prefill that the reservation has ended. `transport_failed`: blocks were lost or corrupted too often."""

    reservation: str
    reason: str
    transport_failed: bool = False


ReceiverInstruction = Commit | StopReceiving | QuarantineBlocks | FreeBlocks | SendResend | RecheckBlocks | SendReleased
