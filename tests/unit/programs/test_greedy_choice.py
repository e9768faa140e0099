"""A choice by likeliest tokens is the walk through the tree of choices that takes the likeliest branch."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay_programs import EndpointError, Generated
from kvrelay_programs.scoring import greedy_choice, top_tokens_of


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
