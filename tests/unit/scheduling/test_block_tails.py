"""Prompts that are only scored and differ within a block: its first part is computed once, and copied."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.protocol.messages import Header, PeerRef, Prompt, pack_tokens
from kvrelay.protocol.sampling import Sampling
from kvrelay.scheduling.plan import SequenceOutput, StepPlan, worker_batch
from kvrelay.scheduling.scheduler_settings import SchedulerSettings
from kvrelay.scheduling.sequence import Sequence, SequenceState
from kvrelay.step.batch import StepResult, WorkerBatch
from kvrelay.worker.requests import make_sequence
from tests.fakes.hash_runner import HashRunner, expected_tokens
from tests.thoroughness import examples
from tests.unit.scheduling.bench import BLOCK_SIZE, SCHEDULERS, Bench, OverlappedBench

ROUTER = PeerRef("router", "1", "tcp://nowhere")


class KVBench(Bench):
    """Steps write tokens and positions to where KV would go. What a row attends to must be its own sequence's."""

    def __init__(self, num_blocks: int, token_budget: int, max_running: int, **others: object) -> None:
        super().__init__(num_blocks, token_budget, max_running, **others)  # type: ignore[arg-type]
        self.runner = HashRunner(num_blocks, BLOCK_SIZE, num_blocks * BLOCK_SIZE, num_host_slots=8)
        self.num_computed = 0
        self._batches: dict[int, WorkerBatch] = {}

    def add_prompt(self, prompt: list[int], sampling: Sampling, session: str = "") -> Sequence:
        header = header_of(f"r{len(self.sequences)}")
        body = Prompt(tokens=pack_tokens(prompt), sampling=sampling, session=session)
        sequence = make_sequence(header, body, ROUTER, self.runner.spec)
        self.sequences.append(sequence)
        self.runner.add_sequence(sequence.key, sampling, prompt, len(prompt))
        self.scheduler.add(sequence)
        return sequence

    def add_choices(self, prompts: list[list[int]], start: int, session: str = "") -> list[Sequence]:
        """As the router sends them: only the first one scores what all have in common."""
        common = min(num_common(prompts), min(map(len, prompts)) - 1)
        first = max(start, common)
        samplings = [scored(first if index else start, min(common, first - 1)) for index in range(len(prompts))]
        return [self.add_prompt(each, sampling, session) for each, sampling in zip(prompts, samplings, strict=True)]

    def remember(self, plan: StepPlan) -> None:
        """A step computes what it was planned for, whatever is planned or committed until it runs."""
        self._batches[plan.step] = worker_batch(plan)

    def forward(self, plan: StepPlan, token_id: int | None = None) -> StepResult:
        batch = self._batches.pop(plan.step)
        result = self.runner.execute(batch)
        cells = self.runner.pool_bytes.view(np.int32).reshape(self.pool.num_blocks, BLOCK_SIZE, 2)
        for row, sent in zip(plan.rows, batch.rows, strict=True):
            end = row.position + row.num_tokens
            read = cells[sent.block_ids].reshape(-1, 2)[:end, 0]
            tokens = row.sequence.tokens.view(0, end)
            assert np.array_equal(read[: len(tokens)], tokens), f"{row.sequence.key} reads KV of other tokens"
            self.num_computed += row.num_tokens
        return result


class InTurn(KVBench):
    def check_plan(self, plan: StepPlan, decoding: list[Sequence]) -> None:
        super().check_plan(plan, decoding)
        self.remember(plan)


class Overlapped(KVBench, OverlappedBench):
    def plan(self) -> list[StepPlan]:
        plans = super().plan()
        for plan in plans:
            self.remember(plan)
        return plans


def header_of(request: str) -> Header:
    return Header(sender="r", incarnation="1", reply_to="r", to_incarnation="1", link=1, request=request, attempt=1)


def num_common(prompts: list[list[int]]) -> int:
    common = 0
    while common < min(map(len, prompts)) and len({prompt[common] for prompt in prompts}) == 1:
        common += 1
    return common


def scored(start: int, num_shared: int = 0) -> Sampling:
    return Sampling(max_tokens=0, prompt_logprobs=0, logprob_start_len=start, num_shared=num_shared)


def steps_of(bench: KVBench) -> list[int]:
    """Runs all; the number of tokens of each step."""
    return [plan.num_prefill_tokens for plan in bench.run()]


