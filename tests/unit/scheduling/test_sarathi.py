"""The scheduler against its invariants, over random histories."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.engine.batch import RowResult, StepResult
from kvrelay.kv.ablations import NullCache
from kvrelay.kv.cache import PrefixCache
from kvrelay.kv.hashing import root_hash
from kvrelay.kv.pool import BlockPool, Owner
from kvrelay.kv.table import BlockTable, blocks_for
from kvrelay.protocol.messages import PeerRef
from kvrelay.protocol.sampling import FinishReason, Sampling
from kvrelay.scheduling.base import SchedulerLimits
from kvrelay.scheduling.blocks import BlockManager
from kvrelay.scheduling.plan import SequenceOutput, StepPlan
from kvrelay.scheduling.sarathi import SarathiScheduler
from kvrelay.scheduling.sequence import Sequence, SequenceState, TokenBuffer

pytestmark = pytest.mark.unit
BLOCK_SIZE = 4
EOS = 0


class Bench:
    """A scheduler with a pool, and a forward that draws the next integer."""

    def __init__(self, num_blocks: int = 16, token_budget: int = 16, max_running: int = 8, cache: bool = True) -> None:
        self.pool = BlockPool(num_blocks, BLOCK_SIZE)
        self.blocks = BlockManager(self.pool, PrefixCache(self.pool) if cache else NullCache(), num_blocks * BLOCK_SIZE)
        limits = SchedulerLimits(token_budget, max_running, num_blocks * BLOCK_SIZE, frozenset({EOS}))
        self.scheduler = SarathiScheduler(limits, self.blocks)
        self.sequences: list[Sequence] = []
        self.tokens_drawn = 0

    def add(self, prompt: list[int], max_tokens: int) -> Sequence:
        sequence = Sequence(
            key=(f"r{len(self.sequences)}", 1, 0),
            tokens=TokenBuffer(np.array(prompt, np.int32)),
            num_prompt=len(prompt),
            sampling=Sampling(max_tokens=max_tokens),
            root=root_hash(model="test"),
            table=BlockTable(BLOCK_SIZE),
            router=PeerRef("router", "1", "tcp://nowhere"),
        )
        self.sequences.append(sequence)
        self.scheduler.add(sequence)
        return sequence

    def forward(self, plan: StepPlan, token_id: int | None = None) -> StepResult:
        rows = []
        for row in plan.rows:
            self.tokens_drawn += row.sample
            drawn = token_id if token_id is not None else 1 + self.tokens_drawn % 7
            rows.append(RowResult(drawn if row.sample else None))
        return StepResult(plan.step, rows, 0.0)

    def step(self) -> tuple[StepPlan, list[SequenceOutput]]:
        decoding = [s for s in self.scheduler.running.values() if s.is_decoding]
        plan = self.scheduler.schedule()
        self.check_plan(plan, decoding)
        outputs = self.scheduler.commit(plan, self.forward(plan))
        self.check_pool()
        return plan, outputs

    def check_plan(self, plan: StepPlan, decoding: list[Sequence]) -> None:
        assert plan.num_prefill_tokens + plan.num_decode_tokens <= self.scheduler.limits.token_budget
        assert [row.is_prefill for row in plan.rows] == sorted((r.is_prefill for r in plan.rows), reverse=True)
        assert max(Counter(row.sequence.key for row in plan.rows).values(), default=1) == 1
        planned = {row.sequence.key for row in plan.rows if not row.is_prefill}
        assert planned == {s.key for s in decoding} - {s.key for s in plan.preempted}, "a running decode was left out"
        for row in plan.rows:
            assert row.position == row.sequence.num_computed
            assert row.sequence.table.capacity_tokens >= row.position + row.num_tokens

    def check_pool(self) -> None:
        self.pool.check_integrity()
        running = list(self.scheduler.running.values())
        assert len(running) <= self.scheduler.limits.max_running
        held = {block for s in running for block in s.table.ids.tolist()}
        counts = self.pool.counts()
        assert counts[Owner.COMPUTING] + counts[Owner.RUNNING] == len(held)
        for sequence in running:
            assert sequence.table.num_blocks >= blocks_for(sequence.num_computed, BLOCK_SIZE)


prompts = st.lists(st.integers(1, 3), min_size=1, max_size=30)
requests = st.lists(st.tuples(prompts, st.integers(0, 20), st.integers(0, 3)), min_size=1, max_size=14)


@settings(max_examples=150, deadline=None)
@given(requests, st.integers(8, 40), st.integers(1, 8), st.booleans(), st.data())
def test_every_sequence_ends_with_all_its_tokens_and_gives_back_its_blocks(
    wanted: list[tuple[list[int], int, int]], token_budget: int, max_running: int, cache: bool, data: st.DataObject
) -> None:
    bench = Bench(16, token_budget, max_running, cache)
    finished: dict[str, FinishReason] = {}
    aborted: set[str] = set()
    for prompt, max_tokens, gap in wanted:
        sequence = bench.add(prompt, max_tokens)
        if data.draw(st.integers(0, 9)) == 0:
            bench.scheduler.abort(sequence.key)
            aborted.add(sequence.key[0])
        for _ in range(gap):
            finished |= {o.sequence.key[0]: o.finish for o in bench.step()[1] if o.finish}
    for _ in range(3000):
        if not bench.scheduler.has_work:
            break
        plan, outputs = bench.step()
        assert plan.rows, f"work waits and nothing runs: {plan.held_back}"
        finished |= {o.sequence.key[0]: o.finish for o in outputs if o.finish}
    assert set(finished) == {s.key[0] for s in bench.sequences} - aborted
    for sequence, (prompt, max_tokens, _) in zip(bench.sequences, wanted, strict=True):
        assert sequence.state is SequenceState.FINISHED
        if sequence.key[0] not in aborted:
            assert sequence.num_tokens == min(len(prompt) + max_tokens, 16 * BLOCK_SIZE)
    assert bench.pool.num_available == 16


def test_a_long_prompt_never_makes_a_decode_wait() -> None:
    bench = Bench(num_blocks=64, token_budget=8, max_running=4)
    first = bench.add([1], 40)
    bench.step()
    bench.add([2] * 150, 4)
    while first.state is not SequenceState.FINISHED:
        plan, _ = bench.step()
        assert first.key in {row.sequence.key for row in plan.rows}
        assert plan.num_prefill_tokens <= 7


def test_the_latest_arrival_is_preempted_first_and_comes_back_with_its_output() -> None:
    bench = Bench(num_blocks=6, token_budget=32, max_running=4, cache=False)
    old, young = bench.add([1] * 10, 10), bench.add([2] * 8, 10)
    preempted: list[Sequence] = []
    while bench.scheduler.has_work:
        plan, _ = bench.step()
        preempted += plan.preempted
        if plan.preempted:
            assert next(iter(bench.scheduler.waiting)) is young
    assert set(preempted) == {young}
    assert old.num_output == young.num_output == 10


def test_a_fully_cached_prompt_still_computes_its_last_token() -> None:
    bench = Bench()
    bench.add([1, 2, 3, 1, 2, 3, 1, 2], 1)
    bench.step()
    again = bench.add([1, 2, 3, 1, 2, 3, 1, 2], 1)
    plan, outputs = bench.step()
    assert [(row.position, row.num_tokens) for row in plan.rows] == [(4, 4)]
    assert again.num_cached_tokens == 4
    assert outputs[0].finish is FinishReason.LENGTH


def test_scoring_a_prompt_draws_nothing_and_reuses_nothing() -> None:
    bench = Bench()
    bench.add([1] * 9, 0)
    plan, outputs = bench.step()
    assert not plan.rows[0].sample
    assert (outputs[0].token_id, outputs[0].finish) == (None, FinishReason.LENGTH)


def test_an_abort_during_a_step_takes_effect_when_it_ends() -> None:
    bench = Bench()
    sequence = bench.add([1] * 6, 5)
    plan = bench.scheduler.schedule()
    assert bench.scheduler.abort(sequence.key)
    assert bench.pool.counts()[Owner.COMPUTING] == 2  # the forward may still write there
    assert bench.scheduler.commit(plan, bench.forward(plan)) == []
    assert bench.pool.num_available == 16
    assert not bench.scheduler.has_work


def test_a_failed_step_lets_go_of_its_sequences_only() -> None:
    bench = Bench(max_running=1)
    first, second = bench.add([1] * 6, 5), bench.add([2] * 6, 5)
    plan = bench.scheduler.schedule()
    assert bench.scheduler.fail_step(plan) == [first]
    assert bench.scheduler.get(second.key) is second
    bench.check_pool()


@pytest.mark.parametrize(
    ("token_id", "sampling", "reason"),
    [
        (EOS, Sampling(max_tokens=9), FinishReason.STOP_TOKEN),
        (EOS, Sampling(max_tokens=9, ignore_eos=True), None),
        (5, Sampling(max_tokens=9, stop_token_ids=(5,)), FinishReason.STOP_TOKEN),
        (5, Sampling(max_tokens=1), FinishReason.LENGTH),
        (5, Sampling(max_tokens=9), None),
    ],
)
def test_why_a_sequence_ends(token_id: int, sampling: Sampling, reason: FinishReason | None) -> None:
    bench = Bench()
    sequence = bench.add([1, 2], 1)
    sequence.sampling = sampling
    plan = bench.scheduler.schedule()
    (output,) = bench.scheduler.commit(plan, bench.forward(plan, token_id))
    assert output.finish is reason


@pytest.mark.parametrize(("token_budget", "max_running"), [(0, 1), (4, 0), (4, 5)])
def test_limits_that_make_no_sense_are_refused(token_budget: int, max_running: int) -> None:
    with pytest.raises(ValueError, match="max_running"):
        SchedulerLimits(token_budget, max_running, 64, frozenset())


def test_a_step_that_fails_for_one_sequence_leaves_the_others_where_they_were() -> None:
    bench = Bench()
    first, second = bench.add([1] * 6, 5), bench.add([2] * 6, 5)
    plan = bench.scheduler.schedule()
    assert bench.scheduler.fail_step(plan, {second.key}) == [second]
    assert (first.num_computed, first.num_planned) == (0, 0)
    assert [row.sequence for row in bench.step()[0].rows] == [first]
