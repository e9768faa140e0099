"""Masks and forced tokens of a budget for reasoning in channels, against a slow oracle that reads each output anew."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.engine.masks.matchers import AllTokens, ChannelMatcher
from kvrelay.grammar.grammar_compiler import GrammarError, GrammarMatcher
from kvrelay.protocol.sampling import Grammar, GrammarKind, ReasoningChannels
from tests.fakes.reference_compiler import ReferenceCompiler
from tests.thoroughness import examples

VOCAB_SIZE = 37  # no multiple of 32, and of 64
EOS, CHANNEL, MESSAGE, START, STOP, ANALYSIS, FINAL, COMMENTARY, ROLE = 0, 28, 29, 30, 31, 32, 33, 34, 35
NAMES = dict(zip(range(CHANNEL, ROLE + 1), b"cmseafor", strict=True))  # the letters of a grammar stand for them
LETTERS = {4 + index: bytes([code]) for index, code in enumerate(b"xy")} | {
    token_id: bytes([code]) for token_id, code in NAMES.items()
}
COMPILER = ReferenceCompiler([LETTERS.get(token_id) for token_id in range(VOCAB_SIZE)], VOCAB_SIZE, EOS)
ALL_TOKENS = np.packbits(np.arange(64) < VOCAB_SIZE, bitorder="little").view(np.int32)
ANSWERS = Grammar(kind=GrammarKind.REGEX, text="(cam[xy]*esr)?cfm(x|y)+")
"""Reasoning or none, and an answer, as the grammars of harmony's outputs have them."""
USED_UP = {FINAL, COMMENTARY}


def channels(budget: int, *, is_open: bool = False) -> ReasoningChannels:
    return ReasoningChannels(
        channel_id=CHANNEL,
        message_id=MESSAGE,
        start_id=START,
        reasoning_id=ANALYSIS,
        answer_id=FINAL,
        other_ids=(COMMENTARY,),
        closing_ids=(STOP, START, ROLE, CHANNEL),
        is_open=is_open,
        token_budget=budget,
    )


def new_matcher(span: ReasoningChannels, grammar: Grammar | None) -> ChannelMatcher:
    return ChannelMatcher(span, AllTokens(ALL_TOKENS) if grammar is None else COMPILER.compile(grammar))


def allowed_by(matcher: GrammarMatcher) -> set[int]:
    mask = np.full(3, -1, np.int32)  # a tokenizer may have more tokens than the model; what was in the mask is gone
    matcher.fill(mask)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def messages_of(output: Sequence[int], *, is_open: bool) -> list[tuple[list[int], list[int] | None]]:
    """The header and the text of each message. The last text is None if the output ends in its header."""
    header: list[int] = [CHANNEL, ANALYSIS] if is_open else []
    text: list[int] | None = [] if is_open else None
    found: list[tuple[list[int], list[int] | None]] = []
    for token_id in output:
        if token_id in (STOP, START) or (token_id == CHANNEL and (text is not None or CHANNEL in header)):
            found.append((header, text))
            header, text = ([CHANNEL] if token_id == CHANNEL else []), None
        elif text is not None:
            text.append(token_id)
        elif token_id == MESSAGE and (CHANNEL, ANALYSIS) in itertools.pairwise(header):
            text = []
        else:
            header.append(token_id)
    return [*found, (header, text)]


def expected(span: ReasoningChannels, output: Sequence[int]) -> set[int]:
    """By the definition, for outputs without a grammar."""
    every = set(range(VOCAB_SIZE))
    messages = messages_of(output, is_open=span.is_open)
    if (CHANNEL, FINAL) in itertools.pairwise(output):
        return every
    thoughts = [text for _, text in messages if text is not None]
    if sum(map(len, thoughts)) < span.token_budget:
        return USED_UP | {ANALYSIS} if output[-1:] == [CHANNEL] else every
    # What ended a message in which the budget was used up is forced to its end.
    for num in range(len(span.closing_ids)):
        before = output[: len(output) - num]
        if list(output[len(output) - num :]) == list(span.closing_ids[:num]):
            *_, (_, text) = messages_of(before, is_open=span.is_open)
            if text is not None and sum(len(each or []) for _, each in messages_of(before, is_open=span.is_open)) == (
                span.token_budget
            ):
                return {span.closing_ids[num]}
    return USED_UP if output[-1:] == [CHANNEL] else every


@settings(max_examples=examples(300))
@given(budget=st.integers(0, 5), is_open=st.booleans(), data=st.data())
def test_each_mask_is_that_of_the_definition_and_forced_tokens_are_the_only_ones(
    budget: int, is_open: bool, data: st.DataObject
) -> None:
    span = channels(budget, is_open=is_open)
    matcher, output = new_matcher(span, None), list[int]()
    while len(output) < 24 and output[-1:] != [EOS]:
        allowed = allowed_by(matcher)
        assert allowed == expected(span, output), output
        if forced := [*matcher.forced()]:
            assert allowed == {forced[0]}
            run = matcher.copy()
            run.accept(forced)
        if matcher.allows_all:
            assert allowed == set(range(VOCAB_SIZE))
        likely = [5, CHANNEL, ANALYSIS, MESSAGE, START, STOP, COMMENTARY]
        output.append(data.draw(st.sampled_from(sorted(allowed & {*likely, EOS, FINAL, ROLE}))))
        copied, again = matcher.copy(), new_matcher(span, None)
        copied.accept(output[-1:])
        again.accept(output)
        assert allowed_by(copied) == allowed_by(again)
        assert allowed_by(matcher) == allowed  # the copy goes on by itself
        matcher.accept(output[-1:])


@given(budget=st.integers(0, 4), data=st.data())
def test_a_grammar_of_the_whole_output_is_followed_within_the_budget(budget: int, data: st.DataObject) -> None:
    matcher, output = new_matcher(channels(budget), ANSWERS), list[int]()
    free = COMPILER.compile(ANSWERS)
    while len(output) < 30 and output[-1:] != [EOS]:
        allowed = allowed_by(matcher)
        assert allowed and allowed <= allowed_by(free)
        output.append(data.draw(st.sampled_from(sorted(allowed))))
        matcher.accept(output[-1:])
        free.accept(output[-1:])
    if output[:2] == [CHANNEL, ANALYSIS] and STOP in output:
        assert budget >= 1 and output.index(STOP) - 3 <= budget


def test_a_token_that_the_budget_forbids_is_refused() -> None:
    matcher = new_matcher(channels(1), None)
    matcher.accept([CHANNEL, ANALYSIS, MESSAGE, 5])
    assert [*matcher.forced()] == [STOP, START, ROLE, CHANNEL]
    with pytest.raises(GrammarError, match="budget"):
        matcher.copy().accept([5])
    matcher.accept([STOP, START, ROLE, CHANNEL])
    assert allowed_by(matcher) == USED_UP and not matcher.forced()
    with pytest.raises(GrammarError, match="budget"):
        matcher.copy().accept([ANALYSIS])
    matcher.accept([FINAL])
    assert matcher.allows_all
