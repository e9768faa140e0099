"""The fast path of generations and the way through FastAPI have one front: ids, key check and errors are the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from kvrelay_router.access.identity import Caller, KeyRing
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
