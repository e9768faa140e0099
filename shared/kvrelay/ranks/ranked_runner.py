"""A model runner whose model is divided among ranks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

from kvrelay.engine.batch import DeviceLost, ModelRunner, ModelSpec, StepResult, WorkerBatch
from kvrelay.protocol.sampling import Sampling
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.ranks.remote_transfers import RankCalls
from kvrelay.ranks.step_encoder import StepEncoder
from kvrelay.ranks.step_input import StepInput
from kvrelay.transfer.pool_memory import PoolLike


class LeadingRunner(ModelRunner, Protocol):
    """Rank 0's part of the model. After any error but DeviceLost it is in step with the other ranks."""

    def resolve(self, batch: WorkerBatch) -> WorkerBatch:
        """The batch as all ranks compute it, with tokens in the place of placeholders. Raises KeyError."""
        ...


class OtherRanks(Protocol):
    """The ranks that follow, as `RankGroup` has them. All methods raise DeviceLost if one is lost."""

    lost: Future[None]

    def publish_step(self, step: StepInput) -> int:
        """Sends a step to all ranks. Returns the number for `await_done`."""
        ...

    def await_done(self, number: int) -> str:
        """Waits until all ranks have ended the step. Returns the error of one that left the ranks in step, or ""."""
        ...

    def fail(self, reason: str) -> str:
        """Ends the ranks. Returns the first reason for that, which may be another one."""
        ...

    def close(self) -> None:
        """Ends the ranks. Idempotent."""
        ...


class RankedRunner:
    """A `ModelRunner` over rank 0's runner, which is in this process, and the group of the others.

    A step has ended when it has on all ranks. An error of another rank is raised as DeviceLost.
    """

    def __init__(self, runner: LeadingRunner, group: OtherRanks, calls: RankCalls | None = None) -> None:
        """`calls` are needed for workers that hand KV over."""
        self.calls = calls
        self._runner = runner
        self._group = group
        self._encoder = StepEncoder()
        self._lock = threading.Lock()  # guards the encoder and the drops
        self._in_step: frozenset[SequenceKey] = frozenset()
        self._drops: list[SequenceKey] = []

    @property
    def spec(self) -> ModelSpec:
        return self._runner.spec

    @property
    def pool_memory(self) -> PoolLike:
        """Rank 0's pool."""
        return self._runner.pool_memory

    def add_sequence(self, key: SequenceKey, sampling: Sampling, token_ids: Sequence[int], num_prompt: int) -> None:
        self._runner.add_sequence(key, sampling, token_ids, num_prompt)
        with self._lock:
            self._encoder.add(key, token_ids)

    def drop_sequence(self, key: SequenceKey) -> None:
        """A sequence with a row in the running step is dropped when that ends: all ranks compute the same rows."""
        with self._lock:
            if key in self._in_step:
                self._drops.append(key)
                return
            self._encoder.drop(key)
        self._runner.drop_sequence(key)

    def execute(self, batch: WorkerBatch) -> StepResult:
        """Publishes the step, and runs rank 0's part. See `ModelRunner.execute`."""
        with self._lock:
            self._in_step = frozenset(row.key for row in batch.rows)
        try:
            return self._execute(batch)
        finally:
            with self._lock:
                self._in_step, drops, self._drops = frozenset(), self._drops, []
            for key in drops:
                self.drop_sequence(key)

    def _execute(self, batch: WorkerBatch) -> StepResult:
        batch = self._runner.resolve(batch)
        with self._lock:
            step = self._encoder.encode(batch)
        number = self._group.publish_step(step)
        try:
            result = self._runner.execute(batch)
        except DeviceLost as error:
            raise DeviceLost(self._group.fail(str(error))) from error
        except Exception:
            self._group.await_done(number)
            raise
        except BaseException as interrupt:  # in the middle of the step: this rank cannot get in step again
            self._group.fail(f"rank 0 was interrupted by {type(interrupt).__name__}")
            raise
        theirs = self._group.await_done(number)
        if theirs:
            raise DeviceLost(self._group.fail(theirs))
        return result

    async def watch(self) -> None:
        """Returns never. Raises DeviceLost when a rank is lost, also between steps."""
        await asyncio.shield(asyncio.wrap_future(self._group.lost))

    def close(self) -> None:
        """Ends the ranks. No step may run. Idempotent."""
        self._group.close()
