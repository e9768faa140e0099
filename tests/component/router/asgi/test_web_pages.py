"""What browsers ask before and after a web page of another origin uses the API."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.component.router.rig import MODEL, Router

PAGE, OTHER = "https://chat.example", "https://other.example"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-os",
}


@pytest.mark.parametrize("allowed", [(PAGE,), ("https://one.example", PAGE), ("*",)])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_page_that_is_allowed(make_router: Callable[..., Any], allowed: tuple[str, ...], stream: bool) -> None:
    async with make_router(allowed_origins=allowed, api_keys=("secret",)) as router:
        asked = await router.http.options("/v1/chat/completions", headers={"origin": PAGE, **PREFLIGHT})
        assert asked.status_code == 200
        assert asked.headers["access-control-allow-origin"] in (PAGE, "*")
        assert "POST" in asked.headers["access-control-allow-methods"]
        assert "x-stainless-os" in asked.headers["access-control-allow-headers"]
        refused = await router.http.post("/v1/chat/completions", json=BODY, headers={"origin": PAGE})
        assert (refused.status_code, refused.headers["access-control-allow-origin"] in (PAGE, "*")) == (401, True)
        key = {"origin": PAGE, "authorization": "Bearer secret"}
        answer = await router.http.post("/v1/chat/completions", json=BODY | {"stream": stream}, headers=key)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] in (PAGE, "*")
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
        assert ("data: [DONE]" in answer.text) is stream


async def test_a_page_that_is_not_allowed(make_router: Callable[..., Any]) -> None:
    async with make_router(allowed_origins=(PAGE,)) as router:
        asked = await router.http.options("/v1/chat/completions", headers={"origin": OTHER, **PREFLIGHT})
        assert asked.status_code == 400
        assert "access-control-allow-origin" not in asked.headers
        answer = await router.http.post("/v1/chat/completions", json=BODY, headers={"origin": OTHER})
        assert "access-control-allow-origin" not in answer.headers


async def test_no_page_is_allowed_unless_it_is_said(router: Router) -> None:
    asked = await router.http.options("/v1/chat/completions", headers={"origin": PAGE, **PREFLIGHT})
    assert asked.status_code == 405
    answer = await router.http.post("/v1/chat/completions", json=BODY, headers={"origin": PAGE})
    assert answer.status_code == 200 and "access-control-allow-origin" not in answer.headers
