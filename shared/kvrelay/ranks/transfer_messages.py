"""Calls of rank 0 to the transports of the other ranks, and what these report.

A rank carries calls out in their order, at once: also while it computes a step. That is safe because rank 0 pushes
blocks when the step that computed them has ended on all ranks, and admits blocks that no step in flight uses. A step
waits for the calls that were published before it, so a released slot is not written any more when a step uses it.
Transports with one-sided writes cannot promise that: rank 0 keeps their slots in quarantine.

A rank may have several transports, and each call and each report names one.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from kvrelay.transfer.block_parts import BlockPart, PartCopy

CALL_TOPIC = b"t"
"""First byte of the first frame of published calls; the second one is the rank's number."""


class TransferSettings(msgspec.Struct, array_like=True, frozen=True):
    """The transports that each rank of a worker opens, see `make_senders` and `make_receivers`."""

    role: Literal["prefill", "decode"]
    choice: Literal["auto", "nixl", "zmq"]
    checksums: bool
    max_peers: int
    ucx_transports: str = ""


class PushCall(msgspec.Struct, array_like=True, frozen=True, tag="push"):
    """See `TransferSender.push` and, with a part, `PartSender.push_part`. `copies`: index, source and slot of each."""

    transport: str
    reservation: str
    endpoint: dict[str, str]
    copies: list[tuple[int, int, int]]
    part: PartCopy | None = None


class AbortCall(msgspec.Struct, array_like=True, frozen=True, tag="abort"):
    """Ends the pushes of a reservation, as `TransferSender.abort` does."""

    transport: str
    reservation: str


class AdmitCall(msgspec.Struct, array_like=True, frozen=True, tag="admit"):
    """See `TransferReceiver.admit` and, with parts, `PartReceiver.admit_parts`."""

    transport: str
    reservation: str
    first_block: int
    slots: list[int]
    parts: list[BlockPart] = []


class ReleaseCall(msgspec.Struct, array_like=True, frozen=True, tag="release"):
    """Takes no more blocks of a reservation, as `TransferReceiver.release` does."""

    transport: str
    reservation: str


TransferCall = PushCall | AbortCall | AdmitCall | ReleaseCall


class TransferReport(msgspec.Struct, array_like=True, frozen=True, tag="transfer"):
    """An event of a rank's transport. `counters`: those of a sender, in the order of `SenderCounters`."""

    process: str
    rank: int
    transport: str
    event: Literal["pushed", "drained", "failed", "landed", "corrupted"]
    reservation: str
    blocks: list[int] = []
    num_bytes: int = 0
    cause: str = ""
    counters: tuple[int, int, int, int, float, int] | None = None
