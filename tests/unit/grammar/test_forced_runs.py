"""What a matcher forces depends on the output alone, not on how the output came to it: token by token, at once after a
retry, in a copy that looks behind drafts."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from kvrelay.grammar.grammar_compiler import GrammarMatcher
from kvrelay.grammar.llguidance_compiler import LLGuidanceCompiler
from kvrelay.protocol.sampling import Grammar, GrammarKind
from tests.thoroughness import examples
from tests.unit.grammar.test_llguidance_compiler import allowed

END = 0
SPLITS = {
    "words": r"'s|'t| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "digits by threes": r"'s|'t|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
"""How tokenizers cut a text before they tokenize each piece: GPT-2's way and that of Llama 3."""
PIECES = ("the total", " don't", "name", "0", "00", "12345", "--", "...", '{"a": "b"}', ' ("x")', "  ", "\n\n x", "é漢")
NUMBER = "98761234512345"  # its digits are merged in another way if its groups of three begin elsewhere


def tokenizer_of(splits: str) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(splits), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    rng = random.Random(0)
    texts = ["".join(rng.choices((*PIECES, " a", "of "), k=20)) for _ in range(800)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=800, special_tokens=["</s>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def compiler_of(tokenizer: tokenizers.Tokenizer) -> LLGuidanceCompiler:
    return LLGuidanceCompiler(tokenizer.to_str(), tokenizer.get_vocab_size(), [END])


@pytest.fixture(scope="module", params=SPLITS)
def compiler(request: pytest.FixtureRequest) -> LLGuidanceCompiler:
    return compiler_of(tokenizer_of(SPLITS[request.param]))


texts = st.lists(st.sampled_from((*PIECES, NUMBER)), min_size=1, max_size=8).map("".join)
properties = st.dictionaries(
    texts, texts.map(lambda text: {"const": text}) | st.just({"type": "integer"}), min_size=1, max_size=4
)
objects = properties.map(
    lambda found: Grammar(
        kind=GrammarKind.JSON_SCHEMA,
        text=json.dumps({"properties": found, "required": [*found], "additionalProperties": False}),
    )
)
choices = st.lists(texts, min_size=1, max_size=3, unique=True).map(
    lambda found: Grammar(kind=GrammarKind.CHOICE, text=json.dumps(found))
)


def mask_and_run(compiler: LLGuidanceCompiler, matcher: GrammarMatcher) -> tuple[list[int], list[int]]:
    mask = np.zeros(compiler.mask_words, np.int32)
    matcher.fill(mask)
    return allowed(mask), list(matcher.forced())


@settings(max_examples=examples(200))
@given(grammar=objects | choices, data=st.data())
def test_an_output_is_continued_alike_however_it_came(
    compiler: LLGuidanceCompiler, grammar: Grammar, data: st.DataObject
) -> None:
    matcher, output = compiler.compile(grammar), list[int]()
    rng = data.draw(st.randoms(use_true_random=False))
    while len(output) < 60 and END not in output:
        ids, run = here = mask_and_run(compiler, matcher)
        again, cut = compiler.compile(grammar), rng.randint(0, len(output))
        again.accept(output[:cut])
        again = again.copy()
        again.accept(output[cut:])
        assert mask_and_run(compiler, again) == here
        assert mask_and_run(compiler, matcher.copy()) == here
        new = run[: rng.randint(1, len(run))] if run and rng.random() < 0.2 else [rng.choice(ids)]
        matcher.accept(new)
        output += new


@pytest.mark.parametrize("num_before", [0, 1, 40])
def test_a_run_is_not_tokenized_anew_from_its_middle(num_before: int) -> None:
    tokenizer = tokenizer_of(SPLITS["digits by threes"])
    compiler = compiler_of(tokenizer)
    grammar = Grammar(kind=GrammarKind.REGEX, text=f"x*:{NUMBER}")
    before = tokenizer.encode("x" * num_before + ":").ids
    matcher = compiler.compile(grammar)
    matcher.accept(before)
    run, num_other = list(matcher.forced()), 0
    assert tokenizer.decode(run) == NUMBER
    for at in range(1, len(run)):
        again = compiler.compile(grammar)
        again.accept(before + run[:at])
        num_other += again._matcher.compute_ff_tokens() != run[at:]
        assert list(again.forced()) == run[at:]
    assert num_other  # the tokenizer splits the rest of this run in another way, or this shows nothing
