"""Model runners whose steps several ranks compute."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from kvrelay.engine.model_runner import ModelRunner
from kvrelay.handoff.transports.pool_memory import PoolLike
from kvrelay.protocol.sampling import Sampling
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.ranks.lockstep_group import LockstepGroup
from kvrelay.ranks.rank_group import RankGroup
from kvrelay.step.batch import DeviceLost, ModelSpec, StepResult, WorkerBatch


class PartRunner(Protocol):
    """A rank's part of the model and of the KV pool."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def pool_memory(self) -> PoolLike: ...

    @property
    def waited_s(self) -> float:
        """Seconds that this stage has waited for the one before."""
        ...

    def follow(self, batch: WorkerBatch) -> None:
        """Computes this rank's part of a step that another one samples for, or that is discarded.

        Raises IndexError for copies of blocks that do not exist, which leaves the ranks in step.
        """
        ...


class LeadingRunner(PartRunner, ModelRunner, Protocol):
    """Rank 0's part of the model. After any error but DeviceLost it is in step with the other ranks."""

    def resolve(self, batch: WorkerBatch) -> WorkerBatch:
        """The batch as all ranks compute it, with tokens in the place of placeholders. Raises KeyError."""
        ...


class _RunnerOverRanks(ModelRunner):
    """A `ModelRunner` over this rank's runner."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    @property
    def spec(self) -> ModelSpec:
        return self._runner.spec

    @property
    def pool_memory(self) -> PoolLike:
        """This rank's pool."""
        return self._runner.pool_memory

    def add_sequence(self, key: SequenceKey, sampling: Sampling, token_ids: Sequence[int], num_prompt: int) -> None:
        self._runner.add_sequence(key, sampling, token_ids, num_prompt)

    def drop_sequence(self, key: SequenceKey) -> None:
        self._runner.drop_sequence(key)

    def execute(self, batch: WorkerBatch) -> StepResult:
        return self._runner.execute(batch)


class LockstepRunner(_RunnerOverRanks):
    """A runner with its connection to the other ranks, which `execute` each step at the same time, of requests of their
    own."""

    def __init__(self, runner: ModelRunner, group: LockstepGroup) -> None:
        super().__init__(runner)
        self.group = group


class RankedRunner(_RunnerOverRanks):
    """A `ModelRunner` over rank 0's runner, which is in this process, and the group of the others.

    A step has ended when it has on all ranks. An error of another rank is raised as DeviceLost. If the ranks are the
    stages of a pipeline, steps are launched behind others: other ranks compute them at once, and rank 0, which is in
    the last stage, when they land.
    """

    _runner: LeadingRunner

    def __init__(self, runner: LeadingRunner, group: RankGroup) -> None:
        super().__init__(runner)
        self.group = group
        self._lock = threading.Lock()  # guards the drops and the rows in flight
        self._in_flight: Counter[SequenceKey] = Counter()  # steps in flight by sequence
        self._drops: set[SequenceKey] = set()

    @property
    def launches_ahead(self) -> bool:
        return self.spec.pipeline_parallel_size > 1

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
        which could not be made again if the step is discarded, or wants candidates."""
        return self.launches_ahead and batch.is_plain

    def launch(self, batch: WorkerBatch) -> RankedStep:
        """Publishes the step. Raises KeyError for placeholders of unknown sequences, and DeviceLost."""
        keys = [row.key for row in batch.rows]
        with self._lock:
            self._in_flight.update(keys)
        try:
            batch = self._runner.resolve(batch)
            self.group.publish_step(batch)
            return RankedStep(self, batch)
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

    def _land(self, batch: WorkerBatch) -> StepResult:
        waited_s = self._runner.waited_s
        try:
            result = self._runner.execute(batch)
        except DeviceLost as error:
            raise DeviceLost(self.group.fail(str(error))) from error
        except Exception:
            self.group.await_done()
            raise
        except BaseException as interrupt:  # within the step: this rank cannot finish it any more
            self.group.fail(f"rank 0 was interrupted by {type(interrupt).__name__}")
            raise
        others_s, theirs = self.group.await_done()
        if theirs:
            raise DeviceLost(self.group.fail(theirs))
        if not self.launches_ahead:
            return result
        own_s = result.forward_s - (self._runner.waited_s - waited_s)
        return replace(result, forward_s=max(own_s, others_s))

    def _discard(self, batch: WorkerBatch) -> None:
        """Computes rank 0's part, which takes the hidden states that the stage before has sent."""
        try:
            self._runner.follow(batch)
        except DeviceLost as error:
            raise DeviceLost(self.group.fail(str(error))) from error
        self.group.await_done()

    async def watch(self) -> None:
        """Returns never. Raises DeviceLost when a rank is lost, also between steps."""
        await asyncio.shield(asyncio.wrap_future(self.group.lost))

    def close(self) -> None:
        """Ends the ranks. No step may run. Idempotent."""
        self.group.close()


class RankedStep:
    """A `LaunchedStep` of `RankedRunner`. Steps land in the order of their launches."""

    def __init__(self, runner: RankedRunner, batch: WorkerBatch) -> None:
        self._runner = runner
        self._batch = batch

    def land(self) -> StepResult:
        """Runs rank 0's part, and waits for the others. Its time is that of the slowest stage of a pipeline."""
        try:
            return self._runner._land(self._batch)
        finally:
            self._runner._ended([row.key for row in self._batch.rows])

    def discard(self) -> None:
        """See `LaunchedStep.discard`."""
        try:
            self._runner._discard(self._batch)
        finally:
            self._runner._ended([row.key for row in self._batch.rows])
