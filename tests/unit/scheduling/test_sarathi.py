"""The scheduler against its invariants, over random histories."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.kv.pool import BlockState
from kvrelay.protocol.sampling import FinishReason, Sampling
from kvrelay.scheduling.scheduler_settings import SchedulerLimits
from kvrelay.scheduling.sequence import Sequence, SequenceState
from tests.thoroughness import examples
from tests.unit.scheduling.bench import BLOCK_SIZE, EOS, Bench, make_sequence

pytestmark = pytest.mark.unit

prompts = st.lists(st.integers(1, 3), min_size=1, max_size=30)
requests = st.lists(st.tuples(prompts, st.integers(0, 20), st.integers(0, 3)), min_size=1, max_size=14)


@settings(max_examples=examples(150), deadline=None)
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
    assert (outputs[0].token_ids, outputs[0].finish) == ((), FinishReason.LENGTH)


def test_an_abort_during_a_step_takes_effect_when_it_ends() -> None:
    bench = Bench()
    sequence = bench.add([1] * 6, 5)
    plan = bench.scheduler.schedule()
    assert bench.scheduler.abort(sequence.key)
    assert bench.pool.counts()[BlockState.COMPUTING] == 2  # the forward may still write there
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
    sequence = make_sequence([1, 2], 1, "r")
    sequence.sampling = sampling
    bench.scheduler.add(sequence)
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
