"""Every failure of every endpoint has the error form of its API: OpenAI's object, or that of Anthropic's Messages."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from kvrelay.protocol.failure_kind import FailureKind
from kvrelay_router.dispatch.interface import RequestFailed, TooLate
from kvrelay_router.openai.delivery import _FAILURES
from tests.component.router.rig import MODEL, Router
from tests.fakes.scripted_dispatcher import Script
from tests.fakes.waiting import until

HELLO: list[Any] = [{"role": "user", "content": "otter"}]
GENERATIONS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "otter"},
    "/v1/chat/completions": {"messages": HELLO},
    "/invocations": {"messages": HELLO},
    "/v1/messages": {"messages": HELLO, "max_tokens": 8},
    "/v1/responses": {"input": "otter"},
}
BODIES: dict[str, dict[str, Any]] = GENERATIONS | {
    "/v1/chat/completions/batch": {"messages": [HELLO]},
    "/v1/messages/count_tokens": {"messages": HELLO},
    "/v1/responses/input_tokens": {"input": "otter"},
    "/v1/select": {"prompt": "otter", "choices": [" x"]},
    "/generative_scoring": {"query": "otter", "items": [" x"], "label_token_ids": [1]},
    "/tokenize": {"prompt": "otter"},
    "/detokenize": {"tokens": [1]},
}
ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    499: "invalid_request_error",
    500: "api_error",
    504: "timeout_error",
    529: "overloaded_error",
}
"""https://platform.claude.com/docs/en/api/errors; statuses that it lacks have the type of their class."""
OF_ANTHROPIC = {502: 500, 503: 529}

NO_OBJECTS = (b"", b"{", b"[]", b'"x"', b"null", b'{"a": NaN}', b'{"a": 1e999}', b"\xff\xfe", b"[" * 5000)

every_endpoint = pytest.mark.parametrize("path", BODIES)
every_generation = pytest.mark.parametrize("path", GENERATIONS)
streamed_or_not = pytest.mark.parametrize("stream", [False, True])


def check_error(path: str, answer: httpx.Response, status: int, code: str | None) -> None:
    """The whole error, in the form of the path's API. `status` and `code` are OpenAI's."""
    assert answer.headers["content-type"] == "application/json", answer.text
    assert answer.headers["x-request-id"]
    if path.startswith("/v1/messages"):
        status = OF_ANTHROPIC.get(status, status)
        assert answer.status_code == status, answer.text
        check_anthropic(answer.json(), ANTHROPIC_TYPES[status])
        assert answer.headers["request-id"] == answer.headers["x-request-id"]
        return
    assert answer.status_code == status, answer.text
    check_openai(answer.json(), status, code)


def check_anthropic(body: Any, kind: str) -> None:
    assert set(body) == {"type", "error"} and body["type"] == "error"
    assert set(body["error"]) == {"type", "message"}
    assert body["error"]["type"] == kind and body["error"]["message"]


def check_openai(body: Any, status: int, code: str | None) -> None:
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and error["code"] == code, error
    kind = "server_error" if status >= 500 or status == 499 else "invalid_request_error"
    assert error["type"] == ("rate_limit_error" if status == 429 else kind)


@every_endpoint
async def test_what_is_no_json_object(router: Router, path: str) -> None:
    for body in NO_OBJECTS:
        check_error(path, await router.http.post(path, content=body), 400, "invalid_json")


@every_endpoint
async def test_a_field_of_a_wrong_type(router: Router, path: str) -> None:
    for name in BODIES[path]:
        answer = await router.post(path, **{**BODIES[path], name: {"otter": 1}})
        assert router.dispatcher.requests == []
        code = None if path.startswith("/v1/messages") else answer.json()["error"]["code"]
        assert code in (None, "invalid_type", "invalid_value", "missing_required_parameter")
        check_error(path, answer, 400, code)


@every_endpoint
async def test_an_unknown_model(router: Router, path: str) -> None:
    answer = await router.http.post(path, json={"model": "otter-7b", **BODIES[path]})
    check_error(path, answer, 404, "model_not_found")


@every_endpoint
async def test_a_wrong_method_and_an_unknown_path(router: Router, path: str) -> None:
    check_error(path, await router.http.put(path, json=BODIES[path]), 405, "method_not_allowed")
    check_error(path, await router.http.post(f"{path}/otter/otter", json=BODIES[path]), 404, "unknown_url")


@every_endpoint
async def test_no_key_and_a_wrong_one(make_router: Callable[..., Any], path: str) -> None:
    async with make_router(api_keys=("key",)) as router:
        for headers, code in (({}, None), ({"authorization": "Bearer otter"}, "invalid_api_key")):
            answer = await router.http.post(path, json={"model": MODEL, **BODIES[path]}, headers=headers)
            check_error(path, answer, 401, code)
        assert router.dispatcher.requests == []


