"""Stop strings are found across any seam, and exactly what may become one is withheld."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.text.parsed_text import StopMatcher

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
