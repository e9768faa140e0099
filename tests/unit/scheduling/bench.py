"""A scheduler with a pool, and a forward that draws the next integer; every step is held against the invariants."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection

from kvrelay.kv.ablations import NullCache
from kvrelay.kv.pool import BlockPool, BlockState
from kvrelay.kv.prefix_cache import PrefixCache
from kvrelay.kv.table import blocks_for
from kvrelay.protocol.messages import PeerRef
from kvrelay.protocol.sampling import Sampling
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.scheduling.memory.block_manager import BlockManager, WholeSequenceBlocks
from kvrelay.scheduling.plan import SequenceOutput, StepPlan
from kvrelay.scheduling.policies import BUILT_IN, SarathiPolicy
from kvrelay.scheduling.scheduler import Scheduler, make_scheduler
from kvrelay.scheduling.scheduler_settings import SchedulerLimits, SchedulerSettings
from kvrelay.scheduling.sequence import RemoteKV, Sequence
from kvrelay.step.batch import RowResult, StepResult
from tests.fakes.sequences import new_sequence

BLOCK_SIZE = 4
EOS = 0
SCHEDULERS = list(BUILT_IN)
ADOPTED_FIRST_TOKEN = 7
SENDER = PeerRef("prefill-0", "1", "tcp://prefill-0")


Sample = tuple[str, int, int]
"""A request, which of its samples, and of how many."""


def join(sequence: Sequence, sample: Sample) -> None:
    """Makes a sequence a sample of a request."""
    request, index, count = sample
    sequence.key = (request, 1, index)
    sequence.origin.sample_group = request if count > 1 else ""


def make_sequence(
    prompt: list[int], max_tokens: int, name: str, *, priority: int = 0, block_size: int = BLOCK_SIZE
) -> Sequence:
    return new_sequence((name, 1, 0), prompt, Sampling(max_tokens=max_tokens), block_size, priority=priority)


def blocks_besides(scheduler: Scheduler) -> set[int]:
    """Blocks held as a running sequence's that are in no table: sources of copies that are not done."""
    copies = scheduler.blocks.copies
    return {c.source for c in [*copies._needed.values(), *copies._planned.values()]}


