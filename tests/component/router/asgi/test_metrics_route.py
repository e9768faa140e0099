"""/metrics on the port of the API, and errors that name several tokens."""

from __future__ import annotations

import httpx
import pytest

from kvrelay.telemetry.pages import Page
from kvrelay.text.service import TextService
from kvrelay_router.asgi.app import create_app
from kvrelay_router.openai.settings import ApiSettings
from tests.component.router.rig import MODEL, Router
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


@pytest.mark.parametrize(
    ("biases", "says"),
    [
        ({"400": 1}, "Token id 400 is"),
        ({"7": 1, "401": 1, "400": 1}, "Token ids 401, 400 are"),
        ({str(400 + number): 1 for number in range(10)}, "407 and 2 more are"),
        ({"otter": 1, "7": 1, "x": 1}, "'otter', 'x'"),
    ],
)
async def test_several_wrong_tokens_are_named(router: Router, biases: dict[str, int], says: str) -> None:
    answer = await router.post("/v1/completions", prompt="x", logit_bias=biases)
    assert answer.status_code == 400 and says in answer.json()["error"]["message"]
