"""The transports of a worker as those of its ranks. A worker in one process has one rank."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TypeVar

from kvrelay.kv.shard_map import ShardShape
from kvrelay.protocol.messages import Shards
from kvrelay.ranks.remote_transfers import RankCalls, RemoteReceiver, RemoteSender
from kvrelay.step.batch import ModelSpec
from kvrelay.transfer.base import TransferReceiver, TransferSender
from kvrelay.transfer.sharded import ShardedReceiver, ShardedSender, ShardLayout
from kvrelay.worker.context import WorkerContext

log = logging.getLogger(__name__)

End = TypeVar("End", TransferSender, TransferReceiver)


def as_sharded_sender(sender: TransferSender | ShardedSender, spec: ModelSpec) -> ShardedSender:
    """The sender of all ranks."""
    return sender if isinstance(sender, ShardedSender) else ShardedSender((sender,), _one_rank(spec))


def as_sharded_receiver(receiver: TransferReceiver | ShardedReceiver, spec: ModelSpec) -> ShardedReceiver:
    """The receiver of all ranks."""
    return receiver if isinstance(receiver, ShardedReceiver) else ShardedReceiver((receiver,), _one_rank(spec))


def with_other_ranks_senders(
    senders: Mapping[str, TransferSender], context: WorkerContext
) -> Mapping[str, TransferSender | ShardedSender]:
    """The senders of all ranks, given those of rank 0, which are closed if another rank does not have them."""
    if (calls := _calls_of(context)) is None:
        return senders
    layout = _layout_of(context.spec)
    others = range(1, layout.shape.num_ranks)
    return {
        name: ShardedSender((sender, *(RemoteSender(rank, calls, name) for rank in others)), layout)
        for name, sender in _common(senders, calls, others).items()
    }


def with_other_ranks_receivers(
    receivers: Mapping[str, TransferReceiver], context: WorkerContext
) -> Mapping[str, TransferReceiver | ShardedReceiver]:
    """The receivers of all ranks, given those of rank 0, which are closed if another rank does not have them."""
    if (calls := _calls_of(context)) is None:
        return receivers
    layout = _layout_of(context.spec)
    others = range(1, layout.shape.num_ranks)

    def remote(rank: int, name: str, own: TransferReceiver) -> RemoteReceiver:
        return RemoteReceiver(rank, calls, name, is_one_sided=own.is_one_sided)

    return {
        name: ShardedReceiver((receiver, *(remote(rank, name, receiver) for rank in others)), layout)
        for name, receiver in _common(receivers, calls, others).items()
    }


def other_ranks_identities(context: WorkerContext) -> list[str]:
    """The processes of this worker's ranks but rank 0, see `kvrelay.process_identity`. Empty for a single process."""
    calls = _calls_of(context)
    return [] if calls is None else list(calls.identities)


def shards_of(senders: Mapping[str, ShardedSender], spec: ModelSpec) -> Shards:
    """The description of this worker's ranks in `Reserve`."""
    shape = next((sender.shape for sender in senders.values()), _one_rank(spec).shape)
    return Shards(size=shape.size, num_kv_heads=shape.num_kv_heads, num_stages=shape.num_stages)


def _calls_of(context: WorkerContext) -> RankCalls | None:
    """The channel to the other ranks. None: the worker is a single process."""
    return None if context.ranks is None else context.ranks.calls


def _common(ends: Mapping[str, End], calls: RankCalls, others: range) -> dict[str, End]:
    """Those that all ranks have. Closes the rest."""
    common = {}
    for name, end in ends.items():
        lacking = [rank for rank in others if name not in calls.endpoints_of(rank)]
        if lacking:
            ranks = ", ".join(map(str, lacking))
            log.warning("KV blocks do not travel by %s: it does not work on rank %s, whose log says why", name, ranks)
            end.close()
        else:
            common[name] = end
    return common


def _layout_of(spec: ModelSpec) -> ShardLayout:
    shape = ShardShape(spec.tensor_parallel_size, spec.total_kv_heads, spec.pipeline_parallel_size)
    return ShardLayout.of(shape, spec.total_layers, spec.block_bytes // spec.num_layers)


def _one_rank(spec: ModelSpec) -> ShardLayout:
    return ShardLayout.of(ShardShape(1, spec.num_kv_heads), spec.num_layers, spec.block_bytes // spec.num_layers)
