"""What the interpreter makes of answers: text beyond what was asked for, and choices by likeliest tokens."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay_programs import EndpointError, Generated
from kvrelay_programs.interpreter import Surplus, sampling_of
from kvrelay_programs.scoring import greedy_choice, top_tokens_of

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


# -- a choice by likeliest tokens is the walk through the tree of choices that takes the likeliest b -----------------


def logprob(text: str) -> float:
    return -int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") / 2**28


def walk(choices: list[str]) -> str:
    """The oracle: each character is a token."""
    read = ""
    while read not in choices:
        nexts = {choice[len(read)] for choice in choices if choice.startswith(read)}
        read += max(nexts, key=lambda char: logprob(read + char))
    return read


@given(st.sets(st.text("abc", max_size=5), min_size=1, max_size=8))
def test_the_choice_is_that_of_a_walk_through_the_tree(words: set[str]) -> None:
    choices = [word + "." for word in sorted(words)]
    asked: list[str] = []

    async def top_tokens(begin: str) -> dict[str, float]:
        asked.append(begin)
        return {char: logprob(begin + char) for char in "abc.x"} | {"": 0.0, "abcabc": 0.0}

    selected = asyncio.run(greedy_choice(choices, top_tokens))
    assert selected.text == walk(choices)
    assert len(asked) <= len(selected.text) and (len(choices) > 1 or not asked)
    assert [score.choice for score in selected.scores] == choices
    followed = next(score for score in selected.scores if score.choice == selected.text)
    assert followed.num_tokens == len(asked)
    assert followed.total == pytest.approx(sum(logprob(selected.text[: at + 1]) for at in range(len(asked))))


@pytest.mark.parametrize("logprobs", [None, {}, {"top_logprobs": None}, {"top_logprobs": []}, {"content": []}, []])
@pytest.mark.parametrize("is_chat", [False, True])
def test_an_answer_without_alternatives(logprobs: Any, is_chat: bool) -> None:
    with pytest.raises(EndpointError, match="cannot select"):
        top_tokens_of(Generated("x", logprobs=logprobs), is_chat=is_chat)


def test_the_alternatives_of_a_chat() -> None:
    logprobs = {"content": [{"token": "a", "top_logprobs": [{"token": "a", "logprob": -1}]}]}
    assert top_tokens_of(Generated("a", logprobs=logprobs), is_chat=True) == {"a": -1.0}
