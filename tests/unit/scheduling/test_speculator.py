"""Drafts by prompt lookup: against a search by hand, their length, and what they leave alone."""

from __future__ import annotations

from unittest.mock import patch

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvrelay.protocol.sampling import BeamSpec, Sampling, SpeculationMethod
from kvrelay.scheduling.plan import PlannedRow, StepPlan, work_of
from kvrelay.scheduling.scheduler_settings import SchedulerSettings, SpeculationSettings
from kvrelay.scheduling.sequence import Forks, Sequence, TokenBuffer
from kvrelay.scheduling.speculation.earlier_outputs import NgramIndex
from kvrelay.scheduling.speculation.speculator import (
    INDEXED_PER_STEP,
    AcceptanceRates,
    DraftLength,
    Speculator,
    kind_of,
)
from kvrelay.scheduling.step_cost import StepCost
from kvrelay.scheduling.step_planner import GUESSES_PART
from kvrelay.step.batch import RowResult, StepResult
from tests.fakes.sequences import new_sequence
from tests.thoroughness import examples
from tests.unit.scheduling.bench import BLOCK_SIZE, Bench


def longest_match(tokens: list[int], shortest: int, longest: int) -> int:
    """The length of the longest end of `tokens`, up to `longest`, that occurs earlier."""
    best = 0
    for place in range(shortest, len(tokens)):
        length = 0
        while length < min(longest, place) and tokens[place - 1 - length] == tokens[len(tokens) - 1 - length]:
            length += 1
        best = max(best, length)
    return best if best >= shortest else 0


@settings(max_examples=examples(200))
@given(
    st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=9), min_size=1, max_size=9), st.integers(1, 3), st.data()
)
def test_a_match_is_found_as_by_hand(parts: list[list[int]], shortest: int, data: st.DataObject) -> None:
    longest = data.draw(st.integers(shortest, 6))
    buffer, tokens = TokenBuffer(np.zeros(0, np.int32)), []
    index = NgramIndex(buffer, shortest, longest)
    for part in parts:
        for token in part:
            buffer.append(token)
        tokens += part
        while index.extend(data.draw(st.integers(1, 9))):
            pass
        if len(tokens) < shortest:
            continue
        assert index.is_current
        length, place = index.find()
        best = longest_match(tokens, shortest, longest)
        if not length:
            assert not best
            continue
        assert shortest <= length <= best and tokens[place - length : place] == tokens[-length:]
        if tokens.count(tokens[-1]) <= 8:  # as many places as are compared
            assert length == best
        following = [*tokens[place:], *tokens[place:] * 9][:9]
        assert index.following(place, 9).tolist() == following


def sequence_of(tokens: list[int], sampling: Sampling | None = None, *, prefill_only: bool = False) -> Sequence:
    sampling = sampling or Sampling(temperature=0.0, max_tokens=50)
    return new_sequence(("r", 1, 0), tokens, sampling, 8, prefill_only=prefill_only)


def drafter_of(method: str = "ngram", **changes: int) -> Speculator:
    return Speculator(msgspec.convert({"method": method, **changes}, SpeculationSettings))


def drafts_of(speculator: Speculator, sequence: Sequence, most: int = 16, num_sequences: int = 1) -> list[int]:
    speculator.begin_step(num_sequences, num_sequences)
    drafts = speculator.draft(sequence, most)
    speculator.measured(num_sequences, 0.0, 0.0)
    return [] if drafts is None else drafts.tolist()


def test_what_followed_the_same_tokens_is_drafted_up_to_a_stop_token() -> None:
    speculator, sequence = drafter_of(), sequence_of([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3])
    speculator.begin(sequence)
    assert drafts_of(speculator, sequence, 4) == [4, 5, 6, 7]
    assert drafts_of(speculator, sequence, 0) == []
    sequence.stop_tokens = frozenset({6})
    assert drafts_of(speculator, sequence, 4) == [4, 5]
    sequence.stop_tokens = frozenset({4})
    assert drafts_of(speculator, sequence, 4) == []


