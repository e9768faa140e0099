"""A rank whose part of the model is the whole hash model. Its only argument is JSON with `meeting` (a file), `rank` and
these:

`pool_file`: gets a digest of the pool with each step. `fail_at`: so many steps run before one fails. `order_file`: gets
a line for each step and each released reservation.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvrelay.handoff.transports.pool_memory import PoolLike
from kvrelay.handoff.transports.zmq_receiver import ZmqReceiver
from kvrelay.ranks.local_ranks import end_with_starter
from kvrelay.ranks.messages import Meeting
from kvrelay.ranks.rank_member import RankEnds, RankMember
from kvrelay.step.batch import ModelSpec, WorkerBatch
from tests.component.ranks.rig import BLOCK_SIZE, LONGEST, NUM_BLOCKS
from tests.fakes.hash_runner import HashRunner
from tests.fakes.replicas import HashReplica

TOO_SOON_S = 0.5


def digest(pool: NDArray[np.uint8]) -> str:
    return hashlib.blake2b(pool.tobytes(), digest_size=8).hexdigest()


class DisturbedReplica:
    waited_s = 0.0

    def __init__(self, runner: HashRunner, given: dict[str, Any]) -> None:
        self._replica = HashReplica(runner)
        self._given = given
        self._num_steps = 0
        self.began = threading.Event()

    @property
    def spec(self) -> ModelSpec:
        return self._replica.spec

    @property
    def pool_memory(self) -> PoolLike:
        return self._replica.pool_memory

    def follow(self, batch: WorkerBatch) -> None:
        if self._num_steps == self._given.get("fail_at"):
            raise MemoryError("no memory is left, as told")
        self._num_steps += 1
        self.began.set()
        note(self._given, "step")
        self._replica.follow(batch)
        if "pool_file" in self._given:
            Path(self._given["pool_file"]).write_text(digest(self._replica.runner.pool_bytes))


class HesitantReceiver(ZmqReceiver):
    """Before a release it waits in vain for a step that runs too soon."""

    def __init__(self, pool: PoolLike, replica: DisturbedReplica, given: dict[str, Any]) -> None:
        super().__init__(pool)
        self._replica = replica
        self._given = given

    def release(self, reservation: str) -> None:
        self._replica.began.wait(TOO_SOON_S)
        note(self._given, f"released {reservation}")
        super().release(reservation)


def note(given: dict[str, Any], line: str) -> None:
    if "order_file" in given:
        with Path(given["order_file"]).open("a") as file:
            file.write(f"{line}\n")


def main() -> int:
    given: dict[str, Any] = json.loads(sys.argv[1])
    if not given.get("is_remote"):
        end_with_starter()
    logging.basicConfig(level="INFO")
    if given.get("exit"):
        return int(given["exit"])
    meeting = Path(given["meeting"])
    while not meeting.exists():
        time.sleep(0.01)
    member = RankMember(given["rank"], "127.0.0.1", msgspec.json.decode(meeting.read_bytes(), type=Meeting))
    runner = HashRunner(
        NUM_BLOCKS,
        BLOCK_SIZE,
        LONGEST,
        fingerprint=given.get("fingerprint", "hash-model"),
        num_host_slots=given.get("num_slots", 0),
    )
    replica = DisturbedReplica(runner, given)
    try:
        member.run(replica, {"zmq": HesitantReceiver(replica.pool_memory, replica, given)})
    except RankEnds as error:
        logging.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
