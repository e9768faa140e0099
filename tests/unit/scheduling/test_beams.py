"""Beam groups under every scheduler, over random histories: all or nothing, the right K/V, and the right texts.

The model is the hash model: a candidate proves that every block in a beam's table holds what it should."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.kv.ablations import NullCache
from kvrelay.kv.pool import BlockPool, BlockState
from kvrelay.kv.prefix_cache import PrefixCache
from kvrelay.kv.table import blocks_for_group
from kvrelay.protocol.sampling import BeamSpec, FinishReason, Sampling, ScoredText
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.scheduling.beams.beam_search import BeamSearch
from kvrelay.scheduling.plan import SequenceOutput, StepPlan, worker_batch
from kvrelay.scheduling.scheduler import make_scheduler
from kvrelay.scheduling.scheduler_settings import SchedulerLimits, SchedulerSettings
from kvrelay.scheduling.sequence import RemoteKV, Sequence, SequenceState
from kvrelay.step.batch import Candidates
from kvrelay.worker.step_loop import StepLoop
from tests.fakes.beam_oracle import Text, expected_beams, search
from tests.fakes.hash_runner import EOS_TOKEN_ID, HashRunner, expected_tokens, next_candidates
from tests.fakes.sequences import new_sequence
from tests.thoroughness import examples
from tests.unit.scheduling.bench import SCHEDULERS, SENDER

BLOCK_SIZE = 4
MAX_MODEL_LEN = 48


class World:
    """A scheduler over the hash model's pool. Every step is held against the invariants."""

    def __init__(
        self,
        num_blocks: int = 24,
        token_budget: int = 16,
        max_running: int = 8,
        cache: bool = True,
        scheduler: str = "sarathi",
        policy: SchedulerSettings | None = None,
    ) -> None:
        self.runner = HashRunner(num_blocks, BLOCK_SIZE, MAX_MODEL_LEN)
        self.pool = BlockPool(num_blocks, BLOCK_SIZE)
        kept: PrefixCache = PrefixCache(self.pool) if cache else NullCache(self.pool)
        limits = SchedulerLimits(token_budget, max_running, MAX_MODEL_LEN, frozenset({EOS_TOKEN_ID}))
        built = make_scheduler(scheduler, limits, self.pool, kept, policy or SchedulerSettings())
        self.scheduler = built
        self.results: dict[Sequence, list[ScoredText]] = {}
        self.num_copies = 0
        self._number = 0

    def fits(self, prompt: list[int], sampling: Sampling) -> bool:
        """What is refused at the door is not tried."""
        longest = min(len(prompt) + sampling.max_tokens, MAX_MODEL_LEN)
        width = sampling.beams.width if sampling.beams is not None else 1
        needed = blocks_for_group(len(prompt), longest, width, BLOCK_SIZE)
        return needed <= self.pool.num_blocks and width <= self.scheduler.limits.max_running

    def make(
        self,
        prompt: list[int],
        sampling: Sampling,
        *,
        prefill_only: bool = False,
        key: SequenceKey | None = None,
    ) -> Sequence:
        self._number += 1
        key = key or (str(self._number), 1, 0)
        sequence = new_sequence(key, prompt, sampling, BLOCK_SIZE, prefill_only=prefill_only)
        self.runner.add_sequence(sequence.key, sampling, prompt, len(prompt))
        return sequence

    def add(self, prompt: list[int], sampling: Sampling, *, prefill_only: bool = False) -> Sequence:
        sequence = self.make(prompt, sampling, prefill_only=prefill_only)
        self.scheduler.add(sequence)
        return sequence

    def adopt(self, prompt: list[int], sampling: Sampling) -> Sequence | None:
        """As a decode worker does with what prefill computed. None: no room."""
        sequence = self.make(prompt, sampling)
        scheduler = self.scheduler
        sequence.remote = RemoteKV(SENDER)
        scheduler.add(sequence)
        if sequence not in scheduler.reserve():
            scheduler.abort(sequence.key)
            return None
        positions = np.arange(len(prompt))
        blocks = sequence.table.ids[positions // BLOCK_SIZE]
        self.runner._entries[blocks, positions % BLOCK_SIZE] = np.stack([prompt, positions], axis=1)
        sequence.num_computed = len(prompt)
        assert sampling.beams is not None
        count = max(2, 1 + len(sampling.stop_token_ids) + 1) * sampling.beams.width
        output = scheduler.adopt(sequence, next_candidates(np.array(prompt, np.int32), sampling, count))
        self.take([output] if output is not None else [])
        self.check()
        return sequence

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        self.check_plan(plan)
        if plan.has_work:
            self.num_copies += len(plan.copies)
            self.take(self.scheduler.commit(plan, self.runner.execute(worker_batch(plan))))
        self.check()
        return plan

    def take(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            if output.sequence.prefill_only and output.finish is None:
                assert output.prefilled
                self.scheduler.abort(output.sequence.key)
            if output.finish is not None and output.sequence.sampling.beams is not None:
                assert output.sequence not in self.results, "finished twice"
                self.results[output.sequence] = list(output.texts)

    def run(self) -> None:
        for _ in range(4000):
            if not self.scheduler.has_work:
                break
            plan = self.step()
            assert plan.has_work or plan.preempted, f"work waits and nothing runs: {plan.held_back}"
        assert not self.scheduler.has_work
        assert self.pool.num_available == self.pool.num_blocks
        assert not self.scheduler.running
        assert not len(self.scheduler.blocks.copies)
        assert not self.scheduler.lifecycle.in_progress

    def check_plan(self, plan: StepPlan) -> None:
        sources = {copy.source for copy in plan.copies}
        targets = [copy.target for copy in plan.copies]
        assert len(sources | set(targets)) == len(sources) + len(targets)
        planned = {row.sequence for row in plan.rows}
        for sequence in plan.preempted:
            if sequence.fork_of is not None:
                assert sequence.fork_of is sequence, "a group is preempted as its leader"
                assert self.scheduler.lifecycle.forks_of(sequence) == [sequence]
                assert sequence not in planned
        written = {int(row.sequence.table.ids[row.position // BLOCK_SIZE]) for row in plan.rows}
        assert written >= set(targets), "a copy for nobody in this step"
        for row in plan.rows:
            assert row.sequence.key in self.scheduler.running

    def check(self) -> None:
        self.pool.check_integrity()
        self.scheduler.waiting.check_integrity()
        running = self.scheduler.running
        assert len(running) <= self.scheduler.lifecycle.num_slots <= self.scheduler.limits.max_running
        for leader in {s.fork_of for s in [*running.values(), *self.scheduler.waiting]} - {None}:
            assert leader is not None
            forks = self.scheduler.lifecycle.forks_of(leader)
            together = [fork.key in running for fork in forks]
            assert all(together) or not any(together), "a part of a group runs"
            assert any(together) == (leader.state is SequenceState.RUNNING)
            if not any(together):
                assert forks == [leader]
                assert not leader.table.num_blocks, "a group that waits holds something"


def check_texts(got: list[ScoredText], expected: list[Text]) -> None:
    assert [tuple(each.token_ids) for each in got] == [text.token_ids for text in expected]
    assert [each.score for each in got] == [text.score for text in expected]
    assert [each.logprob for each in got] == [float(text.logprob) for text in expected]


specs = st.builds(
    BeamSpec,
    width=st.integers(1, 5),
    num_returned=st.just(1),
    length_penalty=st.sampled_from([-0.5, 0.0, 1.0, 2.0]),
    early_stopping=st.sampled_from([True, False, "never"]),
)
searches = st.builds(
    lambda spec, max_tokens, ignore_eos: Sampling(max_tokens=max_tokens, beams=spec, ignore_eos=ignore_eos),
    specs,
    st.integers(1, 12),
    st.booleans(),
)
prompts = st.lists(st.integers(1, 2), min_size=1, max_size=20)
kinds = st.sampled_from(["beams", "beams", "adopted", "greedy", "greedy", "aborted", "prefill_only"])
arrivals = st.lists(st.tuples(kinds, prompts, searches, st.integers(0, 3)), min_size=1, max_size=10)
policies = st.builds(
    SchedulerSettings,
    chunking=st.sampled_from(["fixed", "dynamic"]),
    retraction=st.sampled_from(["latest", "least_progress"]),
    new_token_ratio=st.sampled_from([0.0, 0.3]),
)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@settings(max_examples=examples(120), deadline=None)
@given(arrivals, policies, st.integers(10, 30), st.integers(8, 24), st.integers(1, 8), st.booleans())
def test_groups_run_all_or_nothing_and_find_the_best_texts(
    scheduler: str,
    wanted: list[tuple[str, list[int], Sampling, int]],
    policy: SchedulerSettings,
    num_blocks: int,
    token_budget: int,
    max_running: int,
    cache: bool,
) -> None:
    world = World(num_blocks, token_budget, max_running, cache, scheduler, policy)
    expected: dict[Sequence, list[Text]] = {}
    greedy: dict[Sequence, list[int]] = {}
    aborted: list[Sequence] = []
    for kind, prompt, sampling, gap in wanted:
        plain = Sampling(temperature=0.0, max_tokens=sampling.max_tokens)
        if not world.fits(prompt, plain if kind == "greedy" else sampling):
            continue
        if kind == "greedy":
            greedy[world.add(prompt, plain)] = expected_tokens(prompt, plain, MAX_MODEL_LEN)
        elif kind == "adopted":
            sequence = world.adopt(prompt, sampling)
            if sequence is not None:
                expected[sequence] = expected_beams(prompt, sampling, MAX_MODEL_LEN)
        elif kind == "prefill_only":
            world.add(prompt, sampling, prefill_only=True)
        else:
            sequence = world.add(prompt, sampling)
            expected[sequence] = expected_beams(prompt, sampling, MAX_MODEL_LEN)
            if kind == "aborted":
                aborted.append(sequence)
        for _ in range(gap):
            world.step()
        if kind == "aborted" and aborted and world.scheduler.abort(aborted[-1].key):
            del expected[aborted[-1]]
    world.run()
    for sequence, texts in expected.items():
        check_texts(world.results[sequence], texts)
    for sequence, tokens in greedy.items():
        assert sequence.tokens.view(sequence.num_prompt, sequence.num_tokens).tolist() == tokens


def search_of(width: int, max_tokens: int, **rest: Any) -> Sampling:
    return Sampling(max_tokens=max_tokens, beams=BeamSpec(width=width, num_returned=width), ignore_eos=True, **rest)


NO_CANDIDATES = [
    Candidates(np.zeros(0, np.int32), np.zeros(0, np.float32)),
    Candidates(np.array([1, 2], np.int32), np.array([-0.5], np.float32)),
    Candidates(np.array([1, 2], np.int32), np.array([-0.5, np.nan], np.float32)),
]


@pytest.mark.parametrize("candidates", NO_CANDIDATES)
def test_a_handoff_with_candidates_that_are_none_is_refused_and_leaves_nothing(candidates: Candidates) -> None:
    world = World(num_blocks=16, token_budget=32)
    sequence = world.make([1] * 6, search_of(2, 8))
    world.runner.drop_sequence(sequence.key)  # the step loop adds it when it is adopted
    sequence.remote = RemoteKV(SENDER)
    world.scheduler.add(sequence)
    assert list(world.scheduler.reserve()) == [sequence]
    sequence.num_computed = 6
    with pytest.raises(ValueError, match="log-probabilities"):
        StepLoop(world.runner, world.scheduler).adopt(sequence, candidates)
    assert sequence.state is SequenceState.WAITING_FOR_REMOTE_KV
    assert world.runner.num_sequences == 0
    world.scheduler.release(sequence, 0)
    assert not world.scheduler.has_work
    assert world.pool.num_available == 16


def test_the_prompt_is_stored_once_and_its_tail_is_copied_when_it_is_written() -> None:
    world = World(num_blocks=64, token_budget=32)
    sampling = search_of(4, 8)
    world.add([1] * 18, sampling)
    world.step()
    assert world.pool.counts()[BlockState.RUNNING] == 5, "4 full blocks and a tail for four beams"
    plan = world.step()
    assert len(plan.copies) == 3, "the last of four writes in place"
    assert {copy.source for copy in plan.copies} == {plan.copies[0].source}
    assert world.pool.counts()[BlockState.RUNNING] <= 4 + 4
    world.run()


def test_a_copy_waits_for_the_step_that_writes_into_its_target() -> None:
    """A plan ahead that came to nothing left it behind. In another step nothing would keep its blocks for it."""
    world = World(num_blocks=4, scheduler="vllm")
    scheduler = world.scheduler
    beams = world.add([1, 2, 1, 2, 1], Sampling(max_tokens=4, ignore_eos=True, beams=BeamSpec(width=3, num_returned=1)))
    world.step()
    assert len(scheduler.running) == 3
    world.add([2] * BLOCK_SIZE, Sampling(temperature=0.0, max_tokens=1))
    plan = scheduler.schedule()
    assert scheduler.schedule_ahead() is None, "one block is free, and two beams are to get a copy"
    assert len(scheduler.blocks.copies) == 1
    world.take(scheduler.commit(plan, world.runner.execute(worker_batch(plan))))
    world.add([1] * BLOCK_SIZE, Sampling(temperature=0.0, max_tokens=1))
    plan = scheduler.schedule()
    world.check_plan(plan)
    assert plan.rows and not plan.copies
    scheduler.abort(beams.key)
    assert not len(scheduler.blocks.copies)
    world.take(scheduler.commit(plan, world.runner.execute(worker_batch(plan))))
    world.run()


def test_a_search_that_is_aborted_while_its_step_waits_behind_one_that_fails_ends() -> None:
    world = World(scheduler="vllm")
    beams = world.add([1, 2, 1], search_of(2, 5))
    while len(world.scheduler.running) < 2:
        world.step()
    other = world.add([1] * 5, Sampling(max_tokens=3, ignore_eos=True))
    plan = world.scheduler.schedule()
    assert [row.sequence for row in plan.rows] == [other]
    following = world.scheduler.schedule_ahead()
    assert following is not None
    assert len(following.rows) > 1
    assert world.scheduler.abort(beams.key)
    world.scheduler.cancel_plan(following)
    assert world.scheduler.fail_step(plan, {other.key}) == [other]
    assert beams.state is SequenceState.FINISHED
    assert not world.scheduler.has_work
    assert world.pool.num_available == world.pool.num_blocks


# -- the search's state against a search that is written as plainly as can be ----------------------------------------


def follow(tokens: tuple[int, ...], seed: int, vocabulary: int, count: int, levels: int) -> Candidates:
    """A distribution over a small vocabulary; few `levels` make many ties."""
    rng = np.random.default_rng([seed, *tokens])
    logprobs = -rng.integers(1, levels, vocabulary).astype(np.float32) / np.float32(8)
    best = np.lexsort((np.arange(vocabulary), -logprobs))[:count]
    return Candidates(best.astype(np.int32), logprobs[best])


@settings(max_examples=examples(400), deadline=None)
@given(
    st.integers(1, 6),
    st.integers(1, 9),
    st.sampled_from([-1.0, 0.0, 0.7, 1.0, 3.0]),
    st.sampled_from([True, False, "never"]),
    st.sets(st.integers(0, 9), max_size=3),
    st.integers(0, 1 << 30),
    st.sampled_from([3, 1000]),
    st.integers(6, 12),
)
def test_equal_to_the_plain_search(
    width: int,
    max_tokens: int,
    length_penalty: float,
    early_stopping: bool,
    ends: set[int],
    seed: int,
    levels: int,
    vocabulary: int,
) -> None:
    spec = BeamSpec(
        width=width, num_returned=max(1, width - 1), length_penalty=length_penalty, early_stopping=early_stopping
    )
    beams = BeamSearch(spec, ends, max_tokens)
    texts: list[tuple[int, ...]] = [()]
    while not beams.is_done:
        assert len(texts) == beams.num_live <= width
        beams.advance([follow(text, seed, vocabulary, beams.num_candidates, levels) for text in texts])
        if not beams.is_done:
            texts = [
                (*texts[parent], token)
                for parent, token in zip(beams.parents.tolist(), beams.tokens.tolist(), strict=True)
            ]
    expected = search(
        spec, ends, max_tokens, lambda tokens: follow(tokens, seed, vocabulary, beams.num_candidates, levels)
    )
    got = beams.results()
    assert [tuple(each.token_ids) for each in got] == [text.token_ids for text in expected]
    assert [each.score for each in got] == pytest.approx([text.score for text in expected], abs=1e-6)
    for each in got:
        assert len(each.token_ids) <= max_tokens
        assert (each.finish is FinishReason.STOP_TOKEN) == (each.token_ids[-1] in ends)
        assert each.finish is FinishReason.STOP_TOKEN or len(each.token_ids) == max_tokens


def test_a_step_that_does_not_fit_changes_nothing() -> None:
    beams = BeamSearch(BeamSpec(width=2, num_returned=2), {0}, 3)
    row = Candidates(np.array([1, 2, 3], np.int32), np.array([-1, -2, -3], np.float32))
    with pytest.raises(ValueError, match="2 rows"):
        beams.advance([row, row])
    with pytest.raises(ValueError, match="empty"):
        beams.advance([Candidates(row.token_ids[:0], row.logprobs[:0])])
    assert beams.num_tokens == 0
    beams.advance([row])
    assert beams.tokens.tolist() == [1, 2]
    with pytest.raises(ValueError, match="0 tokens"):
        BeamSearch(BeamSpec(width=2, num_returned=2), {0}, 0)
