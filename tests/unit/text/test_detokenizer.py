"""The incremental text is the whole text however the tokens are cut, and stop strings are found across any seam."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.text.parsed_text import StopMatcher
from kvrelay.text.tokenizer import (
    MAX_WITHHELD_TOKENS,
    ByteLevelDetokenizer,
    Detokenizer,
    Tokenizer,
    WindowedDetokenizer,
    make_detokenizer,
)
from tests.fakes.text_model import byte_level_tokenizer

TEXTS = st.text(
    alphabet=st.one_of(
        st.characters(codec="utf-8"),
        st.sampled_from("otter fish. END äßé東京語日🦦🎉👩\u200d\u0301\ufe0f\ufffd \n"),
    ),
    max_size=40,
)


def in_parts(token_ids: list[int], cuts: list[int]) -> list[list[int]]:
    """The tokens cut at the given places."""
    edges = sorted({0, len(token_ids), *[cut % (len(token_ids) + 1) for cut in cuts]})
    return [token_ids[start:end] for start, end in itertools.pairwise(edges)]


def run(detokenizer: Detokenizer, parts: list[list[int]]) -> str:
    return "".join([detokenizer.feed(part) for part in parts]) + detokenizer.flush()


@given(text=TEXTS, cuts=st.lists(st.integers(0, 200)))
def test_byte_level_text_is_the_text(byte_level: Tokenizer, text: str, cuts: list[int]) -> None:
    token_ids = byte_level.encode(text, add_special_tokens=False)
    assert run(ByteLevelDetokenizer(byte_level, hidden=byte_level.special_ids), in_parts(token_ids, cuts)) == text


@given(token_ids=st.lists(st.integers(0, 410), max_size=60), cuts=st.lists(st.integers(0, 200)), skip=st.booleans())
def test_byte_level_agrees_with_the_tokenizer_on_any_tokens(
    byte_level: Tokenizer, token_ids: list[int], cuts: list[int], skip: bool
) -> None:
    """Random tokens are mostly invalid UTF-8, hold special tokens, and some are beyond the vocabulary."""
    whole = byte_level.decode(token_ids, skip_special_tokens=skip)
    assert run(make_detokenizer(byte_level, [], skip_special_tokens=skip), in_parts(token_ids, cuts)) == whole


@given(before=TEXTS, text=TEXTS, cuts=st.lists(st.integers(0, 200)))
def test_windowed_text_is_the_text_after_any_prompt(
    byte_fallback: Tokenizer, before: str, text: str, cuts: list[int]
) -> None:
    """Also where the prompt ends with bytes: decoded from within a character on, they would spoil what follows."""
    prompt = byte_fallback.encode("otter" + before, add_special_tokens=False)
    whole = byte_fallback.encode("otter" + before + text, add_special_tokens=False)
    assert whole[: len(prompt)] == prompt
    detokenizer = WindowedDetokenizer(byte_fallback, prompt, hidden=byte_fallback.special_ids)
    known = byte_fallback.decode(prompt, skip_special_tokens=True)
    expected = byte_fallback.decode(whole, skip_special_tokens=True).removeprefix(known)
    assert run(detokenizer, in_parts(whole[len(prompt) :], cuts)) == expected


@pytest.mark.parametrize("before", ["🦦東", "東🦦", "東é東", "🦦🦦", "ééé", "é東é", "東" * 50, "🦦" * 50])
def test_a_character_is_whole_after_a_prompt_of_bytes(byte_fallback: Tokenizer, before: str) -> None:
    prompt = byte_fallback.encode(before, add_special_tokens=False)
    answer = byte_fallback.encode("京🦦", add_special_tokens=False)[-7:]
    assert run(WindowedDetokenizer(byte_fallback, prompt, hidden=byte_fallback.special_ids), [answer]) == "京🦦"


@given(token_ids=st.lists(st.integers(0, 360), max_size=60), cuts=st.lists(st.integers(0, 200)))
def test_windowed_text_does_not_depend_on_the_cuts(
    byte_fallback: Tokenizer, token_ids: list[int], cuts: list[int]
) -> None:
    together = run(WindowedDetokenizer(byte_fallback, [], hidden=byte_fallback.special_ids), [token_ids])
    apart = run(WindowedDetokenizer(byte_fallback, [], hidden=byte_fallback.special_ids), in_parts(token_ids, cuts))
    assert apart == together


@pytest.mark.parametrize("char", ["é", "東", "🦦"])
def test_a_character_comes_out_only_when_its_last_byte_is_there(byte_level: Tokenizer, char: str) -> None:
    alphabet = {byte_level.token_bytes(token): token for token in range(byte_level.vocab_size)}
    byte_ids = [alphabet[bytes([byte])] for byte in char.encode()]
    detokenizer = make_detokenizer(byte_level, [], skip_special_tokens=True)
    assert [detokenizer.feed([token]) for token in byte_ids] == [""] * (len(byte_ids) - 1) + [char]


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_unfinished_bytes_end_as_a_replacement_character(kind: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    alphabet = {tokenizer.token_bytes(token): token for token in range(tokenizer.vocab_size)}
    detokenizer = make_detokenizer(tokenizer, [], skip_special_tokens=True)
    assert detokenizer.feed([alphabet[b"\xe6"], alphabet[b"\x9d"]]) == ""
    assert set(detokenizer.flush()) == {"\ufffd"}
    assert detokenizer.flush() == ""


def test_bytes_that_never_become_a_character_are_not_withheld_for_ever(byte_fallback: Tokenizer) -> None:
    alphabet = {byte_fallback.token_bytes(token): token for token in range(byte_fallback.vocab_size)}
    detokenizer = WindowedDetokenizer(byte_fallback, [], hidden=byte_fallback.special_ids)
    pieces = [detokenizer.feed([alphabet[b"\xff"]]) for _ in range(MAX_WITHHELD_TOKENS)]
    assert pieces[:-1] == [""] * (MAX_WITHHELD_TOKENS - 1)
    assert set(pieces[-1]) == {"\ufffd"}


def test_the_window_stays_small_over_tokens_without_text(byte_fallback: Tokenizer) -> None:
    """Thousands of skipped tokens would otherwise be decoded again and again."""
    (eos,) = byte_fallback.encode("</s>", add_special_tokens=False)
    detokenizer = WindowedDetokenizer(byte_fallback, [], hidden=byte_fallback.special_ids)
    assert detokenizer.feed([eos] * 1000) == ""
    assert len(detokenizer._window) <= 64


def test_special_tokens_are_shown_when_asked_for(byte_level: Tokenizer) -> None:
    (end,) = byte_level.encode("<|im_end|>", add_special_tokens=False)
    assert make_detokenizer(byte_level, [], skip_special_tokens=True).feed([end]) == ""
    assert make_detokenizer(byte_level, [], skip_special_tokens=False).feed([end]) == "<|im_end|>"


def test_no_more_tokens_are_kept_than_the_vocabulary_has() -> None:
    tokenizer = Tokenizer(byte_level_tokenizer())
    for skip in (True, False):
        detokenizer = make_detokenizer(tokenizer, [], skip_special_tokens=skip)
        detokenizer.feed(list(range(3 * tokenizer.vocab_size)))
        for token_id in range(3 * tokenizer.vocab_size):
            make_detokenizer(tokenizer, [], skip_special_tokens=skip).feed([token_id])
    visible = tokenizer.texts_without(tokenizer.special_ids)
    assert len(tokenizer.bytes_of) == len(visible.bytes_of) == tokenizer.vocab_size
    assert len(tokenizer.text_of) == len(visible.text_of) == tokenizer.vocab_size


# -- stop strings are found across any seam, and exactly what may become one is withheld -----------------------------


ALPHABET = "ab🦦\u0301"  # few letters, so that matches and near misses are frequent
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=6), min_size=1, max_size=4)
PIECES = st.lists(st.text(ALPHABET, max_size=5), max_size=20)


def oracle(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The first end of any stop string; of several that end there, the longest."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


def may_become_a_stop(text: str, stops: list[str]) -> int:
    """Length of the longest end of the text that begins a stop string."""
    return max(k for k in range(len(text) + 1) if any(stop.startswith(text[len(text) - k :]) for stop in stops))


@given(pieces=PIECES, stops=STOPS)
def test_agrees_with_a_search_of_the_whole_text(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops, include_in_output=False)
    out, matched = "", None
    for piece in pieces:
        match = matcher.feed(piece)
        out += match.text
        matched = match.matched
        if matched is not None:
            break
    if matched is None:
        out += matcher.flush()
    assert (out, matched) == oracle("".join(pieces), stops)


@given(pieces=PIECES, stops=STOPS)
def test_withholds_no_more_than_could_become_a_stop(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops, include_in_output=False)
    seen, out = "", ""
    for piece in pieces:
        match = matcher.feed(piece)
        seen, out = seen + piece, out + match.text
        if match.matched is not None:
            return
        assert out == seen[: len(seen) - may_become_a_stop(seen, stops)]


@given(pieces=PIECES, stops=STOPS)
def test_the_stop_string_is_part_of_the_text_when_asked_for(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops, include_in_output=True)
    out = ""
    for piece in pieces:
        match = matcher.feed(piece)
        out += match.text
        if match.matched is not None:
            text, stop = oracle("".join(pieces), stops)
            assert out == text + str(stop)
            return


def test_a_false_start_is_released() -> None:
    matcher = StopMatcher(["END"], include_in_output=False)
    assert matcher.feed("the EN").text == "the "
    assert matcher.feed("ERGY").text == "ENERGY"


def test_the_text_after_a_stop_is_dropped() -> None:
    match = StopMatcher(["END"], include_in_output=False).feed("the END of it")
    assert (match.text, match.matched) == ("the ", "END")


def test_long_repetitive_strings_cost_linear_time() -> None:
    """Naive matching would compare a quarter of a billion characters here."""
    matcher = StopMatcher(["a" * 5000 + "b"], include_in_output=False)
    out = "".join([matcher.feed("a" * 10).text for _ in range(2000)])
    assert len(out) == 20_000 - 5000
