"""Text beyond what was asked for is used exactly as if it had been asked for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvrelay_programs.interpreter import Surplus, sampling_of

TOKENS = st.lists(st.text("ab.\n", min_size=1, max_size=3), max_size=12)


def surplus(tokens: list[str], *, is_complete: bool) -> Surplus:
    ends = tuple(sum(map(len, tokens[: at + 1])) for at in range(len(tokens)))
    return Surplus("".join(tokens), ends, is_complete)


def slow(tokens: list[str], stop: list[str], max_tokens: int | None) -> tuple[str, str] | None:
    """A server that generates these tokens and then ends; None if it needs more than it has."""
    text = ""
    for number, token in enumerate(tokens, start=1):
        text += token
        if found := [at for each in stop if (at := text.find(each)) >= 0]:
            return text[: min(found)], "stop"
        if number == max_tokens:
            return text, "length"
    return None


@given(TOKENS, st.lists(st.sampled_from([".", "\n", "ab", "b.", "a.b"]), max_size=2), st.none() | st.integers(1, 12))
def test_it_gives_what_a_call_with_these_limits_gives(
    tokens: list[str], stop: list[str], max_tokens: int | None
) -> None:
    for is_complete in (False, True):
        taken = surplus(tokens, is_complete=is_complete).generated(stop, max_tokens)
        expected = slow(tokens, stop, max_tokens)
        if expected is None and is_complete:
            expected = "".join(tokens), "stop"
        assert (taken and taken[:2]) == expected
        if taken is not None:
            assert taken[0] + taken[2].text == "".join(tokens)


@given(TOKENS, st.integers(0, 30), st.text("ab.", max_size=4))
def test_a_constant_is_the_next_text_or_ends_it(tokens: list[str], num_chars: int, other: str) -> None:
    whole = surplus(tokens, is_complete=False)
    constant = whole.text[:num_chars]
    left = whole.behind(constant)
    assert left is not None and constant + left.text == whole.text
    assert not left.ends or left.ends[-1] == len(left.text)
    assert (whole.behind(other) is None) == (not whole.text.startswith(other))


def test_calls_with_constraints_or_scores_are_asked_for_as_they_are() -> None:
    assert sampling_of({"max_tokens": 3, "stop": ["."], "temperature": 0}) == {"temperature": 0}
    assert sampling_of({"structured_outputs": {"regex": "a"}}) is None
    assert sampling_of({"logprobs": 2}) is None
