"""Preemption by swapping, over a fake model whose tokens prove what its K/V was."""

from __future__ import annotations

import random
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.kv.ablations import NullCache, TableCache
from kvrelay.kv.pool import BlockPool, BlockState
from kvrelay.kv.prefix_cache import PrefixCache
from kvrelay.protocol.sampling import Sampling
from kvrelay.scheduling.memory import swapping
from kvrelay.scheduling.plan import PlanBuilder, StepPlan, worker_batch
from kvrelay.scheduling.scheduler import make_scheduler
from kvrelay.scheduling.scheduler_settings import SchedulerLimits, SchedulerSettings
from kvrelay.scheduling.sequence import Sequence, SequenceState
from kvrelay.scheduling.step_planner import StepPlanner
from kvrelay.step.batch import RowsFailed
from tests.fakes.hash_runner import HashRunner, expected_tokens
from tests.thoroughness import examples
from tests.unit.scheduling.bench import BLOCK_SIZE, SCHEDULERS, Bench, OverlappedBench, make_sequence

GARBAGE = 0xAB


class World:
    """A scheduler, a runner that computes, and peers that write into every block that they can be granted."""

    def __init__(
        self, name: str, policy: SchedulerSettings, num_blocks: int, make_cache: type[PrefixCache], seed: int
    ) -> None:
        self.rng = random.Random(seed)
        self.pool = BlockPool(num_blocks, BLOCK_SIZE)
        self.runner = HashRunner(num_blocks, BLOCK_SIZE, num_host_slots=policy.num_host_slots)
        cache = make_cache(self.pool)
        limits = SchedulerLimits(16, 6, self.runner.spec.max_model_len, frozenset({0}))
        scheduler = make_scheduler(name, limits, self.pool, cache, policy)
        self.scheduler = scheduler
        self.sequences: list[Sequence] = []
        self.ended: set[str] = set()  # by an abort or a failed step
        self.num_forced = 0
        self.scored: dict[str, int] = {}  # prompt and output positions computed since the K/V was last lost
        self._fill = scheduler.policy.fill
        scheduler.policy.fill = self._fill_after_preemptions  # type: ignore[method-assign]

    def _fill_after_preemptions(self, planner: StepPlanner, builder: PlanBuilder) -> None:
        """Now and then somebody loses its blocks for no reason; never all of the time, or nothing would end."""
        for sequence in list(self.scheduler.running.values()):
            if self.num_forced < 40 and self.rng.random() < 0.1:
                self.num_forced += 1
                self.scheduler.lifecycle.preempt(sequence, builder)
                builder.preempt(sequence)
        self._fill(planner, builder)

    def add(self, prompt: list[int], max_tokens: int) -> None:
        sequence = make_sequence(prompt, max_tokens, f"r{len(self.sequences)}")
        sequence.sampling = Sampling(
            temperature=0.0, max_tokens=max_tokens, prompt_logprobs=self.rng.choice([None, None, 1])
        )
        self.sequences.append(sequence)
        self.runner.add_sequence(sequence.key, sequence.sampling, prompt, len(prompt))
        self.scheduler.add(sequence)

    def abort_somebody(self, plan: StepPlan) -> None:
        """Those whose blocks are being copied first: nothing but the copies' own hold keeps them from others."""
        alive = [s for s in self.sequences if s.state is not SequenceState.FINISHED]
        if plan.host_copies is not None:
            alive = [copy.sequence for copy in (*plan.host_copies.returning, *plan.host_copies.leaving)]
        if alive:
            sequence = self.rng.choice(alive)
            self.ended.add(sequence.key[0])
            self.scheduler.abort(sequence.key)

    def step(self, fault: str) -> None:
        plan = self.scheduler.schedule()
        self.scored |= {sequence.key[0]: 0 for sequence in plan.recomputed}
        if not plan.has_work:
            assert not self.scheduler.has_work or plan.preempted, plan.held_back
            return
        batch = worker_batch(plan)
        if fault == "abort":
            self.abort_somebody(plan)
        num_available = self.pool.num_available
        granted = self.pool.allocate(self.rng.choice([0, num_available // 2, num_available]), BlockState.RESERVED)
        self.runner.pool_bytes[granted] = GARBAGE  # a one-sided write, before the step's copies are made
        if fault == "not executed":
            self.ended |= {s.key[0] for s in self.scheduler.fail_step(plan)}
        elif fault == "rows failed" and plan.rows:
            with pytest.raises(RowsFailed):
                self._fail(plan)
        else:
            result = self.runner.execute(batch)
            assert (self.runner.pool_bytes[granted] == GARBAGE).all(), "a copy wrote into a block that was granted"
            self.note_scored(plan)
            self.scheduler.commit(plan, result)
        self.pool.release(granted, BlockState.RESERVED)
        self.check()

    def note_scored(self, plan: StepPlan) -> None:
        """Where prompts are scored, every position is computed once; again only where the plans said it was lost."""
        for row in plan.rows:
            if row.sequence.sampling.prompt_logprobs is not None:
                name = row.sequence.key[0]
                assert row.position == self.scored.get(name, 0)
                self.scored[name] = row.position + row.num_tokens

    def _fail(self, plan: StepPlan) -> None:
        """The copies are made, the forward gives nothing, and one row is to blame."""
        batch = worker_batch(plan)
        self.runner._swap(batch)
        spoiled = self.rng.choice(plan.rows).sequence.key
        self.ended.add(spoiled[0])
        self.ended |= {s.key[0] for s in self.scheduler.fail_step(plan, frozenset({spoiled}))}
        raise RowsFailed("one row", [spoiled])

    def check(self) -> None:
        self.pool.check_integrity()
        self.scheduler.lifecycle.offload.check_integrity()
        self.scheduler.waiting.check_integrity()
        assert self.pool.counts()[BlockState.IN_FLIGHT] == 0

    def check_end(self) -> None:
        longest = self.runner.spec.max_model_len
        for sequence in self.sequences:
            if sequence.key[0] not in self.ended:
                prompt = sequence.tokens.view(0, sequence.num_prompt).tolist()
                output = sequence.tokens.view(sequence.num_prompt, sequence.num_tokens).tolist()
                assert output == expected_tokens(prompt, sequence.sampling, longest)
        assert self.pool.num_available == self.pool.num_blocks
        use = self.scheduler.lifecycle.offload.use
        assert (use.num_used_slots, use.num_sequences) == (0, 0)
        assert not self.scheduler.lifecycle.in_progress
        assert not self.scheduler.lifecycle.offload._expected


requests = st.lists(st.tuples(st.lists(st.integers(1, 2), min_size=1, max_size=24), st.integers(1, 20)), max_size=10)
faults = st.lists(st.sampled_from(["", "", "", "abort", "not executed", "rows failed"]), max_size=60)


@pytest.mark.parametrize("name", SCHEDULERS)
@settings(max_examples=examples(250), deadline=None)
@given(
    wanted=requests,
    course=faults,
    num_blocks=st.integers(11, 20),
    num_slots=st.sampled_from([0, 2, 6, 12, 60]),
    cache=st.sampled_from([PrefixCache, TableCache, NullCache]),
    seed=st.integers(0, 1 << 16),
)
def test_tokens_are_those_of_an_undisturbed_run_whatever_is_preempted_and_how(
    name: str, wanted: list[tuple[list[int], int]], course: list[str], num_blocks: int, num_slots: int,
    cache: type[PrefixCache], seed: int,
) -> None:  # fmt: skip
    policy = SchedulerSettings(num_host_slots=num_slots)
    world = World(name, policy, num_blocks, cache, seed)
    with patch.object(swapping, "prefers_swap", lambda *_: world.rng.random() < 0.7):
        for prompt, max_tokens in wanted:
            world.add(prompt, max_tokens)
            for _ in range(world.rng.randint(0, 4)):
                world.step(course.pop() if course else "")
        for _ in range(2000):
            if not world.scheduler.has_work:
                break
            world.step(course.pop() if course else "")
    world.check_end()


def swap_bench(**settings_of: object) -> Bench:
    policy = {"preemption": "swap", "num_host_slots": 16} | settings_of
    return Bench(num_blocks=8, token_budget=16, settings=SchedulerSettings(**policy), cache=False)  # type: ignore[arg-type]


def two_that_do_not_fit(bench: Bench) -> tuple[Sequence, Sequence]:
    """Each fits alone; together they run out of blocks while they decode."""
    return bench.add([1] * 12, 14), bench.add([2] * 12, 14)


def step_until_preempted(bench: Bench) -> StepPlan:
    while not (plan := bench.step()[0]).preempted:
        pass
    return plan


def test_a_swapped_sequence_goes_on_where_it_was_and_nothing_is_computed_again() -> None:
    bench = swap_bench()
    sequences = two_that_do_not_fit(bench)
    plans = bench.run()
    assert sum(len(plan.preempted) for plan in plans) > 0
    assert sum(plan.num_prefill_tokens for plan in plans) == 24
    assert [sequence.num_output for sequence in sequences] == [14, 14]
    assert not any(plan.recomputed for plan in plans)
    use = bench.scheduler.lifecycle.offload.use
    assert use.num_preemptions == bench.scheduler.num_preemptions
    assert use.num_blocks_out == use.num_blocks_in > 0


def test_samples_of_one_prompt_share_its_slots() -> None:
    policy = SchedulerSettings(preemption="swap", num_host_slots=40)
    bench = Bench(num_blocks=16, token_budget=32, settings=policy)
    sequences = [bench.add([1] * 16 + [number], 8) for number in range(3)]
    for _ in range(4):
        bench.step()
    builder = PlanBuilder(32)
    for sequence in sequences:
        assert sequence.is_decoding
        bench.scheduler.lifecycle.preempt(sequence, builder)
    num_blocks = sum(len(copy.slots) for copy in builder.leaving)
    assert bench.scheduler.lifecycle.offload.use.num_used_slots == num_blocks - 2 * 4  # four blocks of prompt


def test_auto_swaps_only_where_copying_takes_less_time() -> None:
    for block_s, swaps in ((1e-9, True), (1.0, False)):
        bench = swap_bench(preemption="auto", host_block_s=block_s)
        _, second = two_that_do_not_fit(bench)
        step_until_preempted(bench)
        assert (second.state is SequenceState.ON_HOST) == swaps


def test_a_prompt_computed_for_its_scores_is_kept_once_beside_the_cache() -> None:
    """It may not start from the cached prefix; what it publishes must not pin a second copy of it."""
    bench = Bench(num_blocks=12, token_budget=64)
    prompt = list(range(1, 33))
    bench.add(prompt, 1)
    bench.run()
    scored = make_sequence(prompt, 8, "scored")
    scored.sampling = Sampling(max_tokens=8, prompt_logprobs=1)
    bench.scheduler.add(scored)
    plans = bench.run()
    assert not any(plan.preempted for plan in plans)
    assert scored.num_output == 8


@pytest.mark.parametrize("group", ["", "samples"])
def test_steps_are_planned_ahead_while_nobody_can_come_back_from_the_host(group: str) -> None:
    """And as soon as there is room, the next step is not: so it comes back as early as without overlap."""
    settings = SchedulerSettings(preemption="swap", num_host_slots=16)
    bench = OverlappedBench(num_blocks=8, settings=settings, cache=False, eos=-1)
    first = bench.add([1] * 8, 18)
    others = [make_sequence([number] * 4, 12, f"other{number}") for number in (2, 3)]
    for other in others:
        other.origin.sample_group = group
        bench.sequences.append(other)
        bench.scheduler.add(other)
    while not bench.scheduler.num_preemptions:
        bench.step()
    ahead = bench.num_planned_ahead
    for _ in range(3):
        assert any(other.state is SequenceState.ON_HOST for other in others)
        bench.step()
    assert bench.num_planned_ahead > ahead + 1
    for _ in range(200):
        if bench.scheduler.has_work:
            bench.step()
    assert not bench.scheduler.has_work
    assert first.num_output == 18 and all(other.num_output == 12 for other in others)


def test_who_left_before_a_plan_could_tell_of_its_admission_is_not_told_of() -> None:
    """A service looks up whom a plan admitted; a request that was cancelled in between is not there any more."""
    bench = OverlappedBench()
    scheduler = bench.scheduler
    bench.add([1] * 4, 4)
    plan = scheduler.schedule()
    late = bench.add([2] * 4, 4)

    def fill(planner: StepPlanner, builder: PlanBuilder) -> None:
        planner.admit_prompts(builder, beyond_budget=True)

    admit_only = patch.object(scheduler.policy, "fill", fill)
    with admit_only, patch.object(scheduler.chunks, "size", lambda *_: 0):
        assert scheduler.schedule_ahead() is None
    assert late.state is SequenceState.RUNNING
    scheduler.abort(late.key)
    scheduler.commit(plan, bench.forward(plan))
    assert late not in scheduler.schedule().admitted
