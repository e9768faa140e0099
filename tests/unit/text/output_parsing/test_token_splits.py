"""Outputs from tokens to events: tokens that end within characters, and deltas of any size, change nothing."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.text.output_parsing.events import Event, OutputParser
from kvrelay.text.output_parsing.reasoning import ThinkingParser
from kvrelay.text.tokenizer import Tokenizer, byte_level_alphabet, make_detokenizer
from tests.fakes.call_families import FAMILIES, Call, Family
from tests.fakes.parsed_output import calls_of, content_of, parsed, reasoning_of
from tests.fakes.text_model import byte_level_tokenizer
from tests.thoroughness import examples

TOKENIZER = Tokenizer(byte_level_tokenizer())
CHAR_OF_BYTE = {byte: char for char, byte in byte_level_alphabet().items()}
LETTERS = st.text(st.sampled_from("aé東🦦👩‍👩‍👧\"'\\{}[]<>= \n"), max_size=12)
ARGUMENTS: Any = st.fixed_dictionaries(
    {}, optional={"city": LETTERS, "days": st.integers(-9, 9), "tags": st.lists(LETTERS, max_size=2)}
)
THOUGHT = "Hm 🦦東 </"


def tokens_of(text: str, *, as_bytes: bool) -> list[int]:
    """The tokenizer's tokens, of which some end within characters, or one for each byte."""
    if not as_bytes:
        return TOKENIZER.encode(text, add_special_tokens=False)
    ids = [TOKENIZER.backend.token_to_id(CHAR_OF_BYTE[byte]) for byte in text.encode()]
    return [token_id for token_id in ids if token_id is not None]


def texts_of(token_ids: Sequence[int], cuts: Sequence[int]) -> list[str]:
    """The texts of deltas that are cut at these places."""
    detokenizer = make_detokenizer(TOKENIZER, [], skip_special_tokens=True)
    ends = [0, *sorted(cuts), len(token_ids)]
    texts = [detokenizer.feed(list(token_ids[start:end])) for start, end in itertools.pairwise(ends)]
    return [*texts, detokenizer.flush()]


def new_parser(family: Family, *, thinks: bool) -> OutputParser:
    if not thinks:
        return family.new_parser()
    return ThinkingParser(family.new_parser(), begin="<think>", end="</think>", begins_inside=True)


def events_of(family: Family, texts: Sequence[str], *, thinks: bool) -> list[Event]:
    return parsed(lambda: new_parser(family, thinks=thinks), texts)


@settings(max_examples=examples(40), deadline=None)
@given(
    calls=st.lists(st.tuples(st.just("weather"), ARGUMENTS), min_size=1, max_size=2),
    as_bytes=st.booleans(),
    thinks=st.booleans(),
    data=st.data(),
)
@pytest.mark.parametrize("name", FAMILIES)
def test_streamed_calls_are_those_of_the_whole_text(
    name: str, calls: list[Call], as_bytes: bool, thinks: bool, data: st.DataObject
) -> None:
    family = FAMILIES[name]
    thinks = thinks and family.parser != "harmony"  # which has channels of its own
    text = f"{THOUGHT}</think>" * thinks + family.calls(calls)
    token_ids = tokens_of(text, as_bytes=as_bytes)
    whole = events_of(family, [text], thinks=thinks)
    cuts = data.draw(st.lists(st.integers(0, len(token_ids)), max_size=8))
    for places in (cuts, range(1, len(token_ids))):
        assert events_of(family, texts_of(token_ids, list(places)), thinks=thinks) == whole
    assert reasoning_of(whole) == (THOUGHT if thinks else "")
    for written, (_, arguments) in zip(calls_of(whole), calls, strict=True):
        assert json.loads(written[1]).keys() == arguments.keys()


@pytest.mark.parametrize("name", FAMILIES)
def test_an_output_that_ends_within_a_character_loses_only_its_half(name: str) -> None:
    family = FAMILIES[name]
    token_ids = tokens_of("An otter 🦦", as_bytes=True)
    for missing in (1, 2, 3):
        events = events_of(family, texts_of(token_ids[:-missing], range(1, len(token_ids) - missing)), thinks=False)
        assert content_of(events) == "An otter \ufffd" and not calls_of(events)
