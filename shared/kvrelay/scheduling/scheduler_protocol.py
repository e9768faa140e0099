"""The interface of every scheduler, and of the two gates that may hold back an admission."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq
from typing import Protocol

from kvrelay.engine.batch import BeamCandidates, StepResult
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.scheduling.memory.block_manager import BlockManager
from kvrelay.scheduling.memory.swapping import SwapUse
from kvrelay.scheduling.plan import SequenceOutput, StepPlan
from kvrelay.scheduling.scheduler_settings import SchedulerLimits
from kvrelay.scheduling.sequence import Sequence
from kvrelay.scheduling.step_cost import StepCost


class PrefillGate(Protocol):
    """Has a say in whether prompts are admitted in a pass at all (a pass is one plan)."""

    def ask(self, num_running: int, kv_usage: float) -> str:
        """Why no prompt may be admitted in this pass; empty: they may. Asked when there is one that could be."""
        ...

    def passed(self, num_running: int, num_admitted: int) -> None:
        """The pass is planned."""
        ...

    def remaining_delay_s(self) -> float:
        """How long prompts that are held back will be, at the most."""
        ...


class Scheduler(Protocol):
    """Decides what each step computes, and books what it gave. Pure: no I/O, no clock, no tensor."""

    prefill_gate: PrefillGate | None
    """Asked in each pass with a prompt to admit. A prompt that was begun goes on without."""

    @property
    def limits(self) -> SchedulerLimits:
        """What a step may hold."""
        ...

    @property
    def blocks(self) -> BlockManager:
        """Who gives the sequences their blocks."""
        ...

    @property
    def waiting(self) -> Collection[Sequence]:
        """Sequences that hold nothing: preempted ones first, then by arrival."""
        ...

    @property
    def num_pending_handoffs(self) -> int:
        """Sequences among `waiting` whose KV comes from another worker."""
        ...

    @property
    def running(self) -> Mapping[SequenceKey, Sequence]:
        """Sequences that hold blocks, by the time they got them."""
        ...

    @property
    def num_preemptions(self) -> int:
        """How often a sequence lost its blocks to others, since the start."""
        ...

    @property
    def swap_use(self) -> SwapUse:
        """What was copied to the host and back, since the start, and what lies there now."""
        ...

    @property
    def num_headroom_blocks(self) -> int:
        """Blocks that admission leaves to the running sequences, beyond those they have, and to the rest of groups."""
        ...

    @property
    def num_slots(self) -> int:
        """Running sequences, those that beam searches among them will become, and the rest of their groups: at most
        `max_running`."""
        ...

    @property
    def group_samples(self) -> bool:
        """Whether the samples of a request run at once."""
        ...

    @property
    def num_reserved_samples(self) -> int:
        """Waiting sequences for which room is set aside: the rest of groups that were admitted."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether any sequence waits or runs."""
        ...

    def calibrate(self, cost: StepCost) -> None:
        """What steps cost here was measured; for policies that cut prompts by time."""
        ...

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence. Raises ValueError for one that is known already."""
        ...

    def reserve(self) -> Seq[Sequence]:
        """Admits handoffs between steps, as `schedule` does in one: as long as a handoff is next and there is room.

        Returns those whose transfer may begin and that no plan or call has returned before.
        """
        ...

    def adopt(self, sequence: Sequence, candidates: BeamCandidates | None = None) -> SequenceOutput | None:
        """A handoff is complete: its prompt's KV is in its blocks, and its tokens end with the first new one. It runs.

        A beam search comes with the candidates that follow its prompt; its output is returned if they end it. Raises
        ValueError, and changes nothing, for a sequence that is not being received, and for candidates that are missing
        or out of place.
        """
        ...

    def quarantine(self, sequence: Sequence) -> None:
        """A handoff was given up while its sender may still write: it keeps its blocks until `release`."""
        ...

    def release(self, sequence: Sequence, num_computed: int) -> None:
        """A handoff ends and its sender writes nothing any more. The KV of its first `num_computed` tokens is true."""
        ...

    def abort(self, key: SequenceKey) -> bool:
        """Ends a sequence without output. One in a step in flight ends when that step is committed. Whether known."""
        ...

    def get(self, key: SequenceKey) -> Sequence | None:
        """A sequence that is waiting or running."""
        ...

    def schedule(self) -> StepPlan:
        """Plans the next step; a plan with rows is to be committed or failed before the next call."""
        ...

    def schedule_ahead(self) -> StepPlan | None:
        """Plans the step behind the one in flight; None where that one must be committed first. Preempts nobody.

        Plans are committed in order. If the step in flight fails, `cancel_plan` comes before `fail_step`.
        """
        ...

    def cancel_plan(self, plan: StepPlan) -> None:
        """A step that was planned ahead does not run: its sequences are where they were. Who was admitted stays."""
        ...

    def commit(self, plan: StepPlan, result: StepResult) -> list[SequenceOutput]:
        """Books a step's result; returns what is to be told about it. Finished sequences have left."""
        ...

    def fail_step(self, plan: StepPlan, keys: Collection[SequenceKey] | None = None) -> list[Sequence]:
        """The step could not be computed: the sequences with these keys leave (None: all of them). Returns them."""
        ...
