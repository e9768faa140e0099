"""The benchmark of the router's own code: it measures what was served, and ends where nothing was."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.router_path import FEW_TOKENS, NUM_REQUESTS, Path, Recorder, RequestFailed
from kvrelay.protocol.codec import encode_body
from kvrelay.protocol.failure_kind import FailureKind
from kvrelay.protocol.messages import Failed, Header, PeerRef
from tests.fakes.waiting import PATIENCE_S


async def test_a_round_writes_every_token_of_every_request() -> None:
    submitted_s, served_s, num_events = await asyncio.wait_for(Path().round(FEW_TOKENS), PATIENCE_S)
    assert submitted_s > 0 and served_s > 0
    assert 0 < num_events <= NUM_REQUESTS * FEW_TOKENS


async def test_a_request_that_is_refused_ends_the_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without workers no prompt is ever sent."""
    monkeypatch.setattr(Path, "_register", lambda path: None)
    with pytest.raises(RequestFailed, match="503"):
        await asyncio.wait_for(Path().round(FEW_TOKENS), PATIENCE_S)


@pytest.mark.parametrize("num_tokens_before", [0, 1])
async def test_a_request_that_fails_on_its_way_ends_the_round(
    monkeypatch: pytest.MonkeyPatch, num_tokens_before: int
) -> None:
    """Before its first token, where it gets a status, and in its stream."""
    make_messages = Path._messages

    def failing(path: Path, recorder: Recorder, num_tokens: int) -> list[tuple[PeerRef, Header, bytes]]:
        messages = make_messages(path, recorder, num_tokens)
        firsts = messages[:NUM_REQUESTS]
        failed = encode_body(Failed(failure=FailureKind.ENGINE_ERROR, cause="out of luck", retriable=False))
        failures = [(peer, header, failed) for peer, header, _ in firsts]
        return firsts * num_tokens_before + failures

    monkeypatch.setattr(Path, "_messages", failing)
    with pytest.raises(RequestFailed, match="out of luck"):
        await asyncio.wait_for(Path().round(FEW_TOKENS), PATIENCE_S)