def test_requests_choose_and_some_have_no_drafts() -> None:
    plain = Sampling(temperature=0.0, max_tokens=50)
    beams = msgspec.structs.replace(plain, beams=BeamSpec(width=2, num_returned=1))
    off, ngram = (msgspec.structs.replace(plain, speculation=method) for method in ("off", "ngram"))
    for method, sampling, expected in (
        ("off", plain, False),
        ("ngram", plain, True),
        ("ngram", off, False),
        ("off", ngram, True),
        ("ngram", beams, False),
        ("ngram", msgspec.structs.replace(plain, max_tokens=1), False),
    ):
        sequence = sequence_of([1, 2, 3], sampling)
        if sampling.beams is not None:
            sequence.forks = Forks(sequence)
        speculator = drafter_of(method)
        speculator.begin(sequence)
        assert (sequence in speculator.sequences) is expected
    prefilling = sequence_of([1, 2, 3], plain, prefill_only=True)
    speculator = drafter_of()
    speculator.begin(prefilling)
    assert not speculator.sequences


def test_long_prompts_are_indexed_over_several_steps() -> None:
    tokens = [*range(1, INDEXED_PER_STEP + 500), 1, 2, 3]
    speculator, sequence = drafter_of(), sequence_of(tokens)
    speculator.begin(sequence)
    assert drafts_of(speculator, sequence, 2) == []
    assert drafts_of(speculator, sequence, 2) == [4, 5]


def test_rejected_drafts_shorten_the_next_ones_and_then_end_them() -> None:
    speculator, sequence = drafter_of(), sequence_of([1, 2, 3, *range(10, 40), 1, 2, 3])
    speculator.begin(sequence)
    first = len(drafts_of(speculator, sequence, 16))
    assert first > 1
    lengths = []
    for _ in range(300):
        drafts = drafts_of(speculator, sequence, 16)
        lengths.append(len(drafts))
        if drafts:
            speculator.verified(sequence, len(drafts), 0)
    assert lengths[0] <= first
    assert not any(lengths[50:]), "guesses that cost nothing take their place"
    for _ in range(20):
        speculator._lengths.verified(
            speculator.sequences[sequence].rates, speculator.sequences[sequence].kind, (1.0,) * 16, 16
        )
    speculator.sequences[sequence].pause.end()
    assert len(drafts_of(speculator, sequence, 16)) == 16


def append_all(sequence: Sequence, tokens: list[int]) -> None:
    for token in tokens:
        sequence.tokens.append(token)


@pytest.mark.parametrize("ahead", [False, True])
def test_right_guesses_bring_drafts_back(ahead: bool) -> None:
    """With `ahead`, steps are planned behind those in flight as long as no drafts are expected."""
    text = list(range(100, 300))
    speculator, sequence = drafter_of(), sequence_of([*text, *text[:3]])
    speculator.begin(sequence)
    for length in (3, 4, 8, 16):
        for _ in range(100):
            speculator._lengths.verified(speculator.sequences[sequence].rates, kind_of(length), (1.0,), 0)
    num_steps = 0
    while True:
        speculator.begin_step(1, 1)
        if (not ahead or speculator.expects(sequence)) and speculator.draft(sequence, 16) is not None:
            break
        num_steps += 1
        speculator.measured(1, 0.0, 0.0)
        append_all(sequence, text[sequence.num_tokens % len(text) :][:1])
    assert num_steps < 100


def test_a_long_match_is_drafted_though_short_ones_predict_nothing() -> None:
    speculator, text = drafter_of(), list(range(100, 300))
    for _ in range(60):
        wrong = sequence_of([1, 2, 3, 4, *range(10, 40), 1, 2, 3])
        speculator.begin(wrong)
        while drafts := drafts_of(speculator, wrong, 16):
            speculator.verified(wrong, len(drafts), 0)
    fresh = sequence_of([1, 2, 3, 4, *range(10, 40), 1, 2, 3])
    speculator.begin(fresh)
    assert not drafts_of(speculator, fresh)
    repeating = sequence_of([*text, *text[:16]])
    speculator.begin(repeating)
    assert drafts_of(speculator, repeating)


