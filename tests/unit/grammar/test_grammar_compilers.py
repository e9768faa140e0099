"""What every implementation of `GrammarCompiler` does: the library's, and a reference in plain Python for regexes and
choices, with which the library's masks are compared."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.grammar.grammar_compiler import GrammarCompiler, GrammarError, GrammarMatcher
from kvrelay.grammar.llguidance_compiler import LLGuidanceCompiler
from kvrelay.protocol.sampling import Grammar, GrammarKind
from kvrelay.text.tokenizer import Tokenizer
from tests.fakes.reference_compiler import ReferenceCompiler
from tests.unit.grammar.test_llguidance_compiler import (
    END,
    PATTERNS,
    TOKENIZER,
    TOKENIZER_JSON,
    VOCAB_SIZE,
    allowed,
    walk,
)

IMPLEMENTATIONS = ["llguidance", "reference"]
PIECES = st.sampled_from(["a", "b", "the", "é", "[a-c]", "[^a-z]", r"\d", r"\w", ".", "(ab|a)", "(x|yz){2}"])
REGEXES = st.lists(
    st.tuples(PIECES, st.sampled_from(["", "", "?", "*", "+", "{2,4}"])).map(lambda each: f"(?:{each[0]}){each[1]}"),
    min_size=1,
    max_size=5,
).map("".join)
CHOICES = st.lists(st.text(min_size=1, max_size=12), min_size=1, max_size=5)
GRAMMARS = REGEXES.map(lambda text: Grammar(kind=GrammarKind.REGEX, text=text)) | CHOICES.map(
    lambda choices: Grammar(kind=GrammarKind.CHOICE, text=json.dumps(choices))
)


@pytest.fixture(scope="module")
def compilers() -> dict[str, GrammarCompiler]:
    tokenizer = Tokenizer(TOKENIZER)
    special = {id_ for id_, token in TOKENIZER.get_added_tokens_decoder().items() if token.special}
    spelled = [None if each in special else tokenizer.token_bytes(each) for each in range(TOKENIZER.get_vocab_size())]
    return {
        "llguidance": LLGuidanceCompiler(TOKENIZER_JSON, VOCAB_SIZE, [END]),
        "reference": ReferenceCompiler(spelled, VOCAB_SIZE, END),
    }


@pytest.fixture(params=IMPLEMENTATIONS)
def compiler(request: pytest.FixtureRequest, compilers: dict[str, GrammarCompiler]) -> GrammarCompiler:
    return compilers[request.param]


def mask_of(compiler: GrammarCompiler, matcher: GrammarMatcher) -> list[int]:
    mask = np.zeros(compiler.mask_words, np.int32)
    matcher.fill(mask)
    return allowed(mask)


def test_masks_are_as_long_as_the_vocabulary(compiler: GrammarCompiler) -> None:
    assert compiler.mask_words == (VOCAB_SIZE + 31) // 32


@pytest.mark.parametrize("pattern", PATTERNS)
def test_texts_match_their_regex(compiler: GrammarCompiler, pattern: str) -> None:
    for seed in range(8):
        text = walk(compiler, Grammar(kind=GrammarKind.REGEX, text=pattern), seed)
        assert text is None or re.fullmatch(pattern, text, re.ASCII)


@pytest.mark.parametrize("choices", [["yes", "no", "not now"], ["naïve 名", "na", 'a "quoted" one'], ["\n"]])
def test_an_output_is_one_of_the_choices(compiler: GrammarCompiler, choices: list[str]) -> None:
    grammar = Grammar(kind=GrammarKind.CHOICE, text=json.dumps(choices))
    assert {walk(compiler, grammar, seed) for seed in range(20)} <= {*choices}


def test_a_token_that_is_not_allowed_is_an_error(compiler: GrammarCompiler) -> None:
    matcher = compiler.compile(Grammar(kind=GrammarKind.REGEX, text="[0-9]+"))
    with pytest.raises(GrammarError):
        matcher.accept(TOKENIZER.encode("x", add_special_tokens=False).ids)


def test_a_malformed_regex_is_an_error(compiler: GrammarCompiler) -> None:
    with pytest.raises(GrammarError):
        compiler.compile(Grammar(kind=GrammarKind.REGEX, text="(a"))


def test_only_the_end_follows_a_complete_output(compiler: GrammarCompiler) -> None:
    matcher = compiler.compile(Grammar(kind=GrammarKind.CHOICE, text='["no"]'))
    matcher.accept(TOKENIZER.encode("no", add_special_tokens=False).ids)
    assert mask_of(compiler, matcher) == list(matcher.forced()) == [END]
    matcher.accept([END])
    assert mask_of(compiler, matcher) == [END] and not matcher.forced()


def test_a_copy_and_a_matcher_that_is_given_the_output_go_on_alike(compiler: GrammarCompiler) -> None:
    grammar = Grammar(kind=GrammarKind.REGEX, text="(otter|heron)s? [0-9]{1,9}")
    output = TOKENIZER.encode("herons 123", add_special_tokens=False).ids
    matcher = compiler.compile(grammar)
    for at, token_id in enumerate(output):
        again, copied = compiler.compile(grammar), matcher.copy()
        again.accept(output[:at])
        here = mask_of(compiler, matcher)
        assert token_id in here
        matcher.accept([token_id])
        assert mask_of(compiler, again) == mask_of(compiler, copied) == here


@given(grammar=GRAMMARS, data=st.data())
def test_the_library_allows_what_the_reference_allows(
    compilers: dict[str, GrammarCompiler], grammar: Grammar, data: st.DataObject
) -> None:
    """Where tokens are forced, the library allows only the tokenizer's own."""
    library, reference = compilers["llguidance"], compilers["reference"]
    matcher, oracle = library.compile(grammar), reference.compile(grammar)
    for _ in range(12):
        found, expected = mask_of(library, matcher), mask_of(reference, oracle)
        assert found and {*found} <= {*expected}
        if not matcher.forced():
            assert found == expected
        token_id = data.draw(st.sampled_from(found))
        if token_id == END:
            return
        matcher.accept([token_id])
        oracle.accept([token_id])
