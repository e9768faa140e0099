"""`kvrelay up` brings everything back, however often it dies."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest

from tests.fakes.up import Up

ROUNDS = 3
VICTIMS = {
    "redis": "redis-server",
    "prefill-0": "kvrelay_prefill",
    "decode-0": "kvrelay_decode",
    "router": "kvrelay_router",
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(2))
def test_services_killed_in_any_order_come_back_and_the_end_leaves_nothing(seed: int, tmp_path: Path) -> None:
    up = Up(["--port=0"], tmp_path / "state", {})
    try:
        up.wait_ready()
        num_ready = dict.fromkeys(VICTIMS, 1)
        for name in random.Random(seed).sample(sorted(VICTIMS) * ROUNDS, len(VICTIMS) * ROUNDS):
            up.child(VICTIMS[name]).kill()
            num_ready[name] += 1
            up.wait_for(rf"^{name} +ready", count=num_ready[name])
        up.remember_children()
        up.process.send_signal(signal.SIGTERM)
        assert up.wait_exit() == 0
        assert up.survivors() == []
    finally:
        up.end()


def test_killed_while_its_services_are_dying_it_leaves_nothing(tmp_path: Path) -> None:
    up = Up(["--port=0"], tmp_path / "state", {})
    try:
        up.wait_ready()
        up.child("kvrelay_decode").kill()
        up.wait_for(r"^decode-0 +starting", count=2)
        up.remember_children()
        up.process.kill()
        assert up.survivors() == []
    finally:
        up.end()