# -- what is computed -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [InTurn, Overlapped])
def test_the_common_part_of_a_block_is_computed_once(kind: type[KVBench]) -> None:
    bench = kind(64, 64, 16)
    prefix = list(range(1, 12))  # two blocks and three tokens
    bench.add_choices([[*prefix, 20 + each, 40, 41] for each in range(8)], 11)
    assert steps_of(bench) == [10, 8 * 3]  # the last common token again for each, and all but the last of its own


def test_choices_of_one_token_behind_a_cached_prefix_take_one_token_each() -> None:
    bench = InTurn(64, 64, 16)
    prefix = list(range(1, 12))
    bench.add_prompt(prefix, Sampling(max_tokens=1))  # has its two full blocks cached
    bench.run()
    sequences = bench.add_choices([[*prefix, 20 + each] for each in range(8)], 11)
    assert steps_of(bench) == [2, 8]
    assert [each.num_cached_tokens for each in sequences] == [8] + [10] * 7
    again = bench.add_choices([[*prefix, 30 + each] for each in range(4)], 11)
    assert steps_of(bench) == [4]  # the part is still cached
    assert [each.num_cached_tokens for each in again] == [10] * 4


def test_the_first_prompt_may_score_more_than_the_others() -> None:
    bench = InTurn(64, 64, 16)
    prefix = list(range(1, 12))
    bench.add_choices([[*prefix, 20 + each, 40] for each in range(4)], 3)
    assert steps_of(bench) == [10, 4 * 2]


def test_prompts_that_differ_at_the_end_of_a_block_share_only_full_blocks() -> None:
    bench = InTurn(64, 64, 16)
    prefix = list(range(1, 10))  # the last common position that need not be computed again is a block's end
    bench.add_choices([[*prefix, 20 + each, 40] for each in range(4)], 9)
    assert all(each not in bench.scheduler.blocks.tails for each in bench.sequences)
    steps_of(bench)
    assert bench.num_computed == 8 + 4 * 2


def test_without_a_radix_tree_each_computes_its_own() -> None:
    bench = InTurn(64, 64, 16, cache=False)
    bench.add_choices([[1, 2, 3, 4, 5, 6, 20 + each] for each in range(4)], 6)
    assert steps_of(bench) == [4 * 6]


def test_if_the_first_leaves_another_computes_the_part() -> None:
    bench = InTurn(64, 64, 16)
    first, *others = bench.add_choices([[1, 2, 3, 4, 5, 6, 20 + each] for each in range(4)], 6)
    plan = bench.scheduler.schedule()
    assert [row.sequence for row in plan.rows] == [first]
    bench.remember(plan)
    bench.scheduler.abort(first.key)
    bench.scheduler.commit(plan, bench.forward(plan))
    bench.run()
    assert {each.state for each in others} == {SequenceState.FINISHED}
    assert bench.num_computed == 5 + 5 + 3


def test_the_part_is_evicted_with_its_session() -> None:
    bench = InTurn(8, 64, 16)
    bench.add_choices([[1, 2, 3, 4, 5, 6, 20 + each] for each in range(2)], 6, "s")
    bench.run()
    num_cached = bench.blocks.cache.num_cached
    bench.scheduler.blocks.end_session("s")
    bench.check_pool()
    bench.blocks.cache.check_integrity()
    assert bench.blocks.cache.evict(num_cached)
    assert not bench.blocks.cache.num_cached


def test_a_chunk_ends_at_a_tail_that_its_own_blocks_evicted() -> None:
    """The tail is cached when the chunk is chosen. The pool is full, so the sequence's blocks are taken from it."""
    bench = Overlapped(12, 24, 1, scheduler="vllm")
    first, second = [1 + position % 3 for position in range(16)], [2, *(1 + position % 2 for position in range(13))]
    for prompts in ([[1, 1]], [[*second, 1]], [[*first, 1]], [[*second, 1, 1, 1], [*second, 1]]):
        bench.add_choices(prompts, 1)
    steps_of(bench)
    assert {each.state for each in bench.sequences} == {SequenceState.FINISHED}


