"""The scheduler: plans steps and commits their results. Composed of a policy and the collaborators it works with.

- `SchedulingPolicy` (`policies.py`) decides what a step contains, out of the parts that `StepPlanner` plans.
- `StepPlanner` plans rows, `SequenceAdmission` admits waiting sequences.
- `StepCommit` appends new tokens and ends sequences.
- `SequenceLifecycle` has the sequences, the queue, and every transition between their states, preemption among them.

At most two steps are uncommitted: one in flight, and one planned behind it. With a pipeline of depth N there may be N
in flight and one behind them; no decode is in two of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from collections.abc import Sequence as Seq

from kvrelay.kv.pool import BlockPool
from kvrelay.kv.prefix_cache import PrefixCache
from kvrelay.kv.table import blocks_for
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.scheduling.chunk_sizes import Chunks, DynamicChunks, WholePrompts
from kvrelay.scheduling.lifecycle import SequenceLifecycle
from kvrelay.scheduling.memory.block_manager import BlockManager
from kvrelay.scheduling.plan import NeedsCommit, PlanBuilder, SequenceOutput, StepPlan
from kvrelay.scheduling.policies import SchedulingPolicy, find_policy
from kvrelay.scheduling.scheduler_settings import SchedulerLimits, SchedulerSettings
from kvrelay.scheduling.sequence import Sequence, SequenceState
from kvrelay.scheduling.sequence_admission import SequenceAdmission
from kvrelay.scheduling.step_commit import StepCommit
from kvrelay.scheduling.step_cost import StepCost
from kvrelay.scheduling.step_planner import StepPlanner
from kvrelay.step.batch import Candidates, StepResult


class Scheduler:
    """Plans steps and commits their results, by one policy. No I/O, no clock, no tensors."""

    def __init__(
        self, policy: SchedulingPolicy, limits: SchedulerLimits, blocks: BlockManager, settings: SchedulerSettings
    ) -> None:
        self.policy = policy
        self.limits = limits
        self.blocks = blocks
        self.settings = settings
        self.lifecycle = SequenceLifecycle(limits, blocks, settings)
        self.running = self.lifecycle.running
        self.waiting = self.lifecycle.waiting
        self.chunks = _make_chunks(policy, limits, settings)
        self.admission = SequenceAdmission(
            self.lifecycle,
            self.chunks,
            decodes_beside_prompts=policy.mixes_prompts_and_decodes,
        )
        self._planner = StepPlanner(self.lifecycle, self.admission, self.chunks, pipeline_depth=settings.pipeline_depth)
        self._commit = StepCommit(self.lifecycle)
        self._step = 0
        self._uncommitted: list[StepPlan] = []  # steps in flight, and one planned behind them
        self._admitted_ahead: list[Sequence] = []  # admitted for a plan without rows: the next plan reports them

    # -- sequences ----------------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence. Raises ValueError for a known one."""
        self.lifecycle.add(sequence)

    def adopt(self, sequence: Sequence, candidates: Candidates | None = None) -> SequenceOutput | None:
        """A handoff is complete: its prompt's KV is in its blocks, and its first new token in its tokens. It runs.

        One that is forked brings the `candidates` that follow its prompt. Returns its output if they end it.
        """
        self.lifecycle.forks.check(sequence, candidates)
        if sequence.state is not SequenceState.WAITING_FOR_REMOTE_KV:
            raise ValueError(f"sequence {sequence.key} is {sequence.state}: it receives no KV")
        self.lifecycle.received(sequence)
        if candidates is not None:
            self.lifecycle.forks.offer(sequence, candidates)
            output = self._commit.advance_forks(sequence)
            return output if output is not None and output.finish is not None else None
        self.lifecycle.publish(sequence)
        self.blocks.adopt(sequence, self.lifecycle.num_reserved_blocks)
        return None

    def withhold(self, blocks: frozenset[int]) -> None:
        """These blocks of dropped handoffs, and no others, may never be released."""
        self.blocks.withheld = blocks

    def never_fitting(self) -> list[Sequence]:
        """Returns the waiting sequences that need more blocks than the pool has without the withheld ones. They would
        hold up those behind them for ever. O(waiting) while any block is withheld."""
        if not self.blocks.withheld:
            return []
        return [sequence for sequence in self.waiting if not self.blocks.may_ever_fit(sequence)]

    def drop_handoff(self, sequence: Sequence) -> None:
        """A handoff was dropped while its sender may still write: it keeps its blocks until `release`."""
        self.lifecycle.remote.drop(sequence)

    def release(self, sequence: Sequence, num_computed: int) -> None:
        """A handoff ends, and its sender no longer writes. The KV of its first `num_computed` tokens is valid."""
        sequence.num_computed = num_computed
        self.lifecycle.publish(sequence)
        self.lifecycle.leave(sequence)

    def abort(self, key: SequenceKey) -> bool:
        """Ends a sequence without output, after the commit of its step if it is in one. Returns whether it is known."""
        return self.lifecycle.abort(key)

    def get(self, key: SequenceKey) -> Sequence | None:
        """Returns the sequence if it waits, is being received, or runs."""
        return self.lifecycle.get(key)

    # -- planning -----------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Plans the next step. A plan with work is committed or failed before the next call."""
        if self._uncommitted:
            raise RuntimeError(f"step {self._uncommitted[0].step} is in flight: only schedule_ahead may plan behind it")
        self._refresh()
        builder = PlanBuilder(self.limits.token_budget)
        self.policy.fill(self._planner, builder)
        return self._planned(builder)

    def schedule_ahead(self) -> StepPlan | None:
        """Plans the step behind those in flight. Returns None if one must be committed first. Never preempts."""
        num_uncommitted = len(self._uncommitted)
        if not 0 < num_uncommitted < self.settings.max_uncommitted:
            raise RuntimeError(
                f"{num_uncommitted} steps are in flight or planned, 1 to {self.settings.max_uncommitted - 1} can be "
                f"planned behind"
            )
        if self._must_commit_first():
            return None
        self._refresh()
        # Decodes are the last rows.
        num_decode_steps = sum(bool(plan.rows) and not plan.rows[-1].is_prefill for plan in self._uncommitted)
        builder = PlanBuilder(self.limits.token_budget, ahead=True, num_decode_steps=num_decode_steps)
        try:
            self.policy.fill(self._planner, builder)
        except NeedsCommit:
            # If sequences were admitted, the builder is used as it is: the policy may not plan them again.
            if not builder.admitted:
                return None
        if not builder.rows:
            self._admitted_ahead += builder.admitted
            return None
        return self._planned(builder)

    def reserve(self) -> Seq[Sequence]:
        """Admits handoffs between steps, as long as a handoff is next and fits.

        Returns those whose transfer may begin and that no plan or call has returned before.
        """
        if self.waiting.num_remote:
            self.waiting.renew_probes()
            self.lifecycle.remote.refresh(self.running.values())
            self._planner.admit_handoffs(PlanBuilder(self.limits.token_budget, ahead=True))
        return self.lifecycle.remote.take_reservations()

    def cancel_plan(self, plan: StepPlan) -> None:
        """A step that was planned ahead does not run. Its sequences are as before the plan; admitted ones stay."""
        if self._uncommitted[-1] is not plan:
            raise RuntimeError(f"step {plan.step} is not the last one planned")
        self._uncommitted.pop()
        if not self._uncommitted:
            self.blocks.step_landed(0)
        self.blocks.copies.cancelled(plan.copies)
        # All rows end before any sequence leaves, because forks leave together.
        rows = [row for row in plan.rows if self.lifecycle.row_ended(row)]
        for sequence in dict.fromkeys((row.sequence.fork_of or row.sequence) for row in rows):
            if sequence.abort_requested and not sequence.num_planned:
                self.lifecycle.leave(sequence)

    def _must_commit_first(self) -> bool:
        """Returns whether the results of a step in flight are needed to plan the next one."""
        if self.settings.pipeline_depth > 1:  # sequences that sample in a step in flight have no row in the next one
            return any(row.sequence.forks is not None for plan in self._uncommitted for row in plan.rows)
        rows = self._uncommitted[0].rows
        if any(row.guesses is not None or row.sequence.forks is not None for row in rows):
            return True
        return self.lifecycle.forced.are_awaited(rows) or self.lifecycle.speculator.expects_any(self._uncommitted[0])

    def _refresh(self) -> None:
        self.lifecycle.shares.refresh()
        self.waiting.refresh()
        self.lifecycle.remote.refresh(self.running.values())

    def _planned(self, builder: PlanBuilder) -> StepPlan:
        self._step += 1
        if self._admitted_ahead:
            still_here = [sequence for sequence in self._admitted_ahead if sequence.state is SequenceState.RUNNING]
            builder.admitted = [*still_here, *builder.admitted]
            self._admitted_ahead = []
        copies = self.blocks.copies.plan(self._blocks_with_copies(builder))
        host_copies = self.lifecycle.offload.seal(builder)
        plan = StepPlan(
            self._step,
            builder.rows,
            admitted=builder.admitted,
            preempted=builder.preempted,
            held_back=builder.held_back,
            recomputed=builder.recomputed,
            host_copies=host_copies,
            delayed=builder.delayed,
            copies=copies,
            reservations=self.lifecycle.remote.take_reservations(),
            has_guesses=builder.has_guesses,
            jumping=self.lifecycle.forced.jumping,
        )
        if self.admission.prefill_gate is not None:
            self.admission.prefill_gate.passed(len(self.running), len(plan.admitted) - len(builder.returning))
        for row in plan.rows:
            sequence = row.sequence
            sequence.num_planned += row.num_tokens
            sequence.num_expected += row.sample
        if plan.has_work:
            self._uncommitted.append(plan)
        return plan

    def _blocks_with_copies(self, builder: PlanBuilder) -> Iterator[int]:
        """Yields the blocks that are written and may have to be copied before: those of forks and of prompts with
        tails."""
        tails = self.blocks.tails
        for row in builder.rows:
            if row.sequence.forks is not None or row.sequence in tails:
                table, end = row.sequence.table, row.position + row.num_tokens
                first, stop = row.position // table.block_size, blocks_for(end, table.block_size)
                # All blocks, not only the first: a prefix whose step failed is computed again, up to a block whose copy
                # was planned for a later step.
                yield from table.ids[first:stop].tolist()

    # -- results ------------------------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult) -> list[SequenceOutput]:
        """Commits a step's result and returns the outputs of its sequences. Finished sequences have left."""
        self._landed(plan)
        self.blocks.copies.done(plan.copies)
        self.chunks.measured(plan, result.forward_s)
        self.lifecycle.speculator.step_ended(plan, result.forward_s)
        self.lifecycle.offload.landed(plan, result.forward_s, result.copy_s)
        self.lifecycle.new_token_ratio.relax()
        return self._commit.commit_rows(plan.rows, result.rows)

    def fail_step(self, plan: StepPlan, keys: Collection[SequenceKey] | None = None) -> list[Sequence]:
        """The step failed: ends the sequences with these keys (None: all of the step) and returns them.

        The others are as before the step. Its copies to and from the host were made if `keys` are given.
        """
        self._landed(plan)
        if self._uncommitted:
            raise RuntimeError(f"step {self._uncommitted[0].step} is planned upon the one that failed")
        self.blocks.copies.done(plan.copies)
        failed = []
        rows = [row for row in plan.rows if self.lifecycle.row_ended(row)]
        for sequence in dict.fromkeys((row.sequence.fork_of or row.sequence) for row in rows):
            if keys is None or sequence.key in keys or sequence.abort_requested:
                self.lifecycle.leave(sequence)
                failed.append(sequence)
        if keys is not None:
            self.lifecycle.offload.landed(plan, 0.0, 0.0)
        else:
            for sequence in self.lifecycle.offload.failed(plan):
                self.lifecycle.requeue_on_host(sequence)
        return failed

    def _landed(self, plan: StepPlan) -> None:
        if plan.has_work:
            if not self._uncommitted or self._uncommitted[0] is not plan:
                raise RuntimeError(f"step {plan.step} is not the one in flight")
            del self._uncommitted[0]
            self.blocks.step_landed(len(self._uncommitted))

    # -- settings and numbers -----------------------------------------------------------------------------------------

    def calibrate(self, cost: StepCost) -> None:
        """Takes the cost of steps that was measured at the start, for guesses and for chunks of equal time."""
        self.chunks.calibrate(cost)
        self.lifecycle.speculator.calibrate(cost)

    @property
    def num_preemptions(self) -> int:
        """Number of preemptions since the start."""
        return self.lifecycle.num_preemptions

    @property
    def num_kept_tokens(self) -> int:
        """Number of tokens of earlier outputs that are kept for guesses."""
        return self.lifecycle.speculator.earlier.num_tokens

    @property
    def has_work(self) -> bool:
        """Returns whether a sequence is known, or one that was ended is still in a step in flight."""
        return self.lifecycle.has_work


def _make_chunks(policy: SchedulingPolicy, limits: SchedulerLimits, settings: SchedulerSettings) -> Chunks:
    if not policy.cuts_prompts:
        return WholePrompts()
    return DynamicChunks(limits.token_budget) if settings.chunking == "dynamic" else Chunks()


def make_scheduler(
    name: str, limits: SchedulerLimits, pool: BlockPool, cache: PrefixCache, settings: SchedulerSettings
) -> Scheduler:
    """Returns a scheduler with a policy and a block manager of its own. Raises UnknownScheduler."""
    policy = find_policy(name)()
    return Scheduler(policy, limits, policy.block_manager(pool, cache, limits.max_model_len), settings)
