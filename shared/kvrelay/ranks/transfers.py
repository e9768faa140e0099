"""The transports of all ranks of a worker: rank 0's own, and those of the other ranks, which it calls by messages."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from kvrelay.handoff.transports.base import (
    BlockPush,
    Endpoint,
    LoopPort,
    ReceiverEvent,
    SenderCounters,
    SenderEvent,
    TransferReceiver,
    TransferSender,
)
from kvrelay.handoff.transports.pool_memory import BlockPart, PartCopy
from kvrelay.handoff.transports.sharded import ShardedReceiver, ShardedSender, ShardLayout
from kvrelay.kv.shard_map import ShardShape
from kvrelay.ranks.messages import Abort, Admit, Push, Release, TransferCall, TransferReport
from kvrelay.ranks.rank_group import RankGroup
from kvrelay.step.batch import ModelSpec

log = logging.getLogger(__name__)

Own = TypeVar("Own", TransferSender, TransferReceiver)


class RemoteSender:
    """A `TransferSender` over another rank's pool. `name`: of the rank's transport."""

    def __init__(self, rank: int, group: RankGroup, name: str) -> None:
        self.name = name
        self.counters = SenderCounters()
        self._rank = rank
        self._group = group

    def start(self, on_event: Callable[[SenderEvent], None]) -> None:
        port = LoopPort[SenderEvent](on_event)

        def handle(report: TransferReport) -> None:
            self.counters = report.counters or self.counters
            port.emit(report.event)  # type: ignore[arg-type]

        self._group.on_report(self._rank, self.name, handle)

    def push(
        self, reservation: str, endpoint: Endpoint, copies: Sequence[BlockPush], part: PartCopy | None = None
    ) -> None:
        self._group.call(self._rank, Push(self.name, reservation, dict(endpoint), list(copies), part))

    def abort(self, reservation: str) -> None:
        self._group.call(self._rank, Abort(self.name, reservation))

    def close(self) -> None:
        """The rank closes its transports when the group ends."""


class RemoteReceiver:
    """A `TransferReceiver` over another rank's pool. `name` and `is_one_sided`: of the rank's transport.

    See `rank_member` for why `release` need not wait.
    """

    def __init__(self, rank: int, group: RankGroup, name: str, *, is_one_sided: bool) -> None:
        self.name = name
        self.is_one_sided = is_one_sided
        self._rank = rank
        self._group = group

    @property
    def endpoint(self) -> Endpoint:
        return dict(self._group.endpoints_of(self._rank)[self.name])

    def start(self, on_event: Callable[[ReceiverEvent], None]) -> None:
        port = LoopPort[ReceiverEvent](on_event)
        self._group.on_report(self._rank, self.name, lambda report: port.emit(report.event))  # type: ignore[arg-type]

    def admit(self, reservation: str, first_block: int, slots: Sequence[int], parts: Sequence[BlockPart] = ()) -> None:
        self._group.call(self._rank, Admit(self.name, reservation, first_block, list(slots), list(parts)))

    def release(self, reservation: str) -> None:
        self._group.call(self._rank, Release(self.name, reservation))

    def close(self) -> None:
        """The rank closes its transports when the group ends."""


def carry_out(call: TransferCall, transport: TransferSender | TransferReceiver) -> None:
    """Calls this rank's transport as rank 0 says."""
    match call, transport:
        case Push(_, reservation, endpoint, copies, part), TransferSender():
            transport.push(reservation, endpoint, copies, part)
        case Abort(_, reservation), TransferSender():
            transport.abort(reservation)
        case Admit(_, reservation, first_block, slots, parts), TransferReceiver():
            transport.admit(reservation, first_block, slots, parts)
        case Release(_, reservation), TransferReceiver():
            transport.release(reservation)
        case _:
            raise ValueError(f"{transport.name} takes no {type(call).__name__}")


def as_sharded_sender(sender: TransferSender | ShardedSender, spec: ModelSpec) -> ShardedSender:
    """The sender of all ranks."""
    return sender if isinstance(sender, ShardedSender) else ShardedSender((sender,), _one_rank(spec))


def as_sharded_receiver(receiver: TransferReceiver | ShardedReceiver, spec: ModelSpec) -> ShardedReceiver:
    """The receiver of all ranks."""
    return receiver if isinstance(receiver, ShardedReceiver) else ShardedReceiver((receiver,), _one_rank(spec))


def with_other_ranks_senders(
    senders: Mapping[str, TransferSender], spec: ModelSpec, group: RankGroup | None
) -> Mapping[str, TransferSender | ShardedSender]:
    """The senders of all ranks, given those of rank 0, which are closed if another rank does not have them. `group`:
    None for a worker in one process."""
    if group is None:
        return senders
    layout = _layout_of(spec)
    others = range(1, layout.shape.num_ranks)
    return {
        name: ShardedSender((sender, *(RemoteSender(rank, group, name) for rank in others)), layout)
        for name, sender in _common(senders, group, others).items()
    }


def with_other_ranks_receivers(
    receivers: Mapping[str, TransferReceiver], spec: ModelSpec, group: RankGroup | None
) -> Mapping[str, TransferReceiver | ShardedReceiver]:
    """The receivers of all ranks, as `with_other_ranks_senders`."""
    if group is None:
        return receivers
    layout, found = _layout_of(spec), {}
    others = range(1, layout.shape.num_ranks)
    for name, own in _common(receivers, group, others).items():
        remote = (RemoteReceiver(rank, group, name, is_one_sided=own.is_one_sided) for rank in others)
        found[name] = ShardedReceiver((own, *remote), layout)
    return found


def shards_of(senders: Mapping[str, ShardedSender], spec: ModelSpec) -> ShardShape:
    """The shape of this worker's ranks."""
    return next((sender.shape for sender in senders.values()), _one_rank(spec).shape)


def _common(own: Mapping[str, Own], group: RankGroup, others: range) -> dict[str, Own]:
    """Those that all ranks have. Closes the rest."""
    common = {}
    for name, transport in own.items():
        lacking = [rank for rank in others if name not in group.endpoints_of(rank)]
        if lacking:
            ranks = ", ".join(map(str, lacking))
            log.warning("KV blocks do not travel by %s: it does not work on rank %s, whose log says why", name, ranks)
            transport.close()
        else:
            common[name] = transport
    return common


def _layout_of(spec: ModelSpec) -> ShardLayout:
    shape = ShardShape(spec.tensor_parallel_size, spec.total_kv_heads, spec.pipeline_parallel_size)
    return ShardLayout.of(shape, spec.total_layers, spec.block_bytes // spec.num_layers)


def _one_rank(spec: ModelSpec) -> ShardLayout:
    return ShardLayout.of(ShardShape(1, spec.num_kv_heads), spec.num_layers, spec.block_bytes // spec.num_layers)
