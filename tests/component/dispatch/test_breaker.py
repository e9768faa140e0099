"""A worker that fails again and again gets no requests for a while; one that was sent bad requests does."""

from __future__ import annotations

import asyncio
import time

import pytest

from kvrelay.protocol.failure_kind import FailureKind
from kvrelay.protocol.messages import Failed
from kvrelay_router.dispatch.interface import RequestFailed
from kvrelay_router.dispatch.retry_budget import PROVEN_TOKENS
from tests.component.dispatch.fake_workers import true_tokens
from tests.component.dispatch.rig import Rig, pair, read, two_pairs
from tests.fakes.waiting import PATIENCE_S, until


async def breaker_of(rig: Rig, worker_id: str) -> str:
    fleet = await rig.dispatcher.fleet()
    state: str = next(each["breaker"] for each in fleet["workers"] if each["worker_id"] == worker_id)
    return state


async def test_a_failing_worker_is_left_alone_and_clients_notice_nothing(rig: Rig) -> None:
    await rig.start(*two_pairs())
    rig.workers["p0"].failure = Failed(failure=FailureKind.ENGINE_ERROR, cause="a step failed", retriable=True)
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
        assert await read(rig.submit()) == {0: true_tokens(0, 6)}
    assert await breaker_of(rig, "p0") == "closed"
    await rig.nothing_is_left()


async def test_requests_that_nobody_can_serve_open_nothing(rig: Rig) -> None:
    await rig.start(*pair())
    rig.workers["p0"].failure = Failed(failure=FailureKind.TOO_LARGE, cause="the prompt does not fit", retriable=False)
    for _ in range(10):
        with pytest.raises(RequestFailed):
            await read(rig.submit())
    assert await breaker_of(rig, "p0") == "closed"
    await rig.nothing_is_left()


async def test_a_long_stream_closes_the_breaker_before_its_end(rig: Rig) -> None:
    prefill, decode = pair()
    await rig.start(prefill, decode)
    decode.failure = prefill.failure = Failed(failure=FailureKind.ENGINE_ERROR, cause="a step failed", retriable=True)
    with pytest.raises(RequestFailed):
        await read(rig.submit())
    decode.failure = prefill.failure = None
    key = decode.worker_id, decode.messenger.me.incarnation
    breakers = rig.dispatcher._placement.breakers
    for _ in range(5):
        breakers.failed(key, time.monotonic())
    assert await breaker_of(rig, "d0") != "closed"
    early, late = decode.hold(f"token {PROVEN_TOKENS - 1}"), decode.hold(f"token {PROVEN_TOKENS + 4}")
    handle = rig.submit(max_tokens=PROVEN_TOKENS + 10)
    await early.reached.wait()
    assert await breaker_of(rig, "d0") != "closed"
    early.open.set()
    await late.reached.wait()
    async with asyncio.timeout(PATIENCE_S):
        while await breaker_of(rig, "d0") != "closed":
            await asyncio.sleep(0.01)
    late.open.set()
    assert len((await read(handle))[0]) == PROVEN_TOKENS + 10


async def test_streams_that_began_before_do_not_speak_for_a_worker_that_fails_all_new_ones(rig: Rig) -> None:
    prefill, decode = pair()
    await rig.start(prefill, decode)
    gate = decode.hold("token 40")
    handle = rig.submit(max_tokens=100)
    await until(lambda: rig.record(handle)["sequences"][0]["num_output_tokens"] == 40)
    key = decode.worker_id, decode.messenger.me.incarnation
    for _ in range(5):
        rig.dispatcher._placement.breakers.failed(key, time.monotonic())
    second = decode.hold("token 90")
    gate.open.set()
    await second.reached.wait()
    await until(lambda: rig.record(handle)["sequences"][0]["num_output_tokens"] == 90)
    assert await breaker_of(rig, "d0") != "closed"
    second.open.set()
    assert len((await read(handle))[0]) == 100
