"""Everything that is read, not generated; and many streams at once."""

from __future__ import annotations

import asyncio
import html
import json
import re
import threading
import time
from collections import Counter
from importlib.metadata import version
from typing import Any

import httpx
import pytest

from kvrelay.telemetry.pages import Page
from kvrelay.text.service import LONG_TEXT_CHARS, ChatOptions, TextService
from kvrelay.text.tokenizer import Tokenizer
from kvrelay_router.access.key_ring import AcceptedKeys, KeyRing
from kvrelay_router.asgi.app import create_app
from kvrelay_router.asgi.operations import TIMELINES_AT_ONCE
from kvrelay_router.loop_share import SLICE_S
from kvrelay_router.openai.api_service import ApiSettings
from tests.component.router.rig import MODEL, Router
from tests.fakes.scripted_dispatcher import Script, ScriptedDispatcher
from tests.fakes.waiting import PATIENCE_S

LONG = "x" * (LONG_TEXT_CHARS + 1)


async def test_models(router: Router) -> None:
    models = await router.openai.models.list()
    assert [model.id for model in models.data] == [MODEL, "alias"]
    model = await router.openai.models.retrieve("alias")
    assert (model.object, model.owned_by, model.model_dump()["max_model_len"]) == ("model", "kvrelay", 512)


@pytest.mark.parametrize("name", [MODEL, "alias"])
async def test_answers_carry_the_name_that_the_request_used(router: Router, name: str) -> None:
    create, chat = router.openai.completions.create, router.openai.chat.completions.create
    messages: list[Any] = [{"role": "user", "content": "x"}]
    assert (await create(model=name, prompt="x")).model == name
    assert {chunk.model async for chunk in await create(model=name, prompt="x", stream=True)} == {name}
    assert (await chat(model=name, messages=messages)).model == name
    assert {chunk.model async for chunk in await chat(model=name, messages=messages, stream=True)} == {name}


async def test_health_ready_version_fleet(router: Router) -> None:
    answers = {path: (await router.http.get(path)).json() for path in ("/health", "/ready", "/version", "/fleet")}
    assert answers["/fleet"].pop("time_unix_ms") / 1000 == pytest.approx(time.time(), abs=PATIENCE_S)
    assert answers == {
        "/health": {"status": "ok"},
        "/ready": {"status": "ready", "workers": {"prefill": 1, "decode": 1}},
        "/version": {"version": version("kvrelay")},
        "/fleet": {
            "workers": [],
            "memory": router.memory.as_json(),
            "model": MODEL,
            "version": version("kvrelay"),
        },
    }


async def test_the_api_is_documented(router: Router) -> None:
    document = (await router.http.get("/openapi.json")).json()
    schema = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"messages", "model", "stream", "temperature"} <= set(schema["properties"])


async def test_the_page_of_the_api_needs_nothing_from_elsewhere_and_has_every_endpoint_and_field(
    router: Router,
) -> None:
    answer = await router.http.get("/docs")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert not re.search(r"https?://|<link|src=", answer.text)
    document = (await router.http.get("/openapi.json")).json()
    for path, methods in document["paths"].items():
        for method in methods:
            assert f'data-method="{method.upper()}" data-path="{path}"' in answer.text
    fields = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    section = answer.text.partition('data-path="/v1/chat/completions"')[2].partition("</details>")[0]
    assert all(f"<code>{name}</code>" in section for name in fields["properties"])
    example = json.loads(html.unescape(section.partition('spellcheck="false">')[2].partition("</textarea>")[0]))
    assert (await router.http.post("/v1/chat/completions", json=example)).status_code == 200


async def test_tokenize_and_back(router: Router) -> None:
    tokens = router.tokens("Grüße 🦦")
    answer = (await router.http.post("/tokenize", json={"prompt": "Grüße 🦦", "return_token_strs": True})).json()
    assert (answer["tokens"], answer["count"], answer["max_model_len"]) == (tokens, len(tokens), 512)
    assert len(answer["token_strs"]) == len(tokens)
    plain = (await router.http.post("/tokenize", json={"prompt": "Grüße 🦦"})).json()
    assert plain == {**answer, "token_strs": None}
    text = (await router.http.post("/detokenize", json={"model": MODEL, "tokens": tokens})).json()
    assert text == {"prompt": "Grüße 🦦"}
    assert (await router.http.post("/tokenize", json={"prompt": ""})).json()["tokens"] == []
    assert (await router.http.post("/tokenize", json={"prompt": "x", "model": "other"})).status_code == 404


