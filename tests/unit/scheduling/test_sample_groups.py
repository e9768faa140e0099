"""The samples of a request get, lose and get back their blocks together, and still draw what each draws alone."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.protocol.sampling import Sampling
from kvrelay.scheduling.plan import StepPlan
from kvrelay.scheduling.scheduler_settings import SchedulerSettings
from kvrelay.scheduling.sequence import Sequence, SequenceState
from tests.fakes.hash_runner import expected_tokens
from tests.thoroughness import examples
from tests.unit.scheduling.bench import SCHEDULERS
from tests.unit.scheduling.test_beams import MAX_MODEL_LEN, World, policies, prompts

requests = st.lists(
    st.tuples(prompts, st.integers(1, 5), st.integers(1, 24), st.integers(0, 4)), min_size=1, max_size=6
)


def samples(world: World, number: int, prompt: list[int], count: int, max_tokens: int) -> list[Sequence]:
    group = []
    for index in range(count):
        sampling = Sampling(temperature=1.0, seed=number, max_tokens=max_tokens, ignore_eos=True)
        sequence = world.make(prompt, sampling, key=(f"g{number}", 1, index))
        sequence.origin.sample_group = f"g{number}" if count > 1 else ""
        world.scheduler.add(sequence)
        group.append(sequence)
    return group


def step(world: World, groups: list[list[Sequence]]) -> StepPlan:
    scheduler = world.scheduler
    before = {s: s.state for group in groups for s in group}
    preempted = {s: s.num_preemptions for s in before}
    reserved = {s for s in before if scheduler.lifecycle.sample_groups.has_reserved_capacity(s)}
    ready = {s for s in reserved if scheduler.blocks.first_missing(s)[1] not in scheduler.lifecycle.in_progress}
    others_ran = [any(s not in group for s in scheduler.running.values()) for group in groups]
    plan = world.step()
    assert plan.has_work or plan.preempted or not scheduler.has_work, plan.held_back
    assert scheduler.lifecycle.num_slots <= scheduler.limits.max_running
    passed = [s for s in plan.admitted if s not in reserved]
    assert not passed or ready <= set(plan.admitted), "somebody else was admitted before those that had room set aside"
    for group, others in zip(groups, others_ran, strict=True):
        now_reserved = {s for s in group if scheduler.lifecycle.sample_groups.has_reserved_capacity(s)}
        lost = [s for s in group if s.num_preemptions > preempted[s]]
        ran = [s for s in group if before[s] is SequenceState.RUNNING]
        assert not lost or set(lost) >= {s for s in ran if s.state is not SequenceState.FINISHED}, (
            "a part was preempted"
        )
        assert not lost or not now_reserved, "a part was preempted, another one has room set aside still"
        fresh = {s for s in group if before[s] is SequenceState.WAITING and not preempted[s]} - reserved
        if fresh & set(plan.admitted) and could_run_at_once(world, group):
            assert fresh <= {*plan.admitted, *now_reserved}, "a part was admitted"
        waited = {s for s in group if before[s] is SequenceState.WAITING and preempted[s]} - reserved
        back = waited & set(plan.admitted)
        assert not back or not others or waited <= back | now_reserved, "a part was resumed although others will go"
    return plan


def could_run_at_once(world: World, group: list[Sequence]) -> bool:
    """At their longest: groups that cannot may go in parts."""
    longest = min(max(s.num_prompt + s.sampling.max_tokens for s in group), MAX_MODEL_LEN)
    num_blocks = len(group) * -(-longest // world.pool.block_size)
    return num_blocks <= world.pool.num_blocks and len(group) <= world.scheduler.limits.max_running


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@settings(max_examples=examples(80), deadline=None)
@given(requests, policies, st.integers(12, 30), st.integers(8, 24), st.integers(1, 8), st.booleans())
def test_they_go_and_come_back_together(
    scheduler: str,
    wanted: list[tuple[list[int], int, int, int]],
    policy: SchedulerSettings,
    num_blocks: int,
    token_budget: int,
    max_running: int,
    cache: bool,
) -> None:
    world = World(num_blocks, token_budget, max_running, cache, scheduler, policy)
    groups: list[list[Sequence]] = []
    for number, (prompt, count, max_tokens, gap) in enumerate(wanted):
        if world.fits(prompt, Sampling(max_tokens=max_tokens)):
            groups.append(samples(world, number, prompt, count, max_tokens))
        for _ in range(gap):
            step(world, groups)
    for _ in range(4000):
        if not world.scheduler.has_work:
            break
        step(world, groups)
    world.run()
    for group in groups:
        for sequence in group:
            prompt = sequence.tokens.view(0, sequence.num_prompt).tolist()
            expected = expected_tokens(prompt, sequence.sampling, MAX_MODEL_LEN, sequence.key[2])
            assert sequence.tokens.view(sequence.num_prompt, sequence.num_tokens).tolist() == expected


def step_until(world: World, group: list[Sequence], state: SequenceState) -> int:
    """Steps until all of a group are in a state; returns the prompt tokens that were computed."""
    num_computed = 0
    for _ in range(100):
        if all(s.state is state for s in group):
            return num_computed
        num_computed += step(world, [group]).num_prefill_tokens
    raise AssertionError(f"they are {[s.state for s in group]}")


@pytest.mark.parametrize("scheduler", ["sarathi", "vllm", "simple_chunking"])
def test_a_group_that_comes_back_computes_its_prompt_once(scheduler: str) -> None:
    world = World(14, 32, 8, True, scheduler)
    world.add([1] * 8, Sampling(temperature=0.0, max_tokens=24, ignore_eos=True))
    world.step()
    group = samples(world, 1, [2] * 16, 3, 12)
    step_until(world, group, SequenceState.RUNNING)
    step_until(world, group, SequenceState.WAITING)
    num_output = sum(s.num_output for s in group)
    world.scheduler.blocks.cache.clear()
    num_computed = step_until(world, group, SequenceState.RUNNING)
    assert num_computed == 16 + num_output, "the prompt once, and each its own output"


def test_a_sample_that_is_aborted_while_room_is_set_aside_gives_it_back() -> None:
    world = World(24, 8, 8, True, "sarathi")
    group = samples(world, 1, [2] * 20, 3, 4)
    world.step()
    for sample in group[1:]:
        assert world.scheduler.abort(sample.key)
    assert (world.scheduler.lifecycle.num_slots, world.scheduler.lifecycle.num_headroom_blocks) == (1, 0)
    world.run()