def check_writes(scheduler: Scheduler, plan: StepPlan) -> None:
    """No row writes into a block that is in another table."""
    size = scheduler.blocks.pool.block_size
    num_tables = Counter(block for s in scheduler.running.values() for block in s.table.ids.tolist())
    for row in plan.rows:
        if row.sequence.key in scheduler.running:
            last = row.position + row.num_tokens - 1
            for block in row.sequence.table.ids[row.position // size : last // size + 1].tolist():
                assert num_tables[block] == 1, f"{row.sequence.key} writes into block {block}, which others read"


class Bench:
    def __init__(
        self,
        num_blocks: int = 16,
        token_budget: int = 16,
        max_running: int = 8,
        cache: bool = True,
        scheduler: str = "sarathi",
        settings: SchedulerSettings | None = None,
        blocks: type[BlockManager] | None = None,
        eos: int = EOS,
    ) -> None:
        self.pool = BlockPool(num_blocks, BLOCK_SIZE)
        kept: PrefixCache = PrefixCache(self.pool) if cache else NullCache(self.pool)
        limits = SchedulerLimits(token_budget, max_running, num_blocks * BLOCK_SIZE, frozenset({eos}))
        settings = settings or SchedulerSettings()
        built = make_scheduler(scheduler, limits, self.pool, kept, settings)
        self.scheduler = built
        if blocks is not None:
            manager = blocks(self.pool, kept, limits.max_model_len)
            self.scheduler = Scheduler(built.policy, limits, manager, settings)
        self.blocks = self.scheduler.blocks
        self.sequences: list[Sequence] = []
        self.tokens_drawn = 0
        self.tenant, self.weight = "", 1.0
        """Of the sequences that are added from now on."""

    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        priority: int = 0,
        *,
        prefill_only: bool = False,
        group: str = "",
        sample: Sample | None = None,
    ) -> Sequence:
        sequence = make_sequence(prompt, max_tokens, f"r{len(self.sequences)}", priority=priority)
        sequence.prefill_only = prefill_only
        sequence.origin.sample_group = group
        if sample is not None:
            join(sequence, sample)
        self._queue(sequence)
        return sequence

    def handoff(
        self, prompt: list[int], max_tokens: int, sample: Sample | None = None, remote: RemoteKV | None = None
    ) -> Sequence:
        """Queues a sequence whose prompt's KV comes from another worker."""
        sequence = make_sequence(prompt, max_tokens, f"r{len(self.sequences)}")
        sequence.remote = remote or RemoteKV(SENDER)
        if sample is not None:
            join(sequence, sample)
        self._queue(sequence)
        return sequence

    def _queue(self, sequence: Sequence) -> None:
        sequence.origin.owner, sequence.origin.weight = self.tenant, self.weight
        self.sequences.append(sequence)
        self.scheduler.add(sequence)

    def arrive(self, sequence: Sequence) -> None:
        """The blocks of a handoff and its first token are here."""
        sequence.num_computed = sequence.num_tokens
        sequence.tokens.append(ADOPTED_FIRST_TOKEN)
        self.scheduler.adopt(sequence)

    def adopt(self, prompt: list[int], max_tokens: int, sample: Sample | None = None) -> Sequence | None:
        """A handoff that is complete at once. None: it is not admitted now, and leaves."""
        sequence = self.handoff(prompt, max_tokens, sample)
        reserved = self.scheduler.reserve()
        if sequence not in reserved:
            assert not reserved
            self.scheduler.abort(sequence.key)
            return None
        self.arrive(sequence)
        return sequence

    def forward(self, plan: StepPlan, token_id: int | None = None) -> StepResult:
        rows = []
        for row in plan.rows:
            self.tokens_drawn += row.sample
            drawn = token_id if token_id is not None else 1 + self.tokens_drawn % 7
            rows.append(RowResult((drawn,) if row.sample else ()))
        return StepResult(plan.step, rows, 0.0)

    def step(self) -> tuple[StepPlan, list[SequenceOutput]]:
        decoding = [s for s in self.scheduler.running.values() if s.is_decoding]
        plan = self.scheduler.schedule()
        self.check_plan(plan, decoding)
        self.between_plan_and_landing(plan)
        outputs = self.scheduler.commit(plan, self.forward(plan))
        self.take_prefilled(outputs)
        self.check_pool()
        return plan, outputs

    def take_prefilled(self, outputs: list[SequenceOutput]) -> None:
        """As a prefill worker does: its blocks are the handoff's from here on."""
        for output in outputs:
            if output.sequence.prefill_only and output.prefilled and output.finish is None:
                self.scheduler.abort(output.sequence.key)

    def run(self, max_steps: int = 3000) -> list[StepPlan]:
        """Steps until nothing is left."""
        plans: list[StepPlan] = []
        while self.scheduler.has_work:
            assert len(plans) < max_steps, "it does not end"
            plan, _ = self.step()
            assert plan.has_work, f"work waits and nothing runs: {plan.held_back}"
            plans.append(plan)
        return plans

    def between_plan_and_landing(self, plan: StepPlan) -> None:
        """A handoff that is granted all there is now, and writes into it at once, touches nothing of the step's."""
        if plan.host_copies is None:
            return
        allocated = self.pool.allocate(self.pool.num_available, BlockState.RESERVED)
        granted = set(allocated)
        for sequence in plan.reservations:
            granted |= set(sequence.table.ids[sequence.num_published :].tolist())
        assert granted.isdisjoint(plan.host_copies.out.blocks)
        assert granted.isdisjoint(plan.host_copies.back.blocks)
        assert not set(plan.host_copies.out.slots) & set(plan.host_copies.back.slots)
        self.pool.check_integrity()
        self.pool.release(allocated, BlockState.RESERVED)

    def check_plan(self, plan: StepPlan, decoding: list[Sequence]) -> None:
        self.check_budget(plan)
        assert [row.is_prefill for row in plan.rows] == sorted((r.is_prefill for r in plan.rows), reverse=True)
        assert max(Counter(row.sequence.key for row in plan.rows).values(), default=1) == 1
        planned = {row.sequence.key for row in plan.rows if not row.is_prefill}
        preempted = {s.key for s in plan.preempted}
        assert not preempted & {row.sequence.key for row in plan.rows}
        if isinstance(self.scheduler.policy, SarathiPolicy):
            back = {s.key for s in plan.admitted}  # from the host, or with all but the last token cached
            assert planned - back <= {s.key for s in decoding} - preempted
            assert {s.key for s in decoding} <= planned | preempted, "a running decode was left out"
        for row in plan.rows:
            assert row.position == row.sequence.num_computed
            assert row.sequence.table.capacity_tokens >= row.position + row.num_tokens
        check_writes(self.scheduler, plan)

    def check_budget(self, plan: StepPlan) -> None:
        """No more tokens than the budget, but for one prompt that is not cut and longer than the rest of the step."""
        over = plan.num_prefill_tokens + plan.num_decode_tokens - self.scheduler.limits.token_budget
        assert plan.num_decode_tokens <= self.scheduler.limits.max_running
        if over > 0:
            assert self.scheduler.policy.block_manager is not BlockManager, "chunks must fit the budget"
            assert sum(row.is_prefill for row in plan.rows) == 1
            assert not plan.num_decode_tokens or self.scheduler.policy.block_manager is WholeSequenceBlocks

    def is_a_sequences(self, block: int) -> bool:
        return any(self.pool.num_holds(block, state) for state in (BlockState.COMPUTING, BlockState.RUNNING))

    def check_pool(self) -> None:
        self.pool.check_integrity()
        self.scheduler.waiting.check_integrity()
        copying = any(plan.host_copies for plan in self.scheduler._uncommitted)
        if not copying:
            self.scheduler.lifecycle.offload.check_integrity()
        running = list(self.scheduler.running.values())
        assert self.scheduler.lifecycle.num_slots <= self.scheduler.limits.max_running
        holders = {s for s in [*running, *self.sequences] if s.num_planned} | set(
            running
        )  # ended ones, until they land
        held = {block for s in holders for block in s.table.ids.tolist()} | blocks_besides(self.scheduler)
        if not copying:
            assert held == {block for block in range(self.pool.num_blocks) if self.is_a_sequences(block)}
        use = self.blocks.slot_use(running)
        assert 0 <= use.committed <= use.allocated
        for sequence in running:
            assert sequence.table.num_blocks >= blocks_for(sequence.num_computed, BLOCK_SIZE)


