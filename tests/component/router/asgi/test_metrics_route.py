"""/metrics on the port of the API."""

from __future__ import annotations

import httpx

from kvrelay.telemetry.pages import Page
from kvrelay.text.service import TextService
from kvrelay_router.asgi.app import create_app
from kvrelay_router.openai.api_service import ApiSettings
from tests.component.router.rig import MODEL
from tests.fakes.scripted_dispatcher import Script, ScriptedDispatcher

PAGE = Page(b"kvrelay_up 1\n", content_type="text/plain; version=0.0.4")


async def statuses(text: TextService, page: Page | None, **headers: str) -> list[tuple[int, bytes]]:
    settings = ApiSettings(model_names=(MODEL,), api_keys=("k3y",))
    dispatcher = ScriptedDispatcher(lambda request, sequence: Script([]))
    app = create_app(settings, dispatcher, text, metrics_page=None if page is None else lambda: page)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as client:
        answers = [await client.request(method, "/metrics", headers=headers) for method in ("GET", "HEAD")]
    return [(answer.status_code, answer.content) for answer in answers]


async def test_metrics_are_served_if_asked_for_and_need_a_key(text: TextService) -> None:
    (got, body), (head, _) = await statuses(text, PAGE, authorization="Bearer k3y")
    assert (got, body, head) == (200, PAGE.body, 200)
    assert [status for status, _ in await statuses(text, PAGE)] == [401, 401]
    assert [status for status, _ in await statuses(text, None, authorization="Bearer k3y")] == [404, 404]
