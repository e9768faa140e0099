"""The model runner of a rank with data-parallel attention."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.engine.model_runner import ModelRunner
from kvrelay.protocol.sampling import Sampling
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.step.batch import ModelSpec, StepResult, WorkerBatch
from kvrelay.transfer.pool_memory import PoolLike
from kvrelay.worker.lockstep_loop import LockstepGroup


class LockstepRunner:
    """A `ModelRunner` with its connection to the other ranks, which `execute` each step at the same time."""

    def __init__(self, runner: ModelRunner, group: LockstepGroup) -> None:
        self.group = group
        self._runner = runner

    @property
    def spec(self) -> ModelSpec:
        return self._runner.spec

    @property
    def pool_memory(self) -> PoolLike:
        return self._runner.pool_memory

    def add_sequence(self, key: SequenceKey, sampling: Sampling, token_ids: Sequence[int], num_prompt: int) -> None:
        self._runner.add_sequence(key, sampling, token_ids, num_prompt)

    def drop_sequence(self, key: SequenceKey) -> None:
        self._runner.drop_sequence(key)

    def execute(self, batch: WorkerBatch) -> StepResult:
        return self._runner.execute(batch)
