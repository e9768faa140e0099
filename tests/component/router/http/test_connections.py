"""What happens on the wire: headers, keys, sizes, clients that go away, failures before and after the first token."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import socket
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import openai
import pytest

from kvrelay_router.http import body
from kvrelay_router.http.http_server import bind
from tests.component.router.http.test_streams_under_load import connect, request
from tests.component.router.rig import MODEL, Router
from tests.fakes.scripted_dispatcher import Script
from tests.fakes.waiting import PATIENCE_S, until

HELLO: list[Any] = [{"role": "user", "content": "hi"}]
COMPLETION = {"model": MODEL, "prompt": "x"}


async def send_raw(router: Router, **body: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """On a bare socket, so that the test decides when the connection ends."""
    reader, writer = await connect(router)
    writer.write(request(**body))
    return reader, writer


@pytest.mark.parametrize("abrupt", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("hang_after", [0, 2])
async def test_a_client_that_goes_away_cancels_its_request(
    router: Router, stream: bool, hang_after: int, abrupt: bool
) -> None:
    """Queued or generating, streaming or not, with a proper end of the connection or a reset."""
    router.answers("An otter is a mammal.", hang_after=hang_after)
    reader, writer = await send_raw(router, stream=stream)
    await until(lambda: len(router.dispatcher.handles) == 1)
    if stream and hang_after:
        assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
    handle = router.dispatcher.handles[0]
    await asyncio.sleep(0.02)
    assert handle.cancelled_at is None
    if abrupt:
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    writer.close()
    await until(lambda: handle.cancelled_at is not None)


async def test_a_client_that_goes_away_cancels_all_its_prompts(router: Router) -> None:
    router.answers("An otter is a mammal.", hang_after=1)
    _, writer = await send_raw(router, prompt=["x", "y", "z"])
    await until(lambda: len(router.dispatcher.handles) == 3)
    writer.close()
    await until(lambda: all(handle.cancelled_at for handle in router.dispatcher.handles))


async def test_a_finished_request_is_not_cancelled(router: Router) -> None:
    await router.post("/v1/completions", prompt="x")
    assert router.dispatcher.handles[0].cancelled_at is None


async def test_the_stock_client_raises_on_an_error_event(router: Router) -> None:
    router.answers("An otter is a mammal.", fail_after=2)
    stream = await router.openai.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
    with pytest.raises(openai.APIError, match="all workers are gone"):
        [chunk async for chunk in stream]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_end_without_a_reason_is_an_error(router: Router, stream: bool) -> None:
    router.answers("otter", end_silently=True)
    answer = await router.post("/v1/completions", prompt="x", stream=stream)
    assert answer.status_code == (200 if stream else 502)
    assert "ended without a finish reason" in answer.text


@pytest.mark.parametrize("stream", [False, True])
async def test_one_failing_prompt_cancels_the_others(router: Router, stream: bool) -> None:
    bad, good = Script([5], fail_after=0), Script([5], hang_after=0)
    router.dispatcher.script = lambda request, sequence: bad if request.prompt_ids == [6] else good
    answer = await router.post("/v1/completions", prompt=[[5], [6], [7]], stream=stream)
    assert answer.status_code == 502
    assert all(handle.cancelled_at for handle in router.dispatcher.handles)


async def test_a_refusal_in_the_middle_takes_back_what_was_submitted(router: Router) -> None:
    router.answers("otter", hang_after=0)
    router.dispatcher.refuse_after = 2
    answer = await router.post("/v1/completions", prompt=["a", "b", "c"])
    assert answer.status_code == 503
    assert [handle.cancelled_at is None for handle in router.dispatcher.handles] == [False, False]


async def test_keys(make_router: Callable[..., Any]) -> None:
    async with make_router(api_keys=("key-one", "key-two")) as router:
        for header in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "key-one"},
            {"authorization": "Basic key-one"},
        ):
            for path in ("/v1/models", "/fleet", "/nothing", "/v1/completions"):
                answer = await router.http.get(path, headers=header)
                assert answer.status_code == 401, path
                assert answer.json()["error"]["type"] == "invalid_request_error"
        assert answer.headers["www-authenticate"] == "Bearer"
        for key in ("key-one", "key-two"):
            headers = {"authorization": f"Bearer {key}"}
            assert (await router.http.get("/v1/models", headers=headers)).status_code == 200
        for path in ("/health", "/ready", "/version"):
            assert (await router.http.get(path)).status_code == 200
        with pytest.raises(openai.AuthenticationError) as error:
            await router.openai.completions.create(**COMPLETION)
        assert error.value.code == "invalid_api_key"
        assert router.dispatcher.requests == []


async def test_a_body_over_the_limit_is_413_whether_declared_or_not(make_router: Callable[..., Any]) -> None:
    async with make_router(max_body_bytes=1000) as router:
        large = json.dumps({"model": MODEL, "prompt": "x" * 2000}).encode()

        async def pieces() -> AsyncIterator[bytes]:
            for start in range(0, len(large), 100):
                yield large[start : start + 100]

        for content in (large, pieces()):
            answer = await router.http.post("/v1/completions", content=content)
            assert answer.status_code == 413
            assert answer.json()["error"]["code"] == "request_too_large"
            assert answer.headers["connection"] == "close"
        assert (await router.post("/v1/completions", prompt="x" * 400)).status_code == 200


async def test_an_endless_body_is_answered_before_its_end(make_router: Callable[..., Any]) -> None:
    async with make_router(max_body_bytes=1000) as router:
        reader, writer = await connect(router)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        writer.write(b"400\r\n" + b" " * 1024 + b"\r\n")
        assert b" 413 " in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
        assert b"request_too_large" in await asyncio.wait_for(reader.read(), PATIENCE_S)
        writer.close()


async def test_a_body_that_does_not_arrive_is_408(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "BODY_TIMEOUT_S", 0.05)
    reader, writer = await connect(router)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
    answer = await asyncio.wait_for(reader.read(), PATIENCE_S)
    assert b" 408 " in answer and b"took too long" in answer
    writer.close()


async def test_a_client_that_gives_up_within_its_body_is_no_error(
    router: Router, caplog: pytest.LogCaptureFixture
) -> None:
    _, writer = await connect(router)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
    await writer.drain()
    await asyncio.sleep(0.05)
    writer.close()
    await asyncio.sleep(0.05)
    assert (await router.http.get("/health")).status_code == 200
    assert "rror" not in caplog.text


@pytest.mark.parametrize("stream", [False, True])
async def test_headers_name_the_request_and_its_workers(router: Router, stream: bool) -> None:
    answer = await router.http.post("/v1/completions", json={**COMPLETION, "stream": stream})
    assert answer.headers["x-kvrelay-prefill"] == "prefill-0"
    assert answer.headers["x-kvrelay-decode"] == "decode-0"
    request_id = answer.headers["x-request-id"]
    assert re.fullmatch("[0-9a-f]{32}", request_id)
    assert router.dispatcher.requests[0].request_id == request_id
    assert (await router.http.get(f"/requests/{request_id}")).json() == {"id": request_id}


async def test_a_clients_own_name_is_kept_and_may_come_twice(router: Router) -> None:
    for _ in range(2):
        answer = await router.http.post("/v1/completions", json=COMPLETION, headers={"x-request-id": "mine/1"})
        assert answer.headers["x-request-id"] == "mine/1"
    first, second = [each.request_id for each in router.dispatcher.requests]
    assert first != second and first.startswith("mine/1-")
    assert (await router.http.get("/requests/mine/1")).json() == {"id": second}
    assert (await router.http.get("/requests/" + answer.json()["id"])).json() == {"id": second}
    assert (await router.http.get("/requests/unknown")).status_code == 404


async def test_a_clients_own_name_may_look_like_an_answers(router: Router) -> None:
    await router.http.post("/v1/completions", json=COMPLETION, headers={"x-request-id": "cmpl-7"})
    (asked,) = router.dispatcher.requests
    assert (await router.http.get("/requests/cmpl-7")).json() == {"id": asked.request_id}
    assert (await router.http.get("/requests/7")).status_code == 404


async def test_the_requests_of_several_prompts_are_found_together(router: Router) -> None:
    answer = await router.http.post("/v1/completions", json={"model": MODEL, "prompt": ["a", "b"]})
    found = (await router.http.get("/requests/" + answer.headers["x-request-id"])).json()
    assert found == {"requests": [{"id": each.request_id} for each in router.dispatcher.requests]}


@pytest.mark.parametrize("name", ["x" * 129, "with space", "é"])
async def test_a_name_that_is_not_sane_is_replaced(router: Router, name: str) -> None:
    answer = await router.http.get("/health", headers=[(b"x-request-id", name.encode())])
    assert re.fullmatch("[0-9a-f]{32}", answer.headers["x-request-id"])


async def test_the_fleet_page_is_open_and_its_data_are_not(make_router: Callable[..., Any]) -> None:
    async with make_router(api_keys=("key-one",)) as router:
        page = await router.http.get("/dashboard")
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert 'ask("/fleet")' in page.text and 'ask("/requests")' in page.text
        for path in ("/fleet", "/requests", "/requests/any", "/requests/any/timeline"):
            assert (await router.http.get(path)).status_code == 401
            known = await router.http.get(path, headers={"authorization": "Bearer key-one"})
            assert known.status_code == (404 if "any" in path else 200)


async def test_the_latest_requests_and_the_timeline_by_the_clients_name(router: Router) -> None:
    await router.http.post("/v1/completions", json=COMPLETION, headers={"x-request-id": "mine"})
    (asked,) = router.dispatcher.requests
    listed = (await router.http.get("/requests")).json()
    assert [each["request_id"] for each in listed["requests"]] == [asked.request_id]
    for name in ("mine", asked.request_id, f"cmpl-{asked.request_id}"):
        (timeline,) = (await router.http.get(f"/requests/{name}/timeline")).json()["timelines"]
        assert timeline == {"id": asked.request_id, "events": []}


async def test_the_trace_is_taken_over_or_made(router: Router) -> None:
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    for given in (trace, "nonsense", "00-" + "0" * 32 + "-00f067aa0ba902b7-01"):
        await router.http.post("/v1/completions", json=COMPLETION, headers={"traceparent": given})
    taken, *made = [each.trace for each in router.dispatcher.requests]
    assert taken == trace
    assert all(re.fullmatch("00-[0-9a-f]{32}-[0-9a-f]{16}-00", each) for each in made)
    assert len(set(made)) == 2


async def test_stopping_lets_streams_finish(make_router: Callable[..., Any]) -> None:
    async with make_router(graceful_timeout_s=PATIENCE_S) as router:
        router.answers("An otter is a mammal.", pause_s=0.02)
        stream = await router.openai.completions.create(model=MODEL, prompt="x", stream=True)
        stopping = asyncio.create_task(router.server.stop())
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "An otter is a mammal."
        await stopping
    with pytest.raises(httpx.ConnectError):
        await httpx.AsyncClient().get(router.url + "/health")


async def test_stopping_ends_what_does_not_finish_with_an_error(router: Router) -> None:
    router.answers("An otter is a mammal.", hang_after=2)
    async with router.http.stream("POST", "/v1/completions", json={**COMPLETION, "stream": True}) as answer:
        lines = answer.aiter_lines()
        assert "choices" in await anext(lines)
        await router.server.stop()
        *_, error, done = [line for line in [line async for line in lines] if line]
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "stopping"
    assert done == "data: [DONE]"
    assert router.dispatcher.handles[0].cancelled_at is not None


async def test_a_port_in_use_is_an_error_unless_it_is_shared(router: Router) -> None:
    with pytest.raises(OSError, match="in use"):
        bind("127.0.0.1", router.server.port)
    with (
        bind("127.0.0.1", 0, reuse_port=True) as first,
        bind("127.0.0.1", first.getsockname()[1], reuse_port=True) as second,
    ):
        assert first.getsockname() == second.getsockname()


@pytest.mark.parametrize("path", ["/health", "/v1/completions"])
async def test_a_closed_connection_leaves_nothing_to_the_garbage_collector(router: Router, path: str) -> None:
    """Cycles of references would keep it, and what it refers to, until a collection."""
    gc.collect()
    gc.disable()
    try:
        if path == "/health":
            reader, writer = await connect(router)
            writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        else:
            reader, writer = await send_raw(router)
        await until(lambda: router.server._server.server_state.connections)
        kept = [weakref.ref(connection) for connection in router.server._server.server_state.connections]
        await reader.readuntil(b"ok" if path == "/health" else b"[DONE]")
        writer.close()
        await writer.wait_closed()
        await until(lambda: [each() for each in kept] == [None])
    finally:
        gc.enable()