# -- what a worker makes of a message ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampling", "num_unneeded", "tail_end"),
    [
        (scored(6, 5), 1, 5),
        (scored(6, 4), 1, 0),  # a block's end
        (scored(3, 6), 1, 6),
        (scored(6, 7), 1, 0),  # nothing would be left to compute
        (scored(6), 1, 0),
        (scored(8, 5), 0, 0),  # nothing to score
        (Sampling(max_tokens=1, prompt_logprobs=0, logprob_start_len=6, num_shared=5), 0, 0),  # is handed over
        (Sampling(max_tokens=0, num_shared=5), 0, 0),  # is to be cached
    ],
)
def test_only_prompts_that_are_scored_and_not_continued_take_part(
    sampling: Sampling, num_unneeded: int, tail_end: int
) -> None:
    bench = InTurn(8, 32, 8)
    sequence = bench.add_prompt(list(range(8)), sampling)
    assert (sequence.num_unneeded, bench.scheduler.blocks.tails.end_of(sequence)) == (num_unneeded, tail_end)


# -- random histories -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arrival:
    """Prompts that begin with the first `length` tokens of one of two texts."""

    text: int
    length: int
    endings: list[list[int]]
    start: int
    gap: int
    kind: str  # "scored", "aborted" (one of them is, later) or "sampled"


arrivals = st.lists(
    st.builds(
        Arrival,
        st.integers(0, 1),
        st.integers(1, 18),
        st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=6), min_size=1, max_size=6),
        st.integers(1, 18),
        st.integers(0, 3),
        st.sampled_from(["scored", "scored", "aborted", "sampled"]),
    ),
    min_size=1,
    max_size=8,
)
policies = st.builds(
    SchedulerSettings,
    queue_order=st.sampled_from(["lpm", "fcfs", "dfs_weight"]),
    queue_starvation_bound=st.integers(1, 6),
    chunking=st.sampled_from(["fixed", "dynamic"]),
    preemption=st.sampled_from(["recompute", "swap"]),
    num_host_slots=st.sampled_from([0, 8]),
)


@pytest.mark.parametrize("kind", [InTurn, Overlapped])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@settings(max_examples=examples(100), deadline=None)
@given(arrivals, policies, st.integers(24, 40), st.integers(1, 8), st.integers(12, 24), st.booleans())
def test_all_prompts_read_their_own_kv_and_end(
    scheduler: str,
    kind: type[KVBench],
    wanted: list[Arrival],
    policy: SchedulerSettings,
    token_budget: int,
    max_running: int,
    num_blocks: int,
    cache: bool,
) -> None:
    bench = kind(num_blocks, token_budget, max_running, scheduler=scheduler, settings=policy, cache=cache)
    texts = [[1 + position % 3 for position in range(18)], [2, *(1 + position % 2 for position in range(17))]]
    outputs: list[SequenceOutput] = []
    sampled: list[Sequence] = []
    for arrival in wanted:
        prefix = texts[arrival.text][: arrival.length]
        prompts = [[*prefix, *ending] for ending in arrival.endings]
        if arrival.kind == "sampled":
            sampling = Sampling(max_tokens=5, temperature=0)
            sampled += [bench.add_prompt(prompt, sampling) for prompt in prompts]
            added = sampled[-len(prompts) :]
        else:
            added = bench.add_choices(prompts, min(arrival.start, min(map(len, prompts)) - 1), f"s{arrival.text}")
        for _ in range(arrival.gap):
            outputs += bench.step()[1]
        if arrival.kind == "aborted":
            bench.scheduler.abort(added[arrival.start % len(added)].key)
            bench.scheduler.blocks.end_session(f"s{arrival.text}")
    for _ in range(2000):
        if not bench.scheduler.has_work:
            break
        plan, new = bench.step()
        outputs += new
        assert plan.has_work or plan.preempted or not bench.scheduler.has_work, f"nothing runs: {plan.held_back}"
    assert not bench.scheduler.has_work
    assert all(each.state is SequenceState.FINISHED for each in bench.sequences)
    finished = [output.sequence.key for output in outputs if output.finish]
    assert len(finished) == len(set(finished))
    for each in sampled:
        if each.key in finished:
            prompt = each.tokens.view(0, each.num_prompt).tolist()
            assert each.tokens.view(each.num_prompt, each.num_tokens).tolist() == expected_tokens(
                prompt, each.sampling, num_blocks * BLOCK_SIZE
            )
    assert bench.pool.num_available == num_blocks
    assert not bench.scheduler.lifecycle.in_progress
    assert not bench.blocks.tails.computing and not bench.blocks.tails._ends
    assert not len(bench.blocks.copies)
