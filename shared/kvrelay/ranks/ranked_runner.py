"""A model runner whose model is divided among ranks."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Protocol

from kvrelay.engine.model_runner import ModelRunner
from kvrelay.protocol.sampling import Sampling
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.ranks.remote_transfers import RankCalls
from kvrelay.step.batch import DeviceLost, ModelSpec, StepResult, WorkerBatch
from kvrelay.transfer.pool_memory import PoolLike


class LeadingRunner(ModelRunner, Protocol):
    """Rank 0's part of the model. After any error but DeviceLost it is in step with the other ranks."""

    @property
    def waited_s(self) -> float:
        """Seconds that rank 0 has waited for the stage before."""
        ...

    def resolve(self, batch: WorkerBatch) -> WorkerBatch:
        """The batch as all ranks compute it, with tokens in the place of placeholders. Raises KeyError."""
        ...

    def follow(self, batch: WorkerBatch) -> None:
        """Computes rank 0's part of a step whose results are not needed, and samples nothing."""
        ...


class OtherRanks(Protocol):
    """The ranks that follow, as `RankGroup` has them. Raises DeviceLost if one is lost, except where
    only times are asked for."""

    lost: Future[None]

    @property
    def busy_s(self) -> list[float]:
        """Seconds that each rank computed steps, from rank 1 on."""
        ...

    def publish_step(self, batch: WorkerBatch) -> int:
        """Sends a step to all ranks. Returns the number for `await_done`."""
        ...

    def await_done(self, number: int) -> str:
        """Waits until all ranks have ended the step. Returns the error of one that left the ranks in step, or ""."""
        ...

    def take_step_s(self, number: int) -> float:
        """The longest time that a rank computed a step which all have ended."""
        ...

    def fail(self, reason: str) -> str:
        """Ends the ranks. Returns the first reason for that, which may be another one."""
        ...

    def close(self) -> None:
        """Ends the ranks. Idempotent."""
        ...


