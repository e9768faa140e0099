"""Real Redis servers of other kinds than `EmbeddedRedis`: with data on disk, a Sentinel, a node of a Cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import redis

from kvrelay.fleet.embedded import RedisServer
from kvrelay.process import HeldPort
from tests.fakes.waiting import wait_until

ONLY_WHEN_TOLD = 'save ""'
"""The data on disk is as of the last `client.save()`, and a start takes it up again."""
BUS_OFFSET = 10_000
NUM_HASH_SLOTS = 16384


class Sentinel(RedisServer):
    """Watches the primary named "main"; it may rewrite its settings, and so has them in a file."""

    def __init__(self, directory: Path, primary: int) -> None:
        self._file = directory / "sentinel.conf"
        super().__init__(
            directory,
            f"sentinel monitor main 127.0.0.1 {primary} 1\n"
            "sentinel down-after-milliseconds main 300\n"
            "sentinel failover-timeout main 2000",
        )

    def _arguments(self) -> list[str]:
        self._file.write_text(self._settings)
        return [str(self._file), "--sentinel"]


class ClusterNode(RedisServer):
    """One node that owns all hash slots: it refuses whatever reaches over them, as any node of a Cluster."""

    def __init__(self, directory: Path) -> None:
        self._bus, held = hold_cluster_ports()
        super().__init__(directory, f"{ONLY_WHEN_TOLD}\ncluster-enabled yes", held=held)
        with redis.Redis(port=self.port) as node:
            for first in range(0, NUM_HASH_SLOTS, NUM_HASH_SLOTS // 4):
                node.execute_command("CLUSTER", "ADDSLOTS", *range(first, first + NUM_HASH_SLOTS // 4))
            wait_until(lambda: cluster_is_ok(node))

    def close(self) -> None:
        super().close()
        self._bus.release()


def cluster_is_ok(node: redis.Redis) -> bool:
    info: Any = node.execute_command("CLUSTER", "INFO")  # type: ignore[no-untyped-call]
    return b"cluster_state:ok" in info


def hold_cluster_ports() -> tuple[HeldPort, HeldPort]:
    """The port of a node's bus, and its own, which Redis wants at this distance."""
    while True:
        bus = HeldPort()
        try:
            return bus, HeldPort(port=bus.port - BUS_OFFSET)
        except (OSError, OverflowError):  # taken, or no port
            bus.release()