def test_no_step_waits_for_drafts_of_matches_that_never_go_on() -> None:
    """Matches of which none goes on bring no drafts to reject, yet the steps behind were not planned ahead."""
    speculator, sequence = drafter_of(), sequence_of([1, 2, 3])
    speculator.begin(sequence)
    waits = []
    for number in range(400):
        append_all(sequence, [1000 + number, 1, 2, 3])
        speculator.begin_step(1, 1)
        waits.append(speculator.expects(sequence))
        speculator.measured(1, 0.0, 0.0)
    assert waits[1] and not any(waits[100:])


def test_drafts_shrink_as_tokens_cost_more_of_a_step() -> None:
    own = AcceptanceRates()
    for _ in range(20):
        own[kind_of(16)].verified((1.0,) * 10, 9)
    lengths = []
    for num_sequences in (1, 4, 16, 64, 256):
        length = DraftLength()
        length.begin_step(StepCost(1e-3, 1e-4, 0.0), num_sequences, num_sequences)
        lengths.append(length.choose(own, kind_of(16), (1.0,) * 16)[0])
    assert lengths == sorted(lengths, reverse=True) and lengths[0] == 16 and lengths[-1] == 0


def test_nothing_is_looked_up_in_steps_in_which_no_drafts_pay() -> None:
    speculator, text = drafter_of(), list(range(100, 200))
    sequence = sequence_of([*text, *text[:16]])
    speculator.begin(sequence)
    with patch.object(NgramIndex, "find", side_effect=AssertionError):
        assert not drafts_of(speculator, sequence, num_sequences=256)
        assert not speculator.expects(sequence)
    assert drafts_of(speculator, sequence)


def test_many_steps_of_one_size_do_not_hide_that_a_token_costs_little() -> None:
    cost = StepCost(8e-3, 2e-5, 0.0)
    speculator, sequence = drafter_of(), sequence_of([*range(1, 60), *range(1, 20)])
    speculator.calibrate(cost)
    speculator.begin(sequence)
    for _ in range(2000):
        speculator.measured(64, 6400.0, cost.step_s(64, 0.0))
    assert drafts_of(speculator, sequence, num_sequences=64)


# -- what drafts leave to prompts and samples ------------------------------------------------------------------------


BUDGET = 32


class AsManyAsFit(Speculator):
    """Drafts whatever there is room for, once it may; all are rejected."""

    may_draft = False

    def draft(self, sequence: Sequence, most: int) -> NDArray[np.int32] | None:
        return np.full(most, 9, np.int32) if most > 0 and self.may_draft else None


def drafting_bench(num_blocks: int, max_tokens: int) -> tuple[Bench, AsManyAsFit]:
    """A sequence decodes."""
    bench, speculator = Bench(num_blocks, token_budget=BUDGET), AsManyAsFit(SpeculationSettings("ngram"))
    bench.scheduler.lifecycle.speculator = speculator
    bench.add([1, 2, 3], max_tokens)
    step(bench)
    return bench, speculator


def step(bench: Bench) -> StepPlan:
    plan = bench.scheduler.schedule()
    bench.scheduler.commit(plan, bench.forward(plan))
    bench.pool.check_integrity()
    return plan


def num_drafts(plan: StepPlan) -> int:
    return sum(len(row.guesses) for row in plan.rows if row.guesses is not None)


def test_a_prompt_does_not_wait_for_the_end_of_drafts() -> None:
    bench, speculator = drafting_bench(64, 100)
    speculator.may_draft = True
    alone = step(bench)
    assert num_drafts(alone) == BUDGET - 1
    bench.add([7] * 100, 4)
    plans = [step(bench) for _ in range(5)]
    assert sum(plan.num_prefill_tokens for plan in plans) == 100
    assert max(num_drafts(plan) for plan in plans if plan.num_prefill_tokens) == BUDGET // GUESSES_PART
    assert all(num_drafts(plan) for plan in plans)


