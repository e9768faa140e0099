"""Every scheduler under every queue order, over random histories of arrivals, adoptions, aborts and steps."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.protocol.sampling import FinishReason
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.scheduling.memory.block_manager import BlockManager, OnDemandBlocks
from kvrelay.scheduling.scheduler_settings import QueueOrderName, SchedulerSettings
from kvrelay.scheduling.sequence import Sequence, SequenceState
from tests.thoroughness import examples
from tests.unit.scheduling.bench import BLOCK_SIZE, SCHEDULERS, Bench, OverlappedBench, Sample

NUM_BLOCKS = 16

prompts = st.lists(st.integers(1, 2), min_size=1, max_size=30)
kinds = st.sampled_from(
    [
        *("local", "local", "local", "adopted", "prefill_only", "aborted"),
        *("local group", "adopted group", "prefill_only group", "aborted group"),
    ]
)
requests = st.lists(
    st.tuples(prompts, st.integers(0, 20), st.integers(0, 3), st.integers(0, 2), kinds), min_size=1, max_size=14
)
policies = st.builds(
    SchedulerSettings,
    queue_order=st.sampled_from(get_args(QueueOrderName)),
    queue_starvation_bound=st.integers(1, 6),
    chunking=st.sampled_from(["fixed", "dynamic"]),
    retraction=st.sampled_from(["latest", "least_progress"]),
    new_token_ratio=st.sampled_from([0.0, 0.0, 0.3, 1.0]),
    preemption=st.sampled_from(["auto", "recompute", "swap", "swap"]),
    num_host_slots=st.sampled_from([0, 3, 8, 40]),
    host_block_s=st.sampled_from([0.0, 1e-9, 1e3]),
)


class History:
    def __init__(self, bench: Bench, num_tenants: int) -> None:
        self.bench = bench
        self.num_tenants = num_tenants
        self.finished: dict[SequenceKey, FinishReason] = {}
        self.expected: dict[SequenceKey, tuple[Sequence, int]] = {}

    def arrive(self, prompt: list[int], max_tokens: int, priority: int, kind: str) -> None:
        kind, _, is_group = kind.partition(" ")
        number = len(self.bench.sequences) % self.num_tenants
        self.bench.tenant, self.bench.weight = f"t{number}", 1.0 + number
        name, count = f"g{len(self.bench.sequences)}", 2 + priority if is_group else 1
        for index in range(count):
            one = "local" if kind == "aborted" and index else kind  # of a group, the first alone
            self.arrive_one(prompt, max_tokens + index, priority, one, (name, index, count) if is_group else None)

    def arrive_one(self, prompt: list[int], max_tokens: int, priority: int, kind: str, sample: Sample | None) -> None:
        if kind == "adopted":
            if self.bench.scheduler.lifecycle.num_slots < self.bench.scheduler.limits.max_running:
                sequence = self.bench.adopt(prompt, max_tokens + 2, sample)
                if sequence is not None:
                    self.expected[sequence.key] = (sequence, len(prompt) + max_tokens + 2)
            return
        sequence = self.bench.add(prompt, max_tokens, priority, prefill_only=kind == "prefill_only", sample=sample)
        if kind == "aborted":
            self.bench.scheduler.abort(sequence.key)
        elif kind == "prefill_only" and max_tokens > 1:
            self.expected[sequence.key] = (sequence, len(prompt) + 1)
        else:
            self.expected[sequence.key] = (sequence, len(prompt) + max_tokens)

    def step(self) -> None:
        plan, outputs = self.bench.step()
        is_idle = not (plan.has_work or plan.preempted)
        assert not is_idle or not self.bench.scheduler.has_work, f"work waits and nothing runs: {plan.held_back}"
        assert all(not o.finish or o.sequence.key not in self.finished for o in outputs), "finished twice"
        self.finished |= {o.sequence.key: o.finish for o in outputs if o.finish}

    def check_end(self) -> None:
        longest = NUM_BLOCKS * BLOCK_SIZE
        for name, (sequence, num_tokens) in self.expected.items():
            assert sequence.state is SequenceState.FINISHED
            assert sequence.num_tokens == min(num_tokens, longest), f"{name} lacks tokens"
            assert sequence.prefill_only or name in self.finished
        assert self.bench.pool.num_available == NUM_BLOCKS
        assert not self.bench.scheduler.lifecycle.in_progress
        assert self.bench.scheduler.lifecycle.offload.use.num_used_slots == 0


def run_history(bench: Bench, wanted: list[tuple[list[int], int, int, int, str]], num_tenants: int = 1) -> None:
    bench.scheduler.lifecycle.shares.idle_credit = 16.0
    history = History(bench, num_tenants)
    for prompt, max_tokens, gap, priority, kind in wanted:
        history.arrive(prompt, max_tokens, priority, kind)
        for _ in range(gap):
            history.step()
    for _ in range(3000):
        if not bench.scheduler.has_work:
            break
        history.step()
    history.check_end()
    assert not bench.scheduler.lifecycle.shares.num_waiting_owners
    bench.scheduler.lifecycle.shares.check_integrity()


ON_DEMAND = ("sarathi", OnDemandBlocks)
"""Blocks on demand: prompts half computed compete for the last blocks, and chunks shrink to those that there are."""


@pytest.mark.parametrize("kind", [Bench, OverlappedBench])
@pytest.mark.parametrize(("scheduler", "blocks"), [*((name, None) for name in SCHEDULERS), ON_DEMAND])
@settings(max_examples=examples(100), deadline=None)
@given(requests, policies, st.integers(8, 40), st.integers(1, 8), st.booleans(), st.integers(1, 3))
def test_every_sequence_ends_with_all_its_tokens_whatever_the_policy(
    scheduler: str,
    blocks: type[BlockManager] | None,
    kind: type[Bench],
    wanted: list[tuple[list[int], int, int, int, str]],
    policy: SchedulerSettings,
    token_budget: int,
    max_running: int,
    cache: bool,
    num_tenants: int,
) -> None:
    bench = kind(NUM_BLOCKS, token_budget, max_running, cache, scheduler, policy, blocks)
    run_history(bench, wanted, num_tenants)


@pytest.mark.parametrize("order", get_args(QueueOrderName))
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_nobody_is_passed_by_more_than_the_bound(scheduler: str, order: QueueOrderName) -> None:
    """One at a time, and a stream of arrivals that every order likes better than the first of them."""
    starvation_bound, already_there = 5, 3
    policy = SchedulerSettings(queue_order=order, queue_starvation_bound=starvation_bound)
    bench = Bench(64, 16, 1, scheduler=scheduler, settings=policy)
    bench.add([1] * 9, 1)
    bench.step()
    for number in range(already_there):
        bench.add([2, 3, number, 3, 3], 1)
    unloved = bench.add([9] * 40, 12, priority=100)
    admitted: list[Sequence] = []
    for _ in range(200):
        if unloved.state is not SequenceState.WAITING:
            break
        if len(bench.scheduler.waiting) < 8:
            bench.add([1] * 9, 1)
        admitted += bench.step()[0].admitted
    assert unloved in admitted
    assert admitted.index(unloved) <= starvation_bound + already_there


def test_a_group_that_lacks_one_block_does_not_come_back_to_lose_it_again() -> None:
    """Samples of 17 tokens share their first block: with their next tokens that makes 1 + 4 * 4 of 16 blocks."""
    policy = SchedulerSettings(queue_order="sjf", chunking="dynamic", preemption="swap", num_host_slots=8)
    wanted = [
        ([1, 2, 1], 13, 0, 0, "local"),
        ([1, 2, 1, 2, 1], 20, 2, 2, "adopted group"),
        ([2, 1, 1, 1, 2, 2], 0, 0, 0, "aborted"),
        ([2, 1, 2, 2, 2, 2, 2, 2, 2, 2], 7, 0, 1, "prefill_only"),
    ]
    run_history(Bench(NUM_BLOCKS, 12, 4, True, "sarathi", policy, OnDemandBlocks), wanted)
