"""The transports of other ranks, as the transfer drivers of rank 0 see them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from functools import partial
from typing import Protocol

from kvrelay.ranks.transfer_messages import (
    AbortCall,
    AdmitCall,
    PushCall,
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


class RankCalls(Protocol):
    """The channel to the ranks, as `RankGroup` has it."""

    def publish_call(self, rank: int, call: TransferCall) -> None:
        """Has a rank carry out a call. Calls to a failed group are lost."""
        ...

    def on_report(self, rank: int, transport: str, handle: Callable[[TransferReport], None]) -> None:
        """From now on `handle` gets what this transport of the rank reports, on a thread of the group."""
        ...

    def endpoints_of(self, rank: int) -> Mapping[str, Endpoint]:
        """The addresses of a rank's transports by name. That of a sender is empty."""
        ...

    @property
    def identities(self) -> Sequence[str]:
        """The processes of all ranks but rank 0. See `kvrelay.process_identity`."""
        ...


class RemoteSender:
    """A `PartSender` over another rank's pool. `name`: of the rank's transport."""

    def __init__(self, rank: int, calls: RankCalls, name: str) -> None:
        self.name = name
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

        self._calls.on_report(self._rank, self.name, handle)

    def push(self, reservation: str, endpoint: Endpoint, copies: Sequence[BlockPush]) -> None:
        self._push(reservation, endpoint, copies, None)

    def push_part(self, reservation: str, endpoint: Endpoint, copies: Sequence[BlockPush], part: PartCopy) -> None:
        self._push(reservation, endpoint, copies, part)

    def abort(self, reservation: str) -> None:
        self._calls.publish_call(self._rank, AbortCall(self.name, reservation))

    def close(self) -> None:
        """The rank closes its transports when the group ends."""

    def _push(self, reservation: str, endpoint: Endpoint, copies: Sequence[BlockPush], part: PartCopy | None) -> None:
        numbers = [(copy.index, copy.source, copy.slot) for copy in copies]
        self._calls.publish_call(self._rank, PushCall(self.name, reservation, dict(endpoint), numbers, part))


class RemoteReceiver:
    """A `PartReceiver` over another rank's pool. `name` and `is_one_sided`: of the rank's transport.

    See `transfer_messages` for why `release` need not wait.
    """

    def __init__(self, rank: int, calls: RankCalls, name: str, *, is_one_sided: bool) -> None:
        self.name = name
        self.is_one_sided = is_one_sided
        self._rank = rank
        self._calls = calls

    @property
    def endpoint(self) -> Endpoint:
        return dict(self._calls.endpoints_of(self._rank)[self.name])

    def start(self, on_event: Callable[[ReceiverEvent], None]) -> None:
        port = LoopPort[ReceiverEvent](on_event)
        self._calls.on_report(self._rank, self.name, lambda report: port.emit(receiver_event(report)))

    def admit(self, reservation: str, first_block: int, slots: Sequence[int]) -> None:
        self._calls.publish_call(self._rank, AdmitCall(self.name, reservation, first_block, list(slots)))

    def admit_parts(self, reservation: str, first_block: int, slots: Sequence[int], parts: Sequence[BlockPart]) -> None:
        self._calls.publish_call(self._rank, AdmitCall(self.name, reservation, first_block, list(slots), list(parts)))

    def release(self, reservation: str) -> None:
        self._calls.publish_call(self._rank, ReleaseCall(self.name, reservation))

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
    process: str,
    rank: int,
    transport: str,
    event: SenderEvent | ReceiverEvent,
    counters: SenderCounters | None,
) -> TransferReport:
    """The message about an event of this rank's transport."""
    values = None if counters is None else astuple(counters)
    make = partial(TransferReport, process, rank, transport)
    match event:
        case Pushed(reservation, blocks, num_bytes):
            return make("pushed", reservation, list(blocks), num_bytes, counters=values)
        case SenderDrained(reservation):
            return make("drained", reservation, counters=values)
        case TransferFailed(reservation, cause):
            return make("failed", reservation, cause=cause, counters=values)
        case Landed(reservation, blocks):
            return make("landed", reservation, list(blocks))
        case Corrupted(reservation, blocks):
            return make("corrupted", reservation, list(blocks))