@every_endpoint
async def test_a_body_that_is_too_large_or_compressed(make_router: Callable[..., Any], path: str) -> None:
    async with make_router(max_body_bytes=2000) as router:
        check_error(path, await router.post(path, **BODIES[path], padding="x" * 2000), 413, "request_too_large")
        headers = {"content-encoding": "gzip"}
        answer = await router.http.post(path, content=b"x", headers=headers)
        check_error(path, answer, 415, "unsupported_encoding")
        assert "gzip" in answer.text


@every_generation
@streamed_or_not
async def test_no_worker_is_ready(router: Router, path: str, stream: bool) -> None:
    router.dispatcher.is_ready = False
    answer = await router.post(path, **GENERATIONS[path], stream=stream)
    check_error(path, answer, 503, "no_worker_ready")
    assert answer.headers["retry-after"] == "3"
    assert (await router.http.get("/ready")).status_code == 503
    router.dispatcher.model_limits = None
    answer = await router.post(path, **GENERATIONS[path], stream=stream)
    check_error(path, answer, 503, "no_worker_ready")
    assert answer.headers["retry-after"] == "1"


@every_generation
@streamed_or_not
async def test_every_failure_before_the_first_token(router: Router, path: str, stream: bool) -> None:
    for kind in FailureKind:
        status, code = _FAILURES[kind]
        router.answers("An otter", fail_after=0, failure=RequestFailed("otter", kind))
        check_error(path, await router.post(path, **GENERATIONS[path], stream=stream), status, code)


@every_generation
async def test_a_bad_timeout(router: Router, path: str) -> None:
    body = {"model": MODEL, **GENERATIONS[path]}
    answer = await router.http.post(path, json=body, headers={"x-request-timeout": "otter"})
    check_error(path, answer, 400, "invalid_value")


@every_generation
@pytest.mark.parametrize("session", ["an otter", "x" * 129, "otter\u00e9"])
async def test_a_bad_session(router: Router, path: str, session: str) -> None:
    body = {"model": MODEL, **GENERATIONS[path]}
    answer = await router.http.post(path, json=body, headers={b"x-kvrelay-session": session.encode("latin-1")})
    check_error(path, answer, 400, "invalid_value")
    assert "x-kvrelay-session" in answer.text and not router.dispatcher.handles


@every_generation
@streamed_or_not
async def test_an_unexpected_error(
    router: Router, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, path: str, stream: bool
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("a secret")

    monkeypatch.setattr(router.dispatcher, "submit", fail)
    answer = await router.post(path, **GENERATIONS[path], stream=stream)
    check_error(path, answer, 500, "internal_error")
    assert "secret" not in answer.text and "a secret" in caplog.text


@every_generation
@streamed_or_not
async def test_a_deadline_that_cannot_be_met(
    router: Router, monkeypatch: pytest.MonkeyPatch, path: str, stream: bool
) -> None:
    def refuse(*_: object) -> None:
        raise TooLate(expected_s=9.0, deadline_s=5.0)

    monkeypatch.setattr(router.dispatcher, "submit", refuse)
    answer = await router.post(path, **GENERATIONS[path], stream=stream)
    check_error(path, answer, 429, "deadline_unreachable")
    assert answer.headers["retry-after"] == "4"


@every_generation
async def test_too_many_requests(make_router: Callable[..., Any], path: str) -> None:
    resume = asyncio.Event()
    async with make_router(max_requests=1) as router:
        held = Script(router.tokens("otter"), hang_after=0, resume=resume)
        router.dispatcher.script = lambda request, sequence: held
        first = asyncio.create_task(router.post(path, **GENERATIONS[path]))
        await until(lambda: bool(router.dispatcher.requests))
        answer = await router.post(path, **GENERATIONS[path])
        check_error(path, answer, 429, "rate_limit_exceeded")
        assert answer.headers["retry-after"] == "1"
        resume.set()
        assert (await first).status_code == 200


@every_generation
async def test_a_failure_within_a_stream(router: Router, path: str) -> None:
    router.answers("An otter is a mammal", fail_after=2, failure=RequestFailed("otter", FailureKind.WORKER_LOST))
    answer = await router.post(path, **GENERATIONS[path], stream=True)
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
    assert router.dispatcher.handles[0].cancelled_at is not None
    events = [
        line.removeprefix("data: ")
        for line in answer.text.splitlines()
        if line.startswith("data: ") and line != "data: [DONE]"
    ]
    last = json.loads(events[-1])
    if path == "/v1/messages":
        check_anthropic(last, "api_error")
        assert "\nevent: error\n" in answer.text and "[DONE]" not in answer.text
    elif path == "/v1/responses":
        assert last["type"] == "response.failed" and "[DONE]" not in answer.text
        assert last["response"]["error"] == {"code": "worker_lost", "message": "otter"}
    else:
        check_openai(last, 502, "worker_lost")
        assert answer.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_a_response_that_is_not_stored(router: Router, method: str) -> None:
    answer = await router.http.request(method, "/v1/responses/resp_otter")
    check_error("/v1/responses", answer, 404, "response_not_found")
