"""Which prefill workers a decode worker with stages takes KV from."""

from __future__ import annotations

import pytest

from kvrelay.handoff.transports.sharded import ShardedReceiver, ShardLayout
from kvrelay.kv.shard_map import ShardShape
from kvrelay.protocol.messages import Shards
from kvrelay.step.batch import ModelSpec
from kvrelay_decode.reservations import Reservations
from tests.unit.handoff.test_decode_role import SilentReceiver

pytestmark = pytest.mark.unit
NUM_HEADS, NUM_LAYERS = 4, 3
SPEC = ModelSpec("m", 100, 64, (), NUM_LAYERS, NUM_HEADS, 1, 4, 16, 96, "float32", "f")


@pytest.mark.parametrize(
    ("num_stages", "shards", "reason"),
    [
        (2, Shards(), "0 KV heads there, 4 here"),
        (2, Shards(size=2, num_kv_heads=NUM_HEADS), ""),
        (2, Shards(size=1, num_kv_heads=NUM_HEADS, num_stages=1), ""),
        (2, Shards(size=2, num_kv_heads=NUM_HEADS, num_stages=3), ""),
        (2, Shards(size=1, num_kv_heads=NUM_HEADS, num_stages=4), "3 layers do not divide among 4 stages"),
        (2, Shards(size=1, num_kv_heads=8, num_stages=2), "8 KV heads there, 4 here"),
        (1, Shards(), ""),
        (1, Shards(size=2, num_kv_heads=NUM_HEADS), ""),
        (1, Shards(size=1, num_kv_heads=NUM_HEADS, num_stages=2), ""),
    ],
)
def test_which_workers_are_refused(num_stages: int, shards: Shards, reason: str) -> None:
    layout = ShardLayout.of(ShardShape(1, NUM_HEADS, num_stages), NUM_LAYERS, 32)
    receiver = ShardedReceiver([SilentReceiver(False) for _ in range(num_stages)], layout)
    reservations = Reservations({"silent": receiver}, "1", SPEC)
    assert reservations.why_none_in_common(["silent"], shards) == reason
