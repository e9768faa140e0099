"""Limits at the door over real HTTP: rate, concurrency, priorities, deadlines."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator

import pytest

from kvrelay.fleet.embedded import EmbeddedRedis
from kvrelay.fleet.key_limits import KeyLimits, SharedLimits
from kvrelay.text.service import TextService
from kvrelay_router.access.key_ring import AcceptedKeys, KeyRing, KeyRules
from kvrelay_router.dispatch.interface import GenerateRequest
from kvrelay_router.dispatch.placement import PromptPrefixes
from tests.component.router.rig import Router, running_router
from tests.fakes.scripted_dispatcher import ScriptedHandle
from tests.fakes.waiting import PATIENCE_S, until

LIMITED, FREE = "sk-limited", "sk-free"
RULES = {LIMITED: KeyRules(KeyLimits(requests_per_minute=1, burst=3, concurrency=1), least_priority=0)}


@pytest.fixture
async def guarded(text: TextService, redis_server: EmbeddedRedis) -> AsyncIterator[Router]:
    limits = SharedLimits(redis_server.url, f"test-{secrets.token_hex(4)}", "m")
    async with running_router(text, limits=limits, keys=KeyRing(AcceptedKeys((LIMITED, FREE), own=RULES))) as router:
        yield router
    await limits.close()


def key(name: str, **headers: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}"} | headers


async def ask(router: Router, headers: dict[str, str], **body: object) -> tuple[int, dict[str, object], str | None]:
    answer = await router.http.post(
        "/v1/completions", json={"model": "test-model", "prompt": "An otter", **body}, headers=headers
    )
    content = answer.json()
    return answer.status_code, content.get("error") or {}, answer.headers.get("retry-after")


async def test_a_key_beyond_its_rate_gets_429_and_when_to_come_again(guarded: Router) -> None:
    began = time.monotonic()
    statuses = [(await ask(guarded, key(LIMITED)))[0] for _ in range(4)]
    assert statuses == [200, 200, 200, 429]
    _, error, retry_after = await ask(guarded, key(LIMITED))
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert "1 requests a minute" in str(error["message"])
    assert retry_after is not None and 60 - (time.monotonic() - began) <= int(retry_after) <= 60
    assert (await ask(guarded, key(FREE)))[0] == 200


async def test_a_key_beyond_its_concurrency_gets_429_until_one_ends(guarded: Router) -> None:
    guarded.answers("An otter.", hang_after=0)
    hanging = asyncio.create_task(ask(guarded, key(LIMITED)))
    await until(lambda: len(guarded.dispatcher.handles) == 1)
    status, error, _ = await ask(guarded, key(LIMITED))
    assert status == 429 and "Concurrency" in str(error["message"])
    hanging.cancel()  # the client goes away, and with it its place
    await until(lambda: guarded.dispatcher.handles[0].cancelled_at is not None)
    guarded.answers("An otter.")
    async with asyncio.timeout(PATIENCE_S):
        while (await ask(guarded, key(LIMITED)))[0] != 200:
            await asyncio.sleep(0.01)


async def test_a_priority_beyond_the_keys_cap_is_refused_by_name(guarded: Router) -> None:
    status, error, _ = await ask(guarded, key(LIMITED), priority=-1)
    assert (status, error["param"]) == (400, "priority") and "0 or more" in str(error["message"])
    assert (await ask(guarded, key(LIMITED), priority=0))[0] == 200
    assert (await ask(guarded, key(FREE), priority=-5))[0] == 200


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "soon"])
async def test_a_timeout_that_is_none_is_refused(guarded: Router, value: str) -> None:
    status, error, _ = await ask(guarded, key(FREE, **{"x-request-timeout": value}))
    assert (status, error["param"]) == (400, "x-request-timeout")


async def test_a_requests_own_timeout_counts_up_to_the_routers(guarded: Router) -> None:
    for value, expected_s in (("2.5", 2.5), ("1e9", 600.0)):
        assert (await ask(guarded, key(FREE, **{"x-request-timeout": value})))[0] == 200
        assert guarded.dispatcher.handles[-1].request.timeout_s == expected_s


async def test_the_route_is_told_when_it_is_asked_for(guarded: Router) -> None:
    body = {"model": "test-model", "prompt": "An otter"}
    plain = await guarded.http.post("/v1/completions", json=body, headers=key(FREE))
    asked = await guarded.http.post("/v1/completions", json=body, headers=key(FREE, **{"x-kvrelay-route": "1"}))
    assert "x-kvrelay-route" not in plain.headers
    assert asked.headers["x-kvrelay-route"] == "{}"


async def test_the_routes_of_many_prompts_fit_a_header(guarded: Router) -> None:
    body = {"model": "test-model", "prompt": [f"otter {number}" for number in range(200)]}
    route = {"prefill": "p0", "decode": "d0", "reasons": ["the shortest queue"] * 5}
    handles = guarded.dispatcher.handles
    submit = guarded.dispatcher.submit

    def routed(request: GenerateRequest, prepared: PromptPrefixes | None = None) -> ScriptedHandle:
        handle = submit(request, prepared)
        handle.served_by.describe_route = lambda: route
        handle.served_by.decode = f"decode-worker-{len(handles)}"
        handle.served_by.numerics = ["1f3a9c07", "b2e8440d"][: 1 + len(handles) // 100]
        return handle

    guarded.dispatcher.submit = routed  # type: ignore[method-assign]
    answer = await guarded.http.post("/v1/completions", json=body, headers=key(FREE, **{"x-kvrelay-route": "1"}))
    *told, last = json.loads(answer.headers["x-kvrelay-route"])
    assert told and all(each == route for each in told)
    assert last == {"left_out": 200 - len(told)}
    assert len(answer.headers["x-kvrelay-route"]) <= 4096
    *names, more = answer.headers["x-kvrelay-decode"].split(", ")
    assert names[0] == "decode-worker-1" and more == f"{200 - len(names)} more"
    assert len(answer.headers["x-kvrelay-decode"]) <= 1024
    assert answer.headers["x-kvrelay-numerics"] == "1f3a9c07, b2e8440d"
