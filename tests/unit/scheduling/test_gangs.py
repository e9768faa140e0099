"""The samples of a request lose and get back their blocks together, and still draw what each draws alone."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.protocol.sampling import Sampling
from kvrelay.scheduling.base import SchedulerSettings
from kvrelay.scheduling.sequence import Sequence, SequenceState
from tests.fakes.hash_runner import expected_tokens
from tests.unit.scheduling.bench import SCHEDULERS
from tests.unit.scheduling.test_beams import MAX_MODEL_LEN, World, policies, prompts

pytestmark = pytest.mark.unit

requests = st.lists(
    st.tuples(prompts, st.integers(1, 5), st.integers(1, 24), st.integers(0, 4)), min_size=1, max_size=6
)


def samples(world: World, number: int, prompt: list[int], count: int, max_tokens: int) -> list[Sequence]:
    gang = []
    for index in range(count):
        sampling = Sampling(temperature=1.0, seed=number, max_tokens=max_tokens, ignore_eos=True)
        sequence = world.make(prompt, sampling, key=(f"g{number}", 1, index))
        sequence.gang = f"g{number}" if count > 1 else ""
        world.scheduler.add(sequence)
        gang.append(sequence)
    return gang


def step(world: World, gangs: list[list[Sequence]]) -> None:
    before = {s: s.state for gang in gangs for s in gang}
    preempted = {s: s.num_preemptions for s in before}
    others_ran = [
        any(s.state is SequenceState.RUNNING for s in world.scheduler.running.values() if s not in gang)
        for gang in gangs
    ]
    plan = world.step()
    assert plan.has_work or plan.preempted or not world.scheduler.has_work, plan.held_back
    for gang, others in zip(gangs, others_ran, strict=True):
        lost = [s for s in gang if s.num_preemptions > preempted[s]]
        ran = [s for s in gang if before[s] is SequenceState.RUNNING]
        assert not lost or set(lost) >= {s for s in ran if s.state is not SequenceState.FINISHED}, (
            "a part was preempted"
        )
        waited = [s for s in gang if before[s] is SequenceState.WAITING and preempted[s]]
        back = [s for s in waited if s in plan.admitted]
        in_parts = back and len(back) < len(waited)
        assert not in_parts or not others, "a part was resumed although others will make room"


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@settings(max_examples=80, deadline=None)
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
    gangs: list[list[Sequence]] = []
    for number, (prompt, count, max_tokens, gap) in enumerate(wanted):
        if world.fits(prompt, Sampling(max_tokens=max_tokens)):
            gangs.append(samples(world, number, prompt, count, max_tokens))
        for _ in range(gap):
            step(world, gangs)
    for _ in range(4000):
        if not world.scheduler.has_work:
            break
        step(world, gangs)
    world.run()
    for gang in gangs:
        for sequence in gang:
            prompt = sequence.tokens.view(0, sequence.num_prompt).tolist()
            expected = expected_tokens(prompt, sequence.sampling, MAX_MODEL_LEN, sequence.key[2])
            assert sequence.tokens.view(sequence.num_prompt, sequence.num_tokens).tolist() == expected


def test_without_the_setting_they_go_one_by_one() -> None:
    lost = {}
    for gang_samples in (True, False):
        world = World(10, 16, 8, False, policy=SchedulerSettings(gang_samples=gang_samples))
        world.add([1] * 8, Sampling(temperature=0.0, max_tokens=24, ignore_eos=True))
        world.step()
        gang = samples(world, 1, [2] * 5, 3, 20)
        while not world.scheduler.num_preemptions:
            world.step()
        lost[gang_samples] = sum(s.num_preemptions for s in gang)
    assert lost[True] == 3
    assert lost[False] == 1