class RankedRunner:
    """A `LaunchingRunner` over rank 0's runner, which is in this process, and the group of the others.

    A step has ended when it has on all ranks. An error of another rank is raised as DeviceLost. If the ranks are the
    stages of a pipeline, steps are launched behind others: other ranks compute them at once, and rank 0, which is in
    the last stage, when they land.
    """

    def __init__(
        self,
        runner: LeadingRunner,
        group: OtherRanks,
        calls: RankCalls | None = None,
        disconnect: Callable[[], None] = lambda: None,
    ) -> None:
        """`calls` are needed for workers that hand KV over. `disconnect` closes rank 0's connections for tensors."""
        self.calls = calls
        self.launches_ahead = runner.spec.pipeline_parallel_size > 1
        self._disconnect = disconnect
        self._runner = runner
        self._group = group
        self._lock = threading.Lock()  # guards the drops and the rows in flight
        self._in_flight: Counter[SequenceKey] = Counter()  # steps in flight by sequence
        self._drops: set[SequenceKey] = set()
        self._busy_s = 0.0

    @property
    def spec(self) -> ModelSpec:
        return self._runner.spec

    @property
    def pool_memory(self) -> PoolLike:
        """Rank 0's pool."""
        return self._runner.pool_memory

    @property
    def stages_busy_s(self) -> list[float]:
        """Seconds that each stage of a pipeline computed steps, without its waits, from the first stage on."""
        # The first rank of each stage.
        size = self.spec.tensor_parallel_size
        return [*self._group.busy_s[size - 1 :: size], self._busy_s]

    def add_sequence(self, key: SequenceKey, sampling: Sampling, token_ids: Sequence[int], num_prompt: int) -> None:
        self._runner.add_sequence(key, sampling, token_ids, num_prompt)

    def drop_sequence(self, key: SequenceKey) -> None:
        """A sequence with a row in a step in flight is dropped when that ends: all ranks compute the same rows."""
        with self._lock:
            if self._in_flight[key]:
                self._drops.add(key)
                return
        self._runner.drop_sequence(key)

    def execute(self, batch: WorkerBatch) -> StepResult:
        """Publishes the step, and runs rank 0's part. See `ModelRunner.execute`."""
        return self.launch(batch).land()

    def can_launch_behind(self, batch: WorkerBatch) -> bool:
        """Whether a step may be published before the one in flight has landed: with a pipeline, unless it has copies,
        which could not be made again if the step is discarded, or beams."""
        return self.launches_ahead and batch.is_plain

    def launch(self, batch: WorkerBatch) -> RankedStep:
        """Publishes the step. Raises KeyError for placeholders of unknown sequences, and DeviceLost."""
        keys = [row.key for row in batch.rows]
        with self._lock:
            self._in_flight.update(keys)
        try:
            batch = self._runner.resolve(batch)
            return RankedStep(self, batch, self._group.publish_step(batch))
        except BaseException:
            self._ended(keys)
            raise

    def _ended(self, keys: Sequence[SequenceKey]) -> None:
        """A step with rows of these sequences has ended."""
        with self._lock:
            self._in_flight.subtract(keys)
            for key in [key for key in keys if self._in_flight[key] <= 0]:
                self._in_flight.pop(key, None)
            drops = [key for key in self._drops if not self._in_flight[key]]
            self._drops.difference_update(drops)
        for key in drops:
            self.drop_sequence(key)

    def _land(self, batch: WorkerBatch, number: int) -> StepResult:
        waited_s = self._runner.waited_s
        try:
            result = self._runner.execute(batch)
        except DeviceLost as error:
            raise DeviceLost(self._group.fail(str(error))) from error
        except Exception:
            self._await_done(number)
            raise
        except BaseException as interrupt:  # in the middle of the step: this rank cannot get in step again
            self._group.fail(f"rank 0 was interrupted by {type(interrupt).__name__}")
            raise
        others_s = self._await_done(number, may_fail=False)
        if not self.launches_ahead:
            return result
        own_s = result.forward_s - (self._runner.waited_s - waited_s)
        self._busy_s += own_s
        return replace(result, forward_s=max(own_s, others_s))

    def _discard(self, batch: WorkerBatch, number: int) -> None:
        """Computes rank 0's part, which takes the hidden states that the stage before has sent."""
        try:
            self._runner.follow(batch)
        except DeviceLost as error:
            raise DeviceLost(self._group.fail(str(error))) from error
        self._await_done(number)

    def _await_done(self, number: int, *, may_fail: bool = True) -> float:
        """Waits until all ranks have ended a step. Returns the longest time that one computed it."""
        theirs = self._group.await_done(number)
        if theirs and not may_fail:
            raise DeviceLost(self._group.fail(theirs))
        return self._group.take_step_s(number)

    async def watch(self) -> None:
        """Returns never. Raises DeviceLost when a rank is lost, also between steps."""
        await asyncio.shield(asyncio.wrap_future(self._group.lost))

    def close(self) -> None:
        """Ends the ranks. No step may run. Idempotent."""
        self._group.close()
        self._disconnect()


class RankedStep:
    """A `LaunchedStep` of `RankedRunner`. Steps land in the order of their launches."""

    def __init__(self, runner: RankedRunner, batch: WorkerBatch, number: int) -> None:
        self._runner = runner
        self._batch = batch
        self._number = number

    def land(self) -> StepResult:
        """Runs rank 0's part, and waits for the others. Its time is that of the slowest stage of a pipeline."""
        try:
            return self._runner._land(self._batch, self._number)
        finally:
            self._runner._ended([row.key for row in self._batch.rows])

    def discard(self) -> None:
        """See `LaunchedStep.discard`."""
        try:
            self._runner._discard(self._batch, self._number)
        finally:
            self._runner._ended([row.key for row in self._batch.rows])