@pytest.mark.parametrize("num_blocks", range(26, 30))
def test_drafts_leave_blocks_that_are_reserved_for_samples(num_blocks: int) -> None:
    bench, speculator = drafting_bench(num_blocks, 70)
    samples = [bench.add([7] * (20 * BLOCK_SIZE + 2), 2, sample=("g", index, 4)) for index in range(4)]
    has_reserved = False
    while any(not sample.num_output for sample in samples):
        plan = step(bench)
        speculator.may_draft = True
        assert not plan.preempted and plan.rows
        num_reserved = bench.scheduler.lifecycle.num_reserved_blocks
        assert bench.pool.num_available >= num_reserved
        has_reserved = has_reserved or num_reserved > 0
    assert has_reserved


# -- drafts end while many sequences share the steps, and come back when they are gone --------------------------------


COST = StepCost(fixed_s=1e-3, token_s=1e-4, pair_s=0.0)
PERIOD = 40
NUM_OTHERS = 48


def next_token(token: int) -> int:
    """A text that repeats."""
    return token % PERIOD + 1


class Repeating:
    """A model that goes on with that text, on a device whose steps take what `COST` says."""

    def __init__(self, method: SpeculationMethod) -> None:
        settings = SchedulerSettings(speculation=SpeculationSettings(method))
        self.bench = Bench(4000, token_budget=256, max_running=NUM_OTHERS + 1, settings=settings, cache=False)
        self.bench.scheduler.calibrate(COST)

    def add(self, num_prompt: int, max_tokens: int) -> Sequence:
        return self.bench.add([1 + at % PERIOD for at in range(num_prompt)], max_tokens)

    def step(self) -> int:
        """Returns the number of drafts."""
        plan = self.bench.scheduler.schedule()
        num_tokens, num_pairs = work_of(plan.rows)
        rows = [RowResult(sampled(row) if row.sample else ()) for row in plan.rows]
        self.bench.scheduler.commit(plan, StepResult(plan.step, rows, COST.step_s(num_tokens, num_pairs)))
        self.bench.pool.check_integrity()
        return sum(len(row.guesses) for row in plan.rows if row.guesses is not None)


def sampled(row: PlannedRow) -> tuple[int, ...]:
    """The accepted drafts and the token behind them."""
    end = row.position + row.num_tokens
    found = [next_token(int(row.sequence.tokens.view(end - 1, end)[0]))]
    for draft in () if row.guesses is None else row.guesses.tolist():
        if draft != found[-1]:
            break
        found.append(next_token(draft))
    return tuple(found)


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_drafts_end_under_load_and_come_back(method: SpeculationMethod) -> None:
    model = Repeating(method)
    first = model.add(2 * PERIOD, 100 * PERIOD)
    alone = [model.step() for _ in range(6)]
    assert alone[-1] > 0, "text that repeats has drafts"
    others = [model.add(4, 2 * PERIOD) for _ in range(NUM_OTHERS)]
    while any(not other.num_output for other in others):
        model.step()
    num_loaded = 0
    while len(model.bench.scheduler.running) == 1 + NUM_OTHERS:
        assert model.step() == 0, "each token costs its time in a step of so many sequences"
        num_loaded += 1
    assert num_loaded > PERIOD
    while len(model.bench.scheduler.running) > 1:
        model.step()
    later: list[int] = []
    while not any(later) and model.bench.scheduler.has_work:
        later.append(model.step())
    assert any(later), "drafts come back when the others are gone"
    while model.bench.scheduler.has_work:
        model.step()
    for sequence in (first, *others):
        tokens = sequence.tokens.view(0, sequence.num_tokens).tolist()
        assert tokens == [1 + at % PERIOD for at in range(len(tokens))]
        assert sequence.num_output == sequence.sampling.max_tokens
