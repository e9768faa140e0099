"""Masks and forced tokens of reasoning before a grammar, against a slow oracle that reads each output anew."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.engine.masks.matchers import AllTokens, ReasoningMatcher
from kvrelay.grammar.grammar_compiler import GrammarError
from kvrelay.protocol.sampling import Grammar, GrammarKind, ReasoningSpan
from tests.fakes.reference_compiler import ReferenceCompiler

VOCAB_SIZE = 37  # no multiple of 32, and of 64
LETTERS = {4 + index: bytes([code]) for index, code in enumerate(b"abcdefgh")}
EOS, BEGIN, END = 0, 34, 35
COMPILER = ReferenceCompiler([LETTERS.get(token_id) for token_id in range(VOCAB_SIZE)], VOCAB_SIZE, EOS)
ALL_TOKENS = np.packbits(np.arange(64) < VOCAB_SIZE, bitorder="little").view(np.int32)
GRAMMARS = [None, *(Grammar(kind=GrammarKind.REGEX, text=text) for text in ("abc", "a+b?", "(ab|cd)+", "a|bc"))]


def new_matcher(span: ReasoningSpan, grammar: Grammar | None) -> ReasoningMatcher:
    behind = AllTokens(ALL_TOKENS) if grammar is None else COMPILER.compile(grammar)
    return ReasoningMatcher(span, behind, ALL_TOKENS, [EOS])


def allowed_by(matcher: ReasoningMatcher) -> set[int]:
    mask = np.full(3, -1, np.int32)  # a tokenizer may have more tokens than the model; what was in the mask is gone
    matcher.fill(mask)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def expected(span: ReasoningSpan, grammar: Grammar | None, output: Sequence[int]) -> set[int]:
    """By the definition: what stands before and behind the first end of the reasoning."""
    if span.is_open:
        begin = 0
    elif BEGIN in output and (grammar is None or output[0] == BEGIN):
        begin = output.index(BEGIN) + 1
    elif grammar is None:
        return set(range(VOCAB_SIZE))
    else:
        return of_grammar(grammar, output) | ({BEGIN} if not output else set())
    if END in output[begin:]:
        behind = output[output.index(END, begin) + 1 :]
        return set(range(VOCAB_SIZE)) if grammar is None else of_grammar(grammar, behind)
    if span.token_budget is not None and len(output) - begin >= span.token_budget:
        return {END}
    return set(range(VOCAB_SIZE)) - (set() if grammar is None else {EOS})


def of_grammar(grammar: Grammar, output: Sequence[int]) -> set[int]:
    matcher, mask = COMPILER.compile(grammar), np.zeros(COMPILER.mask_words, np.int32)
    matcher.accept(output)
    matcher.fill(mask)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


spans = st.builds(
    ReasoningSpan,
    begin_id=st.just(BEGIN),
    end_id=st.just(END),
    is_open=st.booleans(),
    token_budget=st.none() | st.integers(0, 6),
)


@given(span=spans, grammar=st.sampled_from(GRAMMARS), data=st.data())
def test_each_mask_is_that_of_the_definition_and_forced_tokens_are_the_only_ones(
    span: ReasoningSpan, grammar: Grammar | None, data: st.DataObject
) -> None:
    matcher, output = new_matcher(span, grammar), list[int]()
    while len(output) < 14 and output[-1:] != [EOS]:
        allowed = allowed_by(matcher)
        assert allowed == expected(span, grammar, output)
        forced = [*matcher.forced()]
        if forced:
            assert allowed == {forced[0]}
        # Markers and letters, so that reasoning ends and grammars go on often enough.
        few = sorted(allowed & {EOS, BEGIN, END, *LETTERS}) or sorted(allowed)
        output.append(data.draw(st.sampled_from(few)))
        copied = matcher.copy()
        copied.accept(output[-1:])
        again = new_matcher(span, grammar)
        again.accept(output)
        if output[-1] != EOS:
            assert allowed_by(copied) == allowed_by(again)
        assert allowed_by(matcher) == allowed  # the copy goes on by itself
        matcher.accept(output[-1:])


@given(budget=st.integers(0, 5), is_open=st.booleans(), grammar=st.sampled_from(GRAMMARS))
def test_the_end_of_the_reasoning_is_forced_behind_the_budget(
    budget: int, is_open: bool, grammar: Grammar | None
) -> None:
    span = ReasoningSpan(begin_id=BEGIN, end_id=END, is_open=is_open, token_budget=budget)
    matcher = new_matcher(span, grammar)
    matcher.accept([] if is_open else [BEGIN])
    for _ in range(budget):
        assert not matcher.forced()
        matcher.accept([5])
    assert [*matcher.forced()] == [END]
    with pytest.raises(GrammarError, match="not allowed in the reasoning"):
        matcher.copy().accept([5])
    matcher.accept([END])
    assert allowed_by(matcher) == (set(range(VOCAB_SIZE)) if grammar is None else of_grammar(grammar, []))


def test_an_output_with_a_grammar_does_not_end_in_its_reasoning() -> None:
    span = ReasoningSpan(begin_id=BEGIN, end_id=END)
    matcher = new_matcher(span, GRAMMARS[1])
    matcher.accept([BEGIN, 5])
    with pytest.raises(GrammarError):
        matcher.accept([EOS])
