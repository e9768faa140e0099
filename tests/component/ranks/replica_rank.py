"""A rank whose part of the model is the whole hash model. Its only argument is JSON with `engine`, `rank` and these:

`pool_file`: gets a digest of the pool with each step. `fail_at`: so many steps run before one fails. `hold_load`: the
load waits for this file.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvrelay.engine.batch import ModelSpec, WorkerBatch
from kvrelay.process import end_with_parent
from kvrelay.ranks.messages import RANK_PROTOCOL, RankSettings, Software
from kvrelay.ranks.rank_member import MemberOptions, RankEnds, RankMember, Report
from kvrelay.transfer.pool_memory import PoolLike
from tests.fakes.hash_runner import HashRunner
from tests.fakes.replicas import HashReplica

SOFTWARE = Software(RANK_PROTOCOL, "1.0", "2.0")


def digest(pool: NDArray[np.uint8]) -> str:
    return hashlib.blake2b(pool.tobytes(), digest_size=8).hexdigest()


class DisturbedReplica:
    def __init__(self, runner: HashRunner, given: dict[str, Any]) -> None:
        self._replica = HashReplica(runner)
        self._given = given
        self._num_steps = 0

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
        self._replica.follow(batch)
        if "pool_file" in self._given:
            Path(self._given["pool_file"]).write_text(digest(self._replica.runner.pool_bytes))


def main() -> int:
    given: dict[str, Any] = json.loads(sys.argv[1])
    if "parent" in given:
        end_with_parent(given["parent"])
    logging.basicConfig(level="INFO")
    if given.get("exit"):
        return int(given["exit"])

    def load(settings: RankSettings, rank: int, report: Report) -> DisturbedReplica:
        report("computes hashes")
        while "hold_load" in given and not Path(given["hold_load"]).exists():
            time.sleep(0.01)
        if "load_error" in given:
            raise ValueError(given["load_error"])
        slots = (settings.swap_bytes or 0) // 1024
        runner = HashRunner(
            settings.num_blocks or 64,
            settings.block_size,
            settings.max_model_len or 512,
            fingerprint=given.get("fingerprint", "hash-model"),
            num_swap_slots=slots,
        )
        return DisturbedReplica(runner, given)

    software = Software(RANK_PROTOCOL, given.get("version", "1.0"), "2.0")
    options = MemberOptions(
        engine=given["engine"], rank=given["rank"], software=software, timeout_s=given.get("timeout_s", 60.0)
    )
    try:
        RankMember(options, load).run()
    except RankEnds as error:
        logging.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
