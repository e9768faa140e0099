"""The transports of a worker as those of its ranks. A worker in one process has one rank."""

from __future__ import annotations

from collections.abc import Mapping

from kvrelay.engine.batch import ModelSpec
from kvrelay.kv.shard_map import ShardShape
from kvrelay.protocol.messages import Shards
from kvrelay.ranks.remote_transfers import RemoteReceiver, RemoteSender
from kvrelay.transfer.base import TransferReceiver, TransferSender
from kvrelay.transfer.sharded import ShardedReceiver, ShardedSender, ShardLayout
from kvrelay.worker.context import WorkerContext


def as_sharded_sender(sender: TransferSender | ShardedSender, spec: ModelSpec) -> ShardedSender:
    """The sender of all ranks."""
    return sender if isinstance(sender, ShardedSender) else ShardedSender((sender,), _one_rank(spec))


def as_sharded_receiver(receiver: TransferReceiver | ShardedReceiver, spec: ModelSpec) -> ShardedReceiver:
    """The receiver of all ranks."""
    return receiver if isinstance(receiver, ShardedReceiver) else ShardedReceiver((receiver,), _one_rank(spec))


def with_other_ranks_senders(
    senders: Mapping[str, TransferSender], context: WorkerContext
) -> Mapping[str, TransferSender | ShardedSender]:
    """The senders of all ranks, given those of rank 0."""
    if context.ranks is None or (calls := context.ranks.calls) is None:
        return senders
    layout = _layout_of(context.spec)
    others = [RemoteSender(rank, calls) for rank in range(1, layout.shape.num_ranks)]
    return {name: ShardedSender((sender, *others), layout) for name, sender in senders.items()}


def with_other_ranks_receivers(
    receivers: Mapping[str, TransferReceiver], context: WorkerContext
) -> Mapping[str, TransferReceiver | ShardedReceiver]:
    """The receivers of all ranks, given those of rank 0."""
    if context.ranks is None or (calls := context.ranks.calls) is None:
        return receivers
    layout = _layout_of(context.spec)
    others = [RemoteReceiver(rank, calls) for rank in range(1, layout.shape.num_ranks)]
    return {name: ShardedReceiver((receiver, *others), layout) for name, receiver in receivers.items()}


def shards_of(senders: Mapping[str, ShardedSender], spec: ModelSpec) -> Shards:
    """The description of this worker's ranks in `Reserve`."""
    shape = next((sender.shape for sender in senders.values()), _one_rank(spec).shape)
    return Shards(size=shape.size, num_kv_heads=shape.num_kv_heads, num_stages=shape.num_stages)


def _layout_of(spec: ModelSpec) -> ShardLayout:
    shape = ShardShape(spec.tensor_parallel_size, spec.total_kv_heads, spec.pipeline_parallel_size)
    return ShardLayout.of(shape, spec.total_layers, spec.block_bytes // spec.num_layers)


def _one_rank(spec: ModelSpec) -> ShardLayout:
    return ShardLayout.of(ShardShape(1, spec.num_kv_heads), spec.num_layers, spec.block_bytes // spec.num_layers)
