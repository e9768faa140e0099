"""Sampling at the places of drafts brings the tokens, log-probabilities and states of sampling one token a step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvrelay.engine.sample.draft_rows import DraftRows
from kvrelay.engine.sample.logprobs import BadLogits
from kvrelay.engine.sample.sampler import Sampler
from kvrelay.protocol.sampling import Grammar, GrammarKind, Sampling, TokenLogprobs
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.step.batch import WorkerRow
from tests.thoroughness import examples
from tests.unit.engine.test_sampler import samplings
from tests.unit.engine.test_token_masks import END, GRAMMARS, TOKENIZER, VOCAB_SIZE, key, sampler_of

PROMPT = [5, 6, 7, 5, 6]
DIGITS = Grammar(kind=GrammarKind.REGEX, text="[0-9 ]+")
LETTERS = Grammar(kind=GrammarKind.CHOICE, text=json.dumps(["a" * 40, "a" * 30 + "b"]))
NUM_STEPS = 12


def logits_after(tokens: Sequence[int], index: int) -> torch.Tensor:
    """Peaked, so that what comes next can be guessed, and dependent on the last tokens."""
    generator = torch.Generator().manual_seed(hash((index, *tokens[-2:])) % 2**31)
    logits = torch.randn(VOCAB_SIZE, generator=generator)
    logits[torch.randint(VOCAB_SIZE, (3,), generator=generator)] += 9
    return logits


@dataclass
class Run:
    """The tokens and log-probabilities of one sequence."""

    sampling: Sampling
    index: int
    tokens: list[int] = field(default_factory=lambda: list(PROMPT))
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def key(self) -> SequenceKey:
        return key(self.index)

    @property
    def is_over(self) -> bool:
        return END in self.tokens or len(self.tokens) >= len(PROMPT) + NUM_STEPS


def one_by_one(sampling: Sampling, index: int) -> Run:
    run, sampler = Run(sampling, index), sampler_of()
    sampler.add(run.key, sampling, run.tokens, len(PROMPT))
    while not run.is_over:
        logits = logits_after(run.tokens, index)[None]
        token_ids, logprobs = sampler.begin([run.key], np.array([len(run.tokens)]), logits).land()
        run.tokens.append(int(token_ids[0]))
        run.logprobs += [entry for entry in logprobs if entry is not None]
    return run


def step(sampler: Sampler, runs: Sequence[Run], drafts: Sequence[Sequence[int]]) -> list[int]:
    """Samples for all runs at once, with drafts. Returns how many of them each accepted."""
    rows, logits = [], []
    for run, own in zip(runs, drafts, strict=True):
        token_ids = np.array([run.tokens[-1], *own], np.int32)
        block_ids = np.zeros(9, np.int32)
        rows.append(WorkerRow(run.key, token_ids, len(run.tokens) - 1, block_ids, True, False, num_drafts=len(own)))
        logits += [logits_after([*run.tokens, *own[:count]], run.index) for count in range(len(own) + 1)]
        sampler.begin_masks(run.key, own)
    places = DraftRows.of(rows, range(len(rows)))
    which = list(range(len(rows))) if places is None else places.rows.tolist()
    offsets: NDArray[np.int64] = np.zeros(len(which), np.int64) if places is None else places.offsets
    ends: NDArray[np.int64] = np.array([rows[row].position + len(rows[row].token_ids) for row in which], np.int64)
    pending = sampler.begin([rows[row].key for row in which], ends + offsets, torch.stack(logits), None, places)
    sampled, logprobs = pending.land()
    before = [len(run.tokens) for run in runs]
    for at, row in enumerate(which):
        if pending.accepted is None or pending.accepted[at]:
            runs[row].tokens.append(int(sampled[at]))
            if (entry := logprobs[at]) is not None:
                runs[row].logprobs.append(entry)
    return [len(run.tokens) - start - 1 for run, start in zip(runs, before, strict=True)]


def with_bad_words(sampling: Sampling, index: int) -> Sampling:
    """Forbids pairs and a triple of tokens that would be sampled after each other."""
    tokens = one_by_one(sampling, index).tokens[len(PROMPT) :]
    words = [tuple(tokens[at : at + 2 + (at == 4)]) for at in range(0, len(tokens) - 2, 2)]
    return msgspec.structs.replace(sampling, bad_words=tuple(words))


def num_equal(drafts: Sequence[int], tokens: Sequence[int]) -> int:
    """How many drafts there are before the first wrong one."""
    return next((at for at, draft in enumerate(drafts) if draft != tokens[at]), len(drafts))


grammars = st.sampled_from([None, None, DIGITS, LETTERS, *GRAMMARS[1:]])
wanted_rows = st.lists(st.tuples(samplings(), grammars, st.sampled_from([None, 2])), min_size=1, max_size=4)


@settings(max_examples=examples(80), deadline=None)
@given(wanted=wanted_rows, seed=st.integers(0, 2**16))
def test_the_outcome_is_that_of_one_token_a_step(
    wanted: list[tuple[Sampling, Grammar | None, int | None]], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    chosen = [msgspec.structs.replace(each, grammar=grammar, logprobs=num) for each, grammar, num in wanted]
    for index, each in enumerate(chosen):
        if each.grammar is not None or each.bad_words:  # together they may leave no token
            chosen[index] = each = msgspec.structs.replace(each, allowed_token_ids=(), bad_words=())
        if each.grammar is None and index % 2:
            chosen[index] = with_bad_words(msgspec.structs.replace(each, allowed_token_ids=()), index)
    expected = [one_by_one(each, index) for index, each in enumerate(chosen)]
    runs, sampler = [Run(each, index) for index, each in enumerate(chosen)], sampler_of()
    for run in runs:
        sampler.add(run.key, run.sampling, run.tokens, len(PROMPT))
    while live := [run for run in runs if not run.is_over]:
        drafts = []
        for run in live:
            right = expected[run.index].tokens[len(run.tokens) :]
            own = right[: int(rng.integers(0, 6))][: len(PROMPT) + NUM_STEPS - len(run.tokens) - 1]
            own = own[: own.index(END)] if END in own else own
            if own and rng.random() < 0.4:
                own[int(rng.integers(0, len(own)))] = int(rng.integers(3, 300))
            drafts.append(own)
        num_right = [
            num_equal(own, expected[run.index].tokens[len(run.tokens) :]) for run, own in zip(live, drafts, strict=True)
        ]
        assert step(sampler, live, drafts) == num_right
    for run, alone in zip(runs, expected, strict=True):
        assert run.tokens == alone.tokens
        assert [entry.token_id for entry in run.logprobs] == [entry.token_id for entry in alone.logprobs]
        for entry, other in zip(run.logprobs, alone.logprobs, strict=True):
            assert entry.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_a_draft_that_a_grammar_forbids_changes_no_penalty() -> None:
    one, two = sorted(TOKENIZER.token_to_id(digit) or 0 for digit in "12")
    sampling = Sampling(temperature=0.0, presence_penalty=2.0, grammar=DIGITS)
    sampler = sampler_of()
    sampler.add(key(0), sampling, [one, two], 2)  # both in the prompt, which has no presence penalty
    row = WorkerRow(key(0), np.array([two, END, END], np.int32), 1, np.zeros(9, np.int32), True, False, num_drafts=2)
    logits = torch.zeros(3, VOCAB_SIZE)
    logits[:, two], logits[:, one] = 1.0, 0.5
    sampler.begin_masks(key(0), [END, END])
    places = DraftRows.of([row], [0])
    pending = sampler.begin([key(0)] * 3, np.array([2, 3, 4]), logits, None, places)
    token_ids, _ = pending.land()
    assert pending.accepted is not None
    assert pending.accepted.tolist() == [True, False, False]
    assert token_ids[0] == two


def test_a_wrong_draft_with_bad_logits_behind_it_ends_the_run_and_fails_nothing() -> None:
    for bad_at, fails in ((0, True), (1, False), (2, False)):
        sampler, sampling = sampler_of(), Sampling(temperature=0.0)
        sampler.add(key(0), sampling, PROMPT, len(PROMPT))
        logits = torch.zeros(3, VOCAB_SIZE)
        logits[0, 9] = logits[1, 10] = logits[2, 11] = 1.0
        logits[bad_at, 3] = torch.nan
        row = WorkerRow(key(0), np.array([6, 9, 10], np.int32), 4, np.zeros(9, np.int32), True, False, num_drafts=2)
        places = DraftRows.of([row], [0])
        pending = sampler.begin([key(0)] * 3, np.array([5, 6, 7]), logits, None, places)
        if fails:
            with pytest.raises(BadLogits):
                pending.land()
            continue
        token_ids, _ = pending.land()
        assert pending.accepted is not None
        assert token_ids[pending.accepted].tolist() == [9, 10, 11][:bad_at]
        assert sampler.last_sampled([key(0)]).tolist() == [[9, 10, 11][bad_at - 1]]


@settings(max_examples=examples(60))
@given(st.lists(st.lists(st.integers(0, 3), max_size=5), min_size=1, max_size=6), st.data())
def test_places_are_reached_as_by_hand(drafts: list[list[int]], data: st.DataObject) -> None:
    rows = [
        WorkerRow(key(at), np.array([7, *own], np.int32), 3, np.zeros(9, np.int32), True, False, num_drafts=len(own))
        for at, own in enumerate(drafts)
    ]
    places = DraftRows.of(rows, range(len(rows)))
    if places is None:
        assert not any(drafts)
        return
    sampled = np.array(data.draw(st.lists(st.integers(0, 3), min_size=len(places.rows), max_size=len(places.rows))))
    valid = np.array(data.draw(st.lists(st.booleans(), min_size=len(places.rows), max_size=len(places.rows))))
    expected, at = [], 0
    for own in drafts:
        is_reached = True
        for depth in range(len(own) + 1):
            if depth:
                is_reached = is_reached and sampled[at - 1] == own[depth - 1] and bool(valid[at])
            expected.append(is_reached)
            at += 1
    assert places.accepted(sampled, valid).tolist() == expected
