"""The samples of a request over random histories, against the K/V that the blocks hold.

The model is the hash model: each token proves what all blocks of its sequence hold. Steps are planned ahead, fail and
are cancelled. Samples arrive together or late, are computed here, for a handoff, or elsewhere, and end at any moment.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvrelay.kv.pool import BlockPool, BlockState
from kvrelay.kv.prefix_cache import PrefixCache
from kvrelay.kv.table import blocks_for
from kvrelay.protocol.sampling import Sampling
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.scheduling.plan import SequenceOutput, StepPlan, worker_batch
from kvrelay.scheduling.scheduler import make_scheduler
from kvrelay.scheduling.scheduler_settings import SchedulerLimits, SchedulerSettings
from kvrelay.scheduling.sequence import RemoteKV, Sequence
from kvrelay.step.batch import WorkerBatch
from tests.fakes.hash_runner import HashRunner, expected_tokens, next_token
from tests.fakes.sequences import new_sequence
from tests.thoroughness import examples
from tests.unit.scheduling.bench import SCHEDULERS, SENDER, check_writes

BLOCK = 4
MAX_LEN = 48


@dataclass
class World:
    """A worker's scheduler over the hash model's pool, with up to two steps under way."""

    num_blocks: int = 64
    token_budget: int = 16
    max_running: int = 8
    scheduler_name: str = "sarathi"
    policy: SchedulerSettings = field(default_factory=SchedulerSettings)
    num_host_slots: int = 0

    def __post_init__(self) -> None:
        self.runner = HashRunner(self.num_blocks, BLOCK, MAX_LEN, num_host_slots=self.policy.num_host_slots)
        self.pool = BlockPool(self.num_blocks, BLOCK)
        limits = SchedulerLimits(self.token_budget, self.max_running, MAX_LEN, frozenset())
        built = make_scheduler(self.scheduler_name, limits, self.pool, PrefixCache(self.pool), self.policy)
        self.scheduler, self.blocks = built, built.blocks
        self.open: dict[SequenceKey, Sequence] = {}
        self.ended: list[Sequence] = []
        self.handed: dict[SequenceKey, list[int]] = {}  # by prompts computed for others: the blocks, held as in flight
        self.in_flight: StepPlan | None = None
        self.following: StepPlan | None = None
        self.batches: dict[int, WorkerBatch] = {}  # made with the plan: what is planned behind it may change tables
        self.num_computed = 0

    # -- sequences ----------------------------------------------------------------------------------------------------

    def make(self, request: str, index: int, count: int, prompt: list[int], max_tokens: int) -> Sequence:
        sampling = Sampling(temperature=1.0, seed=len(prompt), max_tokens=max_tokens, ignore_eos=True)
        group = request if count > 1 else ""
        sequence = new_sequence((request, 1, index), prompt, sampling, BLOCK, sample_group=group)
        self.runner.add_sequence(sequence.key, sampling, prompt, len(prompt))
        return sequence

    def begin(self, sequence: Sequence) -> Sequence:
        self.open[sequence.key] = sequence
        return sequence

    def add(self, request: str, index: int, count: int, prompt: list[int], max_tokens: int) -> Sequence:
        sequence = self.make(request, index, count, prompt, max_tokens)
        self.scheduler.add(sequence)
        return self.begin(sequence)

    def add_for_others(self, request: str, index: int, count: int, prompt: list[int], max_tokens: int) -> Sequence:
        sequence = self.make(request, index, count, prompt, max_tokens)
        sequence.prefill_only, sequence.origin.sample_group = True, ""
        self.scheduler.add(sequence)
        return self.begin(sequence)

    def receive(self, request: str, index: int, count: int, prompt: list[int], max_tokens: int) -> Sequence | None:
        """A handoff that is complete at once. Returns None if it is not admitted now."""
        sequence = self.make(request, index, count, prompt, max_tokens)
        if max_tokens < 2:
            return None
        sequence.remote = RemoteKV(SENDER)
        self.scheduler.add(sequence)
        if sequence not in self.scheduler.reserve():
            self.scheduler.abort(sequence.key)
            return None
        self.begin(sequence)
        first = blocks_for(sequence.num_computed, BLOCK)
        positions = np.arange(first * BLOCK, len(prompt))
        where = sequence.table.ids[positions // BLOCK], positions % BLOCK
        self.runner._entries[where] = np.stack([np.array(prompt)[positions], positions], axis=1)
        token_id = next_token(np.array(prompt, np.int32), sequence.sampling, index)
        sequence.num_computed = len(prompt)
        sequence.tokens.append(token_id)
        self.runner._sampled[sequence.key] = token_id
        self.scheduler.adopt(sequence)
        return sequence

    def close(self, sequence: Sequence) -> None:
        """Nothing of it is here any more."""
        if self.open.pop(sequence.key, None) is not None:
            self.ended.append(sequence)

    def abort(self, sequence: Sequence) -> None:
        self.scheduler.abort(sequence.key)
        self.let_go(sequence)

    def let_go(self, sequence: Sequence) -> None:
        """Of what was computed for others: they have it."""
        self.pool.release(self.handed.pop(sequence.key, []), BlockState.IN_FLIGHT)
        self.close(sequence)

    # -- steps --------------------------------------------------------------------------------------------------------

    def plan(self, *, ahead: bool) -> None:
        if self.in_flight is None:
            plan = self.scheduler.schedule()
            check_writes(self.scheduler, plan)
            # Blocks that are on their way to others may hold everything back.
            assert plan.has_work or plan.preempted or self.handed or not self.scheduler.has_work, plan.held_back
            self.in_flight = plan if plan.has_work else None
            self.batches[plan.step] = worker_batch(plan)
        elif ahead and self.following is None:
            self.following = self.scheduler.schedule_ahead()
            if self.following is not None:
                check_writes(self.scheduler, self.following)
                self.batches[self.following.step] = worker_batch(self.following)
        self.pool.check_integrity()

    def land(self) -> None:
        plan, self.in_flight, self.following = self.in_flight, self.following, None
        assert plan is not None
        assert not plan.copies, "samples share full blocks only, which nothing writes"
        self.num_computed += plan.num_prefill_tokens
        self.take(self.scheduler.commit(plan, self.runner.execute(self.batches.pop(plan.step))))

    def fail(self, which: int) -> None:
        """The step in flight gives nothing because of one of its rows; its copies were made."""
        if self.in_flight is None or not self.in_flight.rows:
            return
        plan, self.in_flight = self.in_flight, None
        if self.following is not None:
            self.scheduler.cancel_plan(self.following)
            self.following = None
        self.runner._swap(self.batches.pop(plan.step))
        key = plan.rows[which % len(plan.rows)].sequence.key
        for sequence in self.scheduler.fail_step(plan, {key}):
            self.close(sequence)

    def take(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            sequence = output.sequence
            if sequence.prefill_only and output.prefilled and output.finish is None:
                blocks = sequence.table.ids.tolist()
                self.pool.hold(blocks, BlockState.IN_FLIGHT)
                self.handed[sequence.key] = blocks
                self.scheduler.abort(sequence.key)
            elif output.finish is not None:
                self.close(sequence)

    def run(self) -> None:
        for _ in range(4000):
            if not self.scheduler.has_work and not self.handed:
                break
            self.plan(ahead=False)
            if self.in_flight is not None:
                self.land()
            for key in list(self.handed):
                self.let_go(self.open[key])
        assert not self.scheduler.has_work
        assert not self.handed

    def check_end(self, aborted: set[SequenceKey]) -> None:
        assert not self.open
        assert self.pool.num_available == self.num_blocks
        assert not self.scheduler.lifecycle.in_progress
        for sequence in self.ended:
            prompt = sequence.tokens.view(0, sequence.num_prompt).tolist()
            output = sequence.tokens.view(sequence.num_prompt, sequence.num_tokens).tolist()
            expected = expected_tokens(prompt, sequence.sampling, MAX_LEN, sequence.key[2])
            if sequence.prefill_only:
                expected = expected[:1]
            assert output == (expected[: len(output)] if sequence.key in aborted else expected)


prompts = st.one_of(st.integers(1, 20), st.sampled_from([4, 8, 12])).flatmap(
    lambda length: st.lists(st.integers(1, 2), min_size=length, max_size=length)
)
requests = st.tuples(
    prompts, st.integers(1, 6), st.integers(1, 16), st.sampled_from(["here", "here", "for others", "received"])
)
events = st.one_of(
    st.tuples(st.just("request"), requests),
    st.tuples(st.just("late"), st.integers(0, 99)),
    st.tuples(st.sampled_from(["abort", "fail", "let go"]), st.integers(0, 99)),
    st.tuples(st.sampled_from(["step", "step", "step", "plan", "ahead"]), st.just(0)),
)
policies = st.builds(
    SchedulerSettings,
    chunking=st.sampled_from(["fixed", "dynamic"]),
    preemption=st.sampled_from(["recompute", "swap"]),
    num_host_slots=st.sampled_from([0, 6, 40]),
)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@settings(max_examples=examples(100), deadline=None)
@example(
    history=[
        ("request", ([1], 5, 2, "for others")),
        ("request", ([1] * 16, 3, 1, "here")),
        ("late", 0),
        ("step", 0),
        ("step", 0),
    ],
    policy=SchedulerSettings(preemption="recompute"),
    num_blocks=12,
    token_budget=8,
    max_running=3,
)
@given(st.lists(events, min_size=1, max_size=40), policies, st.integers(12, 40), st.integers(8, 24), st.integers(1, 8))
def test_every_sample_draws_what_it_draws_alone(
    scheduler: str,
    history: list[tuple[str, object]],
    policy: SchedulerSettings,
    num_blocks: int,
    token_budget: int,
    max_running: int,
) -> None:
    world = World(num_blocks, token_budget, max_running, scheduler, policy)
    aborted: set[SequenceKey] = set()
    late: list[tuple[str, int, int, list[int], int, str]] = []
    for number, (name, value) in enumerate(history):
        match name, value:
            case "request", (list(prompt), int(count), int(max_tokens), str(kind)):
                for index in range(count):
                    late.append((f"r{number}", index, count, prompt, max_tokens, kind))
                for _ in range(max(1, count - number % 3)):  # the others come later, or never
                    arrive(world, *late.pop(0))
            case "late", which if late:
                arrive(world, *late.pop(int(str(which)) % len(late)))
            case "abort", which if world.open:
                sequence = list(world.open.values())[int(str(which)) % len(world.open)]
                aborted.add(sequence.key)
                world.abort(sequence)
            case "let go", which if world.handed:
                world.let_go(world.open[list(world.handed)[int(str(which)) % len(world.handed)]])
            case "fail", which if world.in_flight is not None and world.in_flight.rows:
                row = world.in_flight.rows[int(str(which)) % len(world.in_flight.rows)]
                aborted.add(row.sequence.key)
                world.fail(int(str(which)))
            case "plan", _:
                world.plan(ahead=False)
            case "ahead", _:
                world.plan(ahead=True)
            case "step", _:
                world.plan(ahead=False)
                if world.in_flight is not None:
                    world.land()
    while world.in_flight is not None:
        world.land()
    world.run()
    world.check_end(aborted)


def arrive(world: World, request: str, index: int, count: int, prompt: list[int], max_tokens: int, kind: str) -> None:
    if (request, 1, index) in world.open:
        return
    begin = {"here": world.add, "for others": world.add_for_others, "received": world.receive}[kind]
    begin(request, index, count, prompt, max_tokens)


# -- what is shared ---------------------------------------------------------------------------------------------------


def samples(world: World, count: int, num_prompt: int, max_tokens: int = 3) -> list[Sequence]:
    return [world.add("r", index, count, [2] * num_prompt, max_tokens) for index in range(count)]


def steps(world: World, num: int) -> None:
    for _ in range(num):
        world.plan(ahead=False)
        if world.in_flight is not None:
            world.land()


def num_computed_once(num_prompt: int) -> int:
    """Tokens of the prompt's blocks that samples share; each sample computes the rest, at least one token."""
    return (blocks_for(num_prompt, BLOCK) - 1) * BLOCK


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("num_prompt", [1, 3, 4, 5, 11, 12])
def test_full_blocks_of_a_prompt_are_computed_and_stored_once(scheduler: str, num_prompt: int) -> None:
    world = World(scheduler_name=scheduler, token_budget=32)
    started = samples(world, 6, num_prompt)
    while any(sample.num_output == 0 for sample in started):
        steps(world, 1)
    num_shared = num_computed_once(num_prompt)
    assert world.num_computed == num_shared + 6 * (num_prompt - num_shared)
    if num_shared:
        assert len({int(sample.table.ids[0]) for sample in started if sample.table.num_blocks}) == 1
    world.run()
    world.check_end(set())


def test_full_blocks_that_prefill_computes_for_others_are_stored_once() -> None:
    world = World()
    for index in range(6):
        world.add_for_others("r", index, 6, [2] * 11, 3)
    steps(world, 4)
    assert len(world.handed) == 6
    assert world.num_computed == 8 + 6 * 3
    assert world.num_blocks - world.pool.num_available == 2 + 6
    world.run()
    world.check_end(set())


def test_full_blocks_that_are_received_are_stored_once() -> None:
    world = World()
    received = [world.receive("r", index, 4, [2] * 10, 4) for index in range(4)]
    assert all(received)
    assert world.num_blocks - world.pool.num_available == 2 + 4
    world.run()
    world.check_end(set())


@pytest.mark.parametrize("num_aborted", [1, 3])
def test_a_first_sample_that_is_aborted_leaves_its_prompt_to_the_others(num_aborted: int) -> None:
    """The samples that remain compute no more of the prompt than is missing."""
    world = World(token_budget=16)
    started = samples(world, 5, 22)
    steps(world, 1)
    for sample in started[:num_aborted]:
        world.abort(sample)
    world.run()
    assert world.num_computed == 20 + (5 - num_aborted) * 2
    world.check_end({sample.key for sample in started[:num_aborted]})
