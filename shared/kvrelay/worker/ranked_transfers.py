"""The transports of a worker as those of its ranks. A worker in one process has one rank."""

from __future__ import annotations

from collections.abc import Mapping

from kvrelay.engine.batch import ModelSpec
from kvrelay.kv.shard_map import ShardShape
from kvrelay.protocol.messages import Shards
from kvrelay.transfer.base import TransferReceiver, TransferSender
from kvrelay.transfer.sharded import ShardedReceiver, ShardedSender, ShardLayout


def as_sharded_sender(sender: TransferSender | ShardedSender, spec: ModelSpec) -> ShardedSender:
    """The sender of all ranks."""
    return sender if isinstance(sender, ShardedSender) else ShardedSender((sender,), _one_rank(spec))


def as_sharded_receiver(receiver: TransferReceiver | ShardedReceiver, spec: ModelSpec) -> ShardedReceiver:
    """The receiver of all ranks."""
    return receiver if isinstance(receiver, ShardedReceiver) else ShardedReceiver((receiver,), _one_rank(spec))


def shards_of(senders: Mapping[str, ShardedSender], spec: ModelSpec) -> Shards:
    """What `Reserve` says of the ranks of this worker."""
    shape = next((sender.shape for sender in senders.values()), _one_rank(spec).shape)
    return Shards(size=shape.size, num_kv_heads=shape.num_kv_heads)


def _one_rank(spec: ModelSpec) -> ShardLayout:
    return ShardLayout.of(ShardShape(1, spec.num_kv_heads), spec.num_layers, spec.block_bytes)
