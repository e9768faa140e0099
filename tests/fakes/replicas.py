"""Ranks that each compute the whole model, so their pools must be equal after every step."""

from __future__ import annotations

from concurrent.futures import Future

import msgspec
import numpy as np

from kvrelay.handoff.transports.pool_memory import PoolLike
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.ranks.messages import Step, decoder_of_members, encode
from kvrelay.step.batch import ModelSpec, WorkerBatch, WorkerRow
from tests.fakes.hash_runner import HashRunner


class LeadingHashRunner(HashRunner):
    """Rank 0 of a group whose ranks compute the whole model."""

    waited_s = 0.0

    def follow(self, batch: WorkerBatch) -> None:
        self.execute(without_samples(batch))

    def resolve(self, batch: WorkerBatch) -> WorkerBatch:
        return resolved(batch, self._sampled)


def resolved(batch: WorkerBatch, newest: dict[SequenceKey, int]) -> WorkerBatch:
    """Returns the batch with the newest tokens in the place of placeholders."""

    def fill(row: WorkerRow) -> WorkerRow:
        if not row.has_placeholder:
            return row
        token_ids = np.append(row.token_ids[:-1], newest[row.key]).astype(np.int32)
        return msgspec.structs.replace(row, token_ids=token_ids, has_placeholder=False)

    return WorkerBatch(batch.step, list(map(fill, batch.rows)), batch.to_host, batch.from_host, batch.copies)


def without_samples(batch: WorkerBatch) -> WorkerBatch:
    """Returns a batch that `execute` computes as `follow` would compute the given one."""
    rows = [msgspec.structs.replace(row, sample=False, wanted=None) for row in batch.rows]
    return WorkerBatch(batch.step, rows, batch.to_host, batch.from_host, batch.copies)


class HashReplica:
    """A `FollowingRunner` over the hash model, which checks the K/V that each row reads."""

    waited_s = 0.0

    def __init__(self, runner: HashRunner) -> None:
        self.runner = runner

    @property
    def spec(self) -> ModelSpec:
        return self.runner.spec

    @property
    def pool_memory(self) -> PoolLike:
        return self.runner.pool_memory

    def follow(self, batch: WorkerBatch) -> None:
        self.runner.execute(without_samples(batch))


class ReplicasHere:
    """A `RankGroup` whose ranks are in this process. Each gets its steps as they would arrive."""

    def __init__(self, *replicas: HashReplica) -> None:
        self.lost: Future[None] = Future()
        self._ranks = replicas
        self._decoder = decoder_of_members()
        self._num_in_flight = 0

    def publish_step(self, batch: WorkerBatch) -> None:
        raw = encode(Step(batch))
        for replica in self._ranks:
            step = self._decoder.decode(raw)
            assert isinstance(step, Step)
            replica.follow(step.batch)
        self._num_in_flight += 1

    def await_done(self) -> tuple[float, str]:
        self._num_in_flight -= 1
        assert self._num_in_flight >= 0, "a step ended twice"
        return 0.0, ""

    def fail(self, reason: str) -> str:
        return reason
