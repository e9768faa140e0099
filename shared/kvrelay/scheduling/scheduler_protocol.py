"""The interface of schedulers, and of the gate that may hold prompts back."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq
from typing import Protocol

from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.scheduling.memory.block_manager import BlockManager
from kvrelay.scheduling.memory.swapping import SwapUse
from kvrelay.scheduling.plan import SequenceOutput, StepPlan
from kvrelay.scheduling.scheduler_settings import SchedulerLimits
from kvrelay.scheduling.sequence import Sequence
from kvrelay.scheduling.step_cost import StepCost
from kvrelay.step.batch import BeamCandidates, StepResult


class PrefillGate(Protocol):
    """May hold back all prompts of a pass. A pass is one plan."""

    def ask(self, num_running: int) -> str:
        """Returns why no prompt may be admitted in this pass, or "". Called if a prompt could be admitted."""
        ...

    def passed(self, num_running: int, num_admitted: int) -> None:
        """The pass is planned."""
        ...

    def remaining_delay_s(self) -> float:
        """Returns the longest time in seconds that prompts will still be held back."""
        ...


class Scheduler(Protocol):
    """Plans steps and commits their results. No I/O, no clock, no tensors."""

    prefill_gate: PrefillGate | None
    """Asked in each pass with a prompt to admit. Running prompts continue without asking."""

    @property
    def limits(self) -> SchedulerLimits: ...

    @property
    def blocks(self) -> BlockManager: ...

    @property
    def waiting(self) -> Collection[Sequence]:
        """Sequences in the queue: preempted ones first, then in the order of their arrival."""
        ...

    @property
    def num_pending_handoffs(self) -> int:
        """Number of waiting sequences whose KV comes from another worker."""
        ...

    @property
    def running(self) -> Mapping[SequenceKey, Sequence]:
        """Sequences that hold blocks, in the order of their admission."""
        ...

    @property
    def num_preemptions(self) -> int:
        """Number of preemptions since the start."""
        ...

    @property
    def swap_use(self) -> SwapUse:
        """Copies to and from the host since the start, and the use of the swap space now."""
        ...

    @property
    def num_headroom_blocks(self) -> int:
        """Number of blocks that admission leaves free: reserved ones, and those that running sequences will need."""
        ...

    @property
    def num_slots(self) -> int:
        """Number of running sequences, with those that capacity is reserved for. At most `max_running`."""
        ...

    @property
    def group_samples(self) -> bool:
        """Returns whether the samples of a request run at the same time."""
        ...

    @property
    def num_kept_tokens(self) -> int:
        """Number of tokens of earlier outputs that are kept for drafts."""
        ...

    @property
    def may_admit_prompt(self) -> bool:
        """Returns whether the next sequence of the queue is a prompt, and a slot is free for it."""
        ...

    @property
    def has_work(self) -> bool:
        """Returns whether any sequence waits, is being received or runs."""
        ...

    def calibrate(self, cost: StepCost) -> None:
        """Takes the cost of steps that was measured at the start."""
        ...

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence. Raises ValueError for a known one."""
        ...

    def reserve(self) -> Seq[Sequence]:
        """Admits handoffs between steps, as long as a handoff is next and fits.

        Returns those whose transfer may begin and that no plan or call has returned before.
        """
        ...

    def adopt(self, sequence: Sequence, candidates: BeamCandidates | None = None) -> SequenceOutput | None:
        """A handoff is complete: its prompt's KV is in its blocks, and its first new token in its tokens. It runs.

        A beam search brings the candidates that follow its prompt. Returns its output if they end it. Raises
        ValueError, and changes nothing, for a sequence that is not being received, and for missing or unexpected
        candidates.
        """
        ...

    def withhold(self, blocks: frozenset[int]) -> None:
        """These quarantined blocks, and no others, may never be released."""
        ...

    def never_fitting(self) -> list[Sequence]:
        """Returns the waiting sequences that need more blocks than the pool has without the withheld ones."""
        ...

    def quarantine(self, sequence: Sequence) -> None:
        """A handoff was dropped while its sender may still write: it keeps its blocks until `release`."""
        ...

    def release(self, sequence: Sequence, num_computed: int) -> None:
        """A handoff ends, and its sender no longer writes. The KV of its first `num_computed` tokens is valid."""
        ...

    def abort(self, key: SequenceKey) -> bool:
        """Ends a sequence without output, after the commit of its step if it is in one. Returns whether it is known."""
        ...

    def get(self, key: SequenceKey) -> Sequence | None:
        """Returns the sequence if it waits, is being received, or runs."""
        ...

    def schedule(self) -> StepPlan:
        """Plans the next step. A plan with work is committed or failed before the next call."""
        ...

    def schedule_ahead(self) -> StepPlan | None:
        """Plans the step behind those in flight. Returns None if one of them must be committed first. Never preempts.

        Plans are committed in order. If a step in flight fails, `cancel_plan` comes before `fail_step`, for the steps
        behind it from the last one on.
        """
        ...

    def cancel_plan(self, plan: StepPlan) -> None:
        """A step that was planned ahead does not run. Its sequences are as before the plan; admitted ones stay."""
        ...

    def commit(self, plan: StepPlan, result: StepResult) -> list[SequenceOutput]:
        """Commits a step's result and returns the outputs of its sequences. Finished sequences have left."""
        ...

    def fail_step(self, plan: StepPlan, keys: Collection[SequenceKey] | None = None) -> list[Sequence]:
        """The step failed: ends the sequences with these keys (None: all of the step) and returns them."""
        ...
