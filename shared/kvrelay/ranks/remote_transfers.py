"""The transports of other ranks, as the transfer drivers of rank 0 see them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import Protocol

from kvrelay.ranks.transfer_messages import (
    AbortCall,
    AdmitCall,
    PushCall,
    RecheckCall,
    ReleaseCall,
    TransferCall,
    TransferReport,
)
from kvrelay.transfer.base import (
    BlockPush,
    Corrupted,
    Landed,
    Pushed,
    ReceiverEvent,
    SenderDrained,
    SenderEvent,
    TransferFailed,
)
from kvrelay.transfer.block_parts import BlockPart, PartCopy
from kvrelay.transfer.counters import SenderCounters
from kvrelay.transfer.endpoints import Endpoint
from kvrelay.transfer.loop_port import LoopPort

NAME = "zmq"
"""The transport of all ranks."""


class RankCalls(Protocol):
    """The channel to the ranks, as `RankGroup` has it."""

    def publish_call(self, rank: int, call: TransferCall) -> None:
        """Has a rank carry out a call. Calls to a failed group are lost."""
        ...

    def on_report(self, rank: int, handle: Callable[[TransferReport], None]) -> None:
        """From now on `handle` gets what the rank's transport reports, on a thread of the group."""
        ...

    def endpoint_of(self, rank: int) -> Endpoint:
        """The address of a rank's receiver."""
        ...


class RemoteSender:
    """A `PartSender` over another rank's pool."""

    name = NAME

    def __init__(self, rank: int, calls: RankCalls) -> None:
        self.counters = SenderCounters()
        self._rank = rank
        self._calls = calls

    def start(self, on_event: Callable[[SenderEvent], None]) -> None:
        port = LoopPort[SenderEvent](on_event)

        def handle(report: TransferReport) -> None:
            if report.counters is not None:
                counters = self.counters
                (
                    counters.num_messages,
                    counters.num_blocks,
                    counters.num_runs,
                    counters.num_bytes,
                    counters.post_s,
                    counters.num_resets,
                ) = report.counters
            port.emit(sender_event(report))

        self._calls.on_report(self._rank, handle)

    def push(self, reservation: str, endpoint: Endpoint, copies: Sequence[BlockPush]) -> None:
        self._push(reservation, endpoint, copies, None)

    def push_part(self, reservation: str, endpoint: Endpoint, copies: Sequence[BlockPush], part: PartCopy) -> None:
        self._push(reservation, endpoint, copies, part)

    def abort(self, reservation: str) -> None:
        self._calls.publish_call(self._rank, AbortCall(reservation))

    def close(self) -> None:
        """The rank closes its transports when the group ends."""

    def _push(self, reservation: str, endpoint: Endpoint, copies: Sequence[BlockPush], part: PartCopy | None) -> None:
        numbers = [(copy.index, copy.source, copy.slot) for copy in copies]
        self._calls.publish_call(self._rank, PushCall(reservation, dict(endpoint), numbers, part))


class RemoteReceiver:
    """A `PartReceiver` over another rank's pool. See `transfer_messages` for why `release` need not wait."""

    name = NAME
    needs_quarantine = False

    def __init__(self, rank: int, calls: RankCalls) -> None:
        self._rank = rank
        self._calls = calls

    @property
    def endpoint(self) -> Endpoint:
        return self._calls.endpoint_of(self._rank)

    def start(self, on_event: Callable[[ReceiverEvent], None]) -> None:
        port = LoopPort[ReceiverEvent](on_event)
        self._calls.on_report(self._rank, lambda report: port.emit(receiver_event(report)))

    def admit(self, reservation: str, first_block: int, slots: Sequence[int]) -> None:
        self._calls.publish_call(self._rank, AdmitCall(reservation, first_block, list(slots)))

    def admit_parts(self, reservation: str, first_block: int, slots: Sequence[int], parts: Sequence[BlockPart]) -> None:
        self._calls.publish_call(self._rank, AdmitCall(reservation, first_block, list(slots), list(parts)))

    def recheck(self, reservation: str, blocks: Sequence[int]) -> None:
        self._calls.publish_call(self._rank, RecheckCall(reservation, list(blocks)))

    def release(self, reservation: str) -> None:
        self._calls.publish_call(self._rank, ReleaseCall(reservation))

    def close(self) -> None:
        """The rank closes its transports when the group ends."""


def sender_event(report: TransferReport) -> SenderEvent:
    match report.event:
        case "pushed":
            return Pushed(report.reservation, tuple(report.blocks), report.num_bytes)
        case "drained":
            return SenderDrained(report.reservation)
        case "failed":
            return TransferFailed(report.reservation, report.cause)
        case _:
            raise ValueError(f"rank {report.rank} sends blocks and reports {report.event}")


def receiver_event(report: TransferReport) -> ReceiverEvent:
    match report.event:
        case "landed":
            return Landed(report.reservation, tuple(report.blocks))
        case "corrupted":
            return Corrupted(report.reservation, tuple(report.blocks))
        case _:
            raise ValueError(f"rank {report.rank} takes blocks and reports {report.event}")


def report_of(
    process: str, rank: int, event: SenderEvent | ReceiverEvent, counters: SenderCounters | None
) -> TransferReport:
    """The message about an event of this rank's transport."""
    values = None if counters is None else astuple(counters)
    match event:
        case Pushed(reservation, blocks, num_bytes):
            return TransferReport(process, rank, "pushed", reservation, list(blocks), num_bytes, counters=values)
        case SenderDrained(reservation):
            return TransferReport(process, rank, "drained", reservation, counters=values)
        case TransferFailed(reservation, cause):
            return TransferReport(process, rank, "failed", reservation, cause=cause, counters=values)
        case Landed(reservation, blocks):
            return TransferReport(process, rank, "landed", reservation, list(blocks))
        case Corrupted(reservation, blocks):
            return TransferReport(process, rank, "corrupted", reservation, list(blocks))
