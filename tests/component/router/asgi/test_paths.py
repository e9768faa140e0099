"""The fast path of generations and the way through FastAPI have one front: ids, key check and errors are the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from kvrelay_router.access.identity import Caller
from kvrelay_router.access.key_ring import KeyRing
from tests.component.router.rig import MODEL, Router

BODY = {"model": MODEL, "prompt": "x"}


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [("POST", "/v1/completions", BODY), ("POST", "/tokenize", {"prompt": "x"}), ("GET", "/fleet", None)],
)
async def test_the_key_of_a_request_is_checked_once(
    make_router: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, method: str, path: str, body: Any
) -> None:
    checked: list[str] = []
    check = KeyRing.check

    def noted(keys: KeyRing, headers: Mapping[str, str]) -> Caller:
        checked.append(path)
        return check(keys, headers)

    monkeypatch.setattr(KeyRing, "check", noted)
    async with make_router(api_keys=("key",)) as router:
        answer = await router.http.request(method, path, json=body, headers={"authorization": "Bearer key"})
        assert (answer.status_code, checked) == (200, [path])
        answer = await router.http.request(method, path, json=body)
        assert (answer.status_code, answer.json()["error"]["type"]) == (401, "invalid_request_error")
        assert checked == [path, path]


async def test_a_generation_route_takes_only_post(router: Router) -> None:
    answer = await router.http.get("/v1/completions", headers={"x-request-id": "mine"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (405, "method_not_allowed")
    assert (answer.headers["allow"], answer.headers["x-request-id"]) == ("POST", "mine")


@pytest.mark.parametrize("path", ["/fleet", "/requests", "/v1/models"])
async def test_an_unexpected_error_behind_fastapi_is_answered_with_the_error_object(
    router: Router, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("otter")

    for name in ("fleet", "recent_requests", "limits"):
        monkeypatch.setattr(router.dispatcher, name, fail)
    answer = await router.http.get(path, headers={"x-request-id": "mine"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    assert "otter" not in answer.text and answer.headers["x-request-id"] == "mine"
    assert (await router.http.get("/health")).status_code == 200


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/v1/completions", {"POST"}),
        ("/v1/models", {"GET", "HEAD"}),
        ("/ping", {"GET", "HEAD", "POST"}),
        ("/v1/responses/input_tokens", {"POST"}),
        ("/v1/responses/x", {"GET", "HEAD", "DELETE"}),
        ("/sessions/x", {"DELETE"}),
        ("/docs", {"GET", "HEAD"}),
    ],
)
async def test_a_wrong_method_gets_all_that_the_path_has(router: Router, path: str, allowed: set[str]) -> None:
    answer = await router.http.request("PATCH", path)
    assert answer.status_code == 405 and set(answer.headers["allow"].split(", ")) == allowed


@pytest.mark.parametrize("prefix", ["", "/llm/v2"])
async def test_a_proxys_prefix_may_be_there_or_not(make_router: Callable[..., Any], prefix: str) -> None:
    async with make_router(root_path="/llm/v2", api_keys=("key",)) as router:
        headers = {"authorization": "Bearer key"}
        answer = await router.http.post(f"{prefix}/v1/completions", json=BODY, headers=headers)
        assert answer.status_code == 200 and answer.json()["choices"]
        assert (await router.http.get(f"{prefix}/v1/models", headers=headers)).status_code == 200
        assert (await router.http.get(f"{prefix}/health")).status_code == 200
        refused = await router.http.post(f"{prefix}/v1/messages", json=BODY)
        assert (refused.status_code, refused.json()["type"]) == (401, "error")
        document = (await router.http.get(f"{prefix}/openapi.json", headers=headers)).json()
        assert document["servers"] == [{"url": "/llm/v2"}]
        assert (await router.http.get("/llm/v20/health", headers=headers)).status_code == 404


async def test_pages_ask_below_their_own_path(router: Router) -> None:
    for path in ("/dashboard", "/docs"):
        page = (await router.http.get(path)).text
        assert 'fetch("." + ' in page and "fetch(path" not in page
