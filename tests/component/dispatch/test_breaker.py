"""A worker that fails again and again gets no requests for a while; one that was sent bad requests does."""

from __future__ import annotations

import pytest

from kvrelay.protocol.messages import Failed
from kvrelay_router.dispatch.interface import RequestFailed
from tests.component.dispatch.rig import Rig, pair, read, two_pairs


async def breaker_of(rig: Rig, worker_id: str) -> str:
    fleet = await rig.dispatcher.fleet()
    state: str = next(each["breaker"] for each in fleet["workers"] if each["worker_id"] == worker_id)
    return state


async def test_a_failing_worker_is_left_alone_and_clients_notice_nothing(rig: Rig) -> None:
    await rig.start(*two_pairs())
    rig.workers["p0"].failure = Failed(cause="a step failed", retriable=True)
    for _ in range(20):
        assert await read(rig.submit())
    assert await breaker_of(rig, "p0") == "open"
    assert await breaker_of(rig, "p1") == "closed"
    await rig.nothing_is_left()


async def test_that_no_decode_worker_takes_a_request_is_not_held_against_prefill(rig: Rig) -> None:
    prefill, decode = pair()
    decode.refusal = "it is too long"
    await rig.start(prefill, decode)
    for _ in range(3):
        with pytest.raises(RequestFailed, match="no decode worker is left"):
            await read(rig.submit())
    assert await breaker_of(rig, "p0") == "closed"
    await rig.nothing_is_left()


async def test_requests_that_nobody_can_serve_open_nothing(rig: Rig) -> None:
    await rig.start(*pair())
    rig.workers["p0"].failure = Failed(cause="the prompt does not fit", retriable=False)
    for _ in range(10):
        with pytest.raises(RequestFailed):
            await read(rig.submit())
    assert await breaker_of(rig, "p0") == "closed"
    await rig.nothing_is_left()