async def test_workers_are_asked_about_many_prompts_together(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    """One worker that does not answer would otherwise delay the timeline once for each prompt."""
    num_prompts = 2 * TIMELINES_AT_ONCE + 1
    answer = await router.post("/v1/completions", prompt=["x"] * num_prompts, max_tokens=1)
    assert answer.status_code == 200
    timeline, asked, num_asked = router.dispatcher.timeline, asyncio.Event(), 0

    async def answers_to_all(request_id: str, owner: str | None = None) -> dict[str, Any] | None:
        nonlocal num_asked
        num_asked += 1
        if num_asked >= TIMELINES_AT_ONCE:
            asked.set()
        await asked.wait()
        return await timeline(request_id, owner)

    monkeypatch.setattr(router.dispatcher, "timeline", answers_to_all)
    request_id = answer.json()["id"].removeprefix("cmpl-")
    found = (await router.http.get(f"/requests/{request_id}/timeline")).json()
    assert len({each["id"] for each in found["timelines"]}) == num_prompts


async def test_records_of_many_prompts_are_made_in_slices(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = await router.post("/v1/completions", prompt=["x"] * 100, max_tokens=1)
    request_id = answer.json()["id"].removeprefix("cmpl-")
    made_in: Counter[int] = Counter()
    recent, loop, turn = router.dispatcher.recent_request, asyncio.get_running_loop(), 0

    def count_turns() -> None:
        nonlocal turn
        turn += 1
        if len(found) < 100:
            loop.call_soon(count_turns)

    def take_long(name: str, owner: str | None = None) -> dict[str, Any] | None:
        time.sleep(SLICE_S / 2)
        made_in[turn] += 1
        return recent(name, owner)

    found: list[dict[str, Any]] = []
    monkeypatch.setattr(router.dispatcher, "recent_request", take_long)
    count_turns()
    found += (await router.http.get(f"/requests/{request_id}")).json()["requests"]
    assert made_in.total() == 100 and max(made_in.values()) <= 2


async def test_a_short_prompt_does_not_wait_for_long_ones(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    encode, go_on = Tokenizer.encode, threading.Event()

    def slow_if_long(tokenizer: Tokenizer, text: str, **options: Any) -> list[int]:
        if text == LONG:
            assert go_on.wait(PATIENCE_S)
        return encode(tokenizer, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", slow_if_long)
    long = [asyncio.create_task(router.text.encode(LONG, add_special_tokens=False)) for _ in range(4)]
    await asyncio.sleep(0)
    try:
        await router.text.encode("not quite so long, " * 200, add_special_tokens=False)
        assert not any(task.done() for task in long)
    finally:
        go_on.set()
        await asyncio.gather(*long)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "x", "reasoning_content": LONG},
        {"role": "user", "content": [{"type": "text", "text": LONG}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"text": [LONG]}}}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {LONG: None}}}]},
    ],
)
async def test_a_long_message_is_rendered_off_the_loop_wherever_its_length_is(
    router: Router, monkeypatch: pytest.MonkeyPatch, message: dict[str, Any]
) -> None:
    rendered_in = []

    def render(*_: Any, **__: Any) -> str:
        rendered_in.append(threading.current_thread())
        return "x"

    monkeypatch.setattr(router.text.template, "render", render)
    await router.text.encode_chat([message], ChatOptions())
    (thread,) = rendered_in
    assert thread is not threading.current_thread()


@pytest.mark.parametrize("path", ["/health", "/ping", "/ready", "/version", "/fleet", "/requests", "/v1/models"])
async def test_the_head_of_what_can_be_read(router: Router, path: str) -> None:
    whole, head = await router.http.get(path), await router.http.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == whole.headers["content-length"] == str(len(whole.content))
    assert (await router.http.head(path + "/nothing")).status_code == 404


async def test_probes_may_ping(router: Router) -> None:
    for answer in (await router.http.get("/ping"), await router.http.post("/ping")):
        assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


PAGE = Page(b"kvrelay_up 1\n", content_type="text/plain; version=0.0.4")


async def statuses(text: TextService, page: Page | None, **headers: str) -> list[tuple[int, bytes]]:
    settings = ApiSettings(model_names=(MODEL,), keys=KeyRing(AcceptedKeys(("k3y",))))
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