# -- drives a scheduler as the step loop does with overlap -----------------------------------------------------------


Forward = Callable[[StepPlan], StepResult]


class OverlappedBench(Bench):
    """`step` lands one step: the one behind it is planned before, and starts before it is committed."""

    in_flight: StepPlan | None = None
    following: StepPlan | None = None
    num_planned_ahead = 0

    def plan(self) -> list[StepPlan]:
        """Plans what can be planned; returns the new plans with or without rows."""
        new: list[StepPlan] = []
        if self.in_flight is None:
            plan = self.scheduler.schedule()
            new.append(plan)
            self.in_flight = plan if plan.has_work else None
        if self.in_flight is not None and self.following is None:
            before = self.scheduler.num_preemptions
            self.following = self.scheduler.schedule_ahead()
            assert self.scheduler.num_preemptions == before, "planning ahead preempted"
            if self.following is not None:
                assert self.following.rows and self.following.host_copies is None
                self.num_planned_ahead += 1
                new.append(self.following)
        self.check_pool()
        return new

    def land(self) -> list[SequenceOutput]:
        """The step in flight ends well."""
        landed = self.in_flight
        assert landed is not None
        result = self.forward(landed)
        self.in_flight, self.following = self.following, None
        outputs = self.scheduler.commit(landed, result)
        self.take_prefilled(outputs)
        self.check_pool()
        return outputs

    def fail(self, keys: Collection[SequenceKey] | None = None) -> list[Sequence]:
        """The step in flight fails."""
        failed_plan, self.in_flight = self.in_flight, None
        assert failed_plan is not None
        if self.following is not None:
            self.scheduler.cancel_plan(self.following)
            self.following = None
        failed = self.scheduler.fail_step(failed_plan, keys)
        self.check_pool()
        return failed

    def step(self) -> tuple[StepPlan, list[SequenceOutput]]:
        plans = self.plan()
        if self.in_flight is None:
            return plans[0], []
        landed = self.in_flight
        self.check_rows(landed)
        return landed, self.land()

    def check_rows(self, plan: StepPlan) -> None:
        """Rows go on where the committed tokens end, whatever was planned before."""
        self.check_budget(plan)
        check_writes(self.scheduler, plan)
        for row in plan.rows:
            if row.sequence.key in self.scheduler.running:
                assert row.position == row.sequence.num_computed
            assert row.sequence.table.capacity_tokens >= row.position + row.num_tokens, "no room for its K/V"
            assert self.pool.num_holds(int(row.sequence.table.ids[row.position // row.sequence.table.block_size])) > 0
