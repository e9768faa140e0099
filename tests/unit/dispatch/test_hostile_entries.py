"""Entries that no correct worker sends: refused as illegal, and what was delivered stays what a client asked for."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.protocol.messages import FirstToken, TokenEntry, pack_tokens
from kvrelay.state_machine import IllegalEvent
from kvrelay_router.dispatch.events import FindDecode, FindPlacement
from tests.thoroughness import examples
from tests.unit.dispatch.attempt_events import D2, D, P, failed, need, placed
from tests.unit.dispatch.driven_sequence import AnyEvent, Deliver, FirstTokenReceived, TokensReceived
from tests.unit.protocol.message_strategies import values

pytestmark = pytest.mark.unit

MAX_TOKENS = 6
workers = st.sampled_from([P, D, D, D2])
entries: st.SearchStrategy[TokenEntry] = st.builds(
    lambda entry, index, attempt, length: msgspec.structs.replace(
        entry, index=index, attempt=attempt, token_ids=entry.token_ids[:length]
    ),
    values(TokenEntry),
    st.one_of(st.integers(0, MAX_TOKENS + 1), st.integers(-(2**63), 2**63 - 1)),
    st.one_of(st.integers(1, 2), values(int)),
    st.integers(0, 3),
)
hostile: st.SearchStrategy[Any] = st.one_of(
    st.builds(TokensReceived, workers, entries),
    st.builds(TokensReceived, st.just(D), entries),
    st.builds(FirstTokenReceived, workers, st.integers(1, 2), values(FirstToken)),
    st.just(need()),
    st.builds(failed, workers, st.integers(0, 3), retriable=st.booleans()),
)


def illegal_if_any(sequence: Any, event: AnyEvent) -> list[Any]:
    with contextlib.suppress(IllegalEvent):
        done: list[Any] = sequence.handle(event)
        return done
    return []


@settings(max_examples=examples(600), deadline=None)
@given(st.lists(hostile, min_size=1, max_size=12))
def test_hostile_entries_are_illegal_or_within_what_was_asked_for(events: list[AnyEvent]) -> None:
    sequence = placed(max_tokens=MAX_TOKENS)
    for event in events:
        for each in illegal_if_any(sequence, event):
            if isinstance(each, Deliver) and each.delta.logprobs:
                assert len(each.delta.logprobs) == len(each.delta.token_ids)
        assert len(sequence.output) <= MAX_TOKENS
        pack_tokens(sequence.output)  # the next attempt sends them


def test_tokens_beyond_the_most_end_the_attempt_and_not_the_request() -> None:
    sequence = placed(max_tokens=MAX_TOKENS)
    event = TokensReceived(D, TokenEntry(request="r", attempt=1, sequence=0, index=0, token_ids=[1] * 7))
    with pytest.raises(IllegalEvent, match="too many"):
        sequence.handle(event)
    assert not sequence.output
    done = sequence.handle(failed(D))
    assert any(isinstance(each, FindPlacement | FindDecode) for each in done)
