"""A choice's short cut for plain tokens gives the text that `feed` gives, at the same moments."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.protocol.sampling import FinishReason, TokenLogprobs
from kvrelay_router.dispatch.interface import SequenceDelta
from kvrelay_router.openai.answers.choice import Choice, StopRules
from kvrelay_router.text.detokenizer import make_detokenizer
from kvrelay_router.text.tokenizer import Tokenizer

KINDS = ["byte_level", "byte_fallback"]
EXTRAS = st.sampled_from([{}, {}, {}, {"cached_tokens": 3}, {"logprobs": True}])


def new_choice(tokenizer: Tokenizer, *, skip: bool, stop: tuple[str, ...] = ()) -> Choice:
    rules = StopRules(list(stop), frozenset(), 0, include_in_output=False)
    return Choice(0, make_detokenizer(tokenizer, [5, 6, 7], skip_special_tokens=skip), rules)


def delta_of(token_ids: list[int], extra: dict[str, object], finish: FinishReason | None) -> SequenceDelta:
    logprobs = [TokenLogprobs(token, -0.5, [], []) for token in token_ids] if "logprobs" in extra else []
    cached = 3 if "cached_tokens" in extra else None
    return SequenceDelta(0, token_ids, logprobs, [], cached, finish)


@pytest.mark.parametrize("kind", KINDS)
@given(
    token_ids=st.lists(st.integers(0, 410), min_size=1, max_size=60),
    cuts=st.lists(st.integers(0, 60)),
    extras=st.lists(EXTRAS, min_size=60, max_size=60),
    skip=st.booleans(),
    finish=st.sampled_from([FinishReason.LENGTH, FinishReason.STOP_TOKEN]),
)
def test_the_short_cut_gives_the_text_of_feed(
    request: pytest.FixtureRequest,
    kind: str,
    token_ids: list[int],
    cuts: list[int],
    extras: list[dict[str, object]],
    skip: bool,
    finish: FinishReason,
) -> None:
    """Random tokens: halves of characters, what is no UTF-8, special ones, ids beyond the vocabulary."""
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    quick, slow = new_choice(tokenizer, skip=skip), new_choice(tokenizer, skip=skip)
    edges = sorted({0, len(token_ids), *[cut for cut in cuts if cut < len(token_ids)]})
    for (start, end), extra in zip(itertools.pairwise(edges), extras, strict=False):
        delta = delta_of(token_ids[start:end], extra, finish if end == len(token_ids) else None)
        whole = slow.feed(delta)
        text = quick.next_text(delta)
        if text is None:
            text = quick.feed(delta).text
        quick.started = quick.started or bool(text)
        assert (text, quick.num_tokens, quick.finish_reason) == (whole.text, slow.num_tokens, slow.finish_reason)
    assert quick.finish_reason is not None


@pytest.mark.parametrize("kind", KINDS)
def test_plain_tokens_take_the_short_cut_once_a_choice_has_begun(request: pytest.FixtureRequest, kind: str) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    choice, stopping = new_choice(tokenizer, skip=True), new_choice(tokenizer, skip=True, stop=("END",))
    delta = SequenceDelta(0, tokenizer.encode(" otter", add_special_tokens=False))
    assert choice.next_text(delta) is None
    choice.started = stopping.started = True
    assert choice.next_text(delta) == " otter"
    assert stopping.next_text(delta) is None
