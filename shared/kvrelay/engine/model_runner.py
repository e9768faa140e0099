"""The runner's interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvrelay.handoff.transports.pool_memory import PoolLike
from kvrelay.protocol.sampling import Sampling
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.step.batch import ModelSpec, StepResult, WorkerBatch


class LaunchedStep(Protocol):
    """A step that was launched on the device. Exactly one of the two methods is called, once, on any thread, and only
    after the step launched before it has ended."""

    def land(self) -> StepResult:
        """Waits until this step has ended on the device, but not for a step launched behind it. Then acts as
        `ModelRunner.execute` does: sampled tokens join the sampler's history, and it raises the same errors."""
        ...

    def discard(self) -> None:
        """Waits until the step has ended and drops its results. The step may be run again. Raises DeviceLost."""
        ...


class ModelRunner(Protocol):
    """Runs the model over a paged pool. Calls come from one thread at a time. `execute` may take long."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def pool_memory(self) -> PoolLike:
        """The pool's memory, shared with transports, which read and write it in place."""
        ...

    def add_sequence(self, key: SequenceKey, sampling: Sampling, token_ids: Sequence[int], num_prompt: int) -> None:
        """Adds a sequence to the sampler. The `token_ids` beyond `num_prompt` are output already (of a resumed
        sequence, or the first token of a handoff) and count for penalties, min_tokens and max_tokens. Idempotent per
        key."""
        ...

    def drop_sequence(self, key: SequenceKey) -> None:
        """Drops a sequence's sampler state. Unknown keys are ignored."""
        ...

    def execute(self, batch: WorkerBatch) -> StepResult:
        """Runs one step. It copies blocks out to the host, then in from the host, then from block to block; then it
        writes K/V of all rows, attends and samples. A batch may have copies and no rows. Thread-safe against
        `add_sequence` and `drop_sequence` from another thread. All tokens of the result join the sampler's history. The
        newest one is what `has_placeholder` of a row of the next batch refers to.

        Raises RowsFailed if single sequences caused the failure; the copies were made then. Raises DeviceLost if only a
        new process can continue. After any exception, nothing of the step writes into its blocks any more.
        """
        ...

    @property
    def launches_ahead(self) -> bool:
        """Returns whether steps are ever launched behind a running one: the device has a queue."""
        return False

    def can_launch_behind(self, batch: WorkerBatch) -> bool:
        """Returns whether `launch` accepts this batch while the previous step has not landed.

        A row with `has_placeholder` then takes its token from device memory. False means that the batch needs something
        that the host learns when the previous step lands, or that its launch would wait for the device.
        """
        return False

    def launch(self, batch: WorkerBatch) -> LaunchedStep:
        """The first half of `execute`, of a runner that `launches_ahead`; `land` is the second. Raises the same errors.
        After an error, nothing of the step writes into its blocks any more, and no LaunchedStep is left to end.

        Called on one thread at a time, while `land` may run on another. At most two steps are launched and not ended,
        with a pipeline one more than its size.
        """
        raise RuntimeError(f"{type(self).__name__} runs one step at a time")
