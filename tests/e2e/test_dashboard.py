"""The fleet page and a request's timeline, from real processes; in a headless browser where there is one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import pytest

from scripts.browser import Browser, find_chromium
from tests.fakes.stack import Stack
from tests.fakes.waiting import PATIENCE_S

pytestmark = pytest.mark.slow
DEMO_MODEL = Path(__file__).parents[2] / "models" / "demo"
CHROMIUM = find_chromium() or ""
CHARTS = ("decode-tokens", "prefill-tokens", "running", "held")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    path = tmp_path_factory.mktemp("dashboard")
    with Stack(DEMO_MODEL, path, "--dtype", "float32", "--token-budget", "64", "--max-running", "16") as stack:
        yield stack


@pytest.fixture(scope="module")
def request_id(stack: Stack) -> str:
    """Of a request with several chunks, that is over."""
    body = {"model": stack.model, "prompt": [7] * 150, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    answer = stack.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    stack.wait_until_clean()
    found: str = answer.headers["x-request-id"]
    return found


class Resources(HTMLParser):
    """What a page would load from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if name in ("src", "srcset", "action")]
        self.found += [value or "" for name, value in attrs if name == "href" and tag != "a"]


def test_the_page_needs_nothing_from_elsewhere(stack: Stack) -> None:
    answer = httpx.get(f"{stack.base_url}/dashboard")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    resources = Resources()
    resources.feed(answer.text)
    assert resources.found == []
    assert not re.search(r"https?://|innerHTML|insertAdjacentHTML|document\.write", answer.text)


def test_a_timeline_tells_where_the_time_went(stack: Stack, request_id: str) -> None:
    (timeline,) = stack.http.get(f"/requests/{request_id}/timeline").json()["timelines"]
    assert timeline["state"] == "finished"
    assert timeline["workers_answered"] == timeline["workers_asked"] == ["decode-0", "prefill-0"]
    events: list[dict[str, Any]] = timeline["events"]
    assert [event["start_ms"] for event in events] == sorted(event["start_ms"] for event in events)
    by_name = {(event["lane"], event["name"]): event for event in events}
    assert {"attempt", "first token"} <= {name for lane, name in by_name if lane == "router"}
    assert {name for lane, name in by_name if lane == "prefill-0"} >= {"queue", "chunk", "slots", "transfer"}
    assert {name for lane, name in by_name if lane == "decode-0"} >= {"slots", "transfer", "decode"}
    chunks = [event for event in events if event["name"] == "chunk"]
    assert sum(chunk["detail"]["tokens"] for chunk in chunks) == 150 and len(chunks) == 3
    assert by_name["decode-0", "decode"]["detail"]["tokens"] == 11
    assert by_name["prefill-0", "transfer"]["detail"]["blocks"] == 10
    assert all(event["end_ms"] is not None and event["end_ms"] >= event["start_ms"] for event in events)


def test_the_latest_requests_are_listed_and_measured(stack: Stack, request_id: str) -> None:
    listed = stack.http.get("/requests").json()["requests"]
    (found,) = [each for each in listed if each["request_id"] == request_id]
    assert (found["num_prompt_tokens"], found["num_output_tokens"], found["num_attempts"]) == (150, 12, 1)
    fleet = stack.fleet()
    assert fleet["latency"]["requests"] >= 1
    assert set(fleet["latency"]["ttft_ms"]) == set(fleet["latency"]["tpot_ms"]) == {"p50", "p90", "p99"}
    assert fleet["cache"]["prompt_tokens"] >= 150


def test_a_request_that_nobody_knows_has_no_timeline(stack: Stack) -> None:
    answer = stack.http.get("/requests/unheard-of/timeline")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "request_not_found")


@pytest.mark.skipif(not CHROMIUM, reason="no Chromium here")
def test_a_browser_shows_the_fleet_and_the_timeline(stack: Stack, request_id: str) -> None:
    with Browser(CHROMIUM) as browser:
        browser.open(f"{stack.base_url}/dashboard#request={request_id}")
        browser.wait_for("document.querySelector('td.timeline #events tr')", PATIENCE_S)
        for name in CHARTS:
            points = f"document.querySelector('#chart-{name} polyline')?.getAttribute('points').split(' ').length"
            browser.wait_for(f"{points} >= 3", PATIENCE_S)
        shown = browser.markup()
        assert 'id="tile-constrained"' not in shown
        body = {"model": stack.model, "prompt": "An otter is", "structured_outputs": {"choice": [" small", " large"]}}
        assert stack.http.post("/v1/completions", json=body).status_code == 200
        browser.wait_for("document.querySelector('#tile-constrained b')?.innerText >= 1", PATIENCE_S)
    for worker in ("prefill-0", "decode-0"):
        assert f'id="worker-{worker}"' in shown
    assert re.search(r'id="tile-ttft">.*?<b>[\d.]+ m?s / ', shown, re.DOTALL)
    assert re.search(r'id="tile-hits">.*?<b>[\d.]+ %', shown, re.DOTALL)
    assert re.search(r'id="tile-handoff">.*?<b>[\d.]+ [GM]B/s', shown, re.DOTALL)
    assert f'<b id="model">{stack.model}</b>' in shown and f'id="version" class="quiet">{version("kvrelay")}<' in shown
    for name in CHARTS:
        assert re.search(rf'id="chart-{name}">.*?<polyline points="[\d., ]+"', shown, re.DOTALL), name
    assert f"Request {request_id}, finished" in shown
    row = shown.index('<tr class="chosen">')
    assert request_id in shown[row:] and shown.index('<section id="timeline"') > row, "it opens under its row"
    assert shown.index('<section id="timeline"') < shown.index("</tbody>", row)
    for lane in ("router · attempt", "prefill-0 · chunk", "prefill-0 · transfer", "decode-0 · decode"):
        assert lane in shown
    assert '<span id="problem" class="bad"></span>' in shown


ASKS_FOR = """(id => {
    document.getElementById('find-id').value = id;
    document.querySelector('#find button').click();
})"""


@pytest.mark.skipif(not CHROMIUM, reason="no Chromium here")
def test_names_from_outside_are_shown_as_text(stack: Stack) -> None:
    name = "<img/src=x/onerror=alert(1)>"
    body = {"model": stack.model, "prompt": "otter", "max_tokens": 1}
    assert stack.http.post("/v1/completions", json=body, headers={"x-request-id": name}).status_code == 200
    with Browser(CHROMIUM) as browser:
        browser.open(f"{stack.base_url}/dashboard")
        browser.wait_for("document.getElementById('requests')?.innerText.includes('onerror')", PATIENCE_S)
        browser.evaluate(ASKS_FOR + f"('{name}')")
        browser.wait_for("document.querySelector('#apart #events tr')", PATIENCE_S)
        found = browser.markup()
        browser.evaluate(ASKS_FOR + f"('{name}%')")
        browser.wait_for("document.getElementById('not-found').innerText", PATIENCE_S)
        shown = browser.markup()
    assert "&lt;img/src=x/onerror=alert(1)&gt;-" in found[found.index('id="timeline-title"') :]
    assert "&lt;img/src=x/onerror=alert(1)&gt;%' is known to router" in shown
    assert "<img" not in found + shown


@pytest.mark.skipif(not CHROMIUM, reason="no Chromium here")
def test_a_request_beyond_the_latest_is_found_by_the_id_of_its_answer(stack: Stack) -> None:
    body = {"model": stack.model, "prompt": "otter", "max_tokens": 1}
    answers = [stack.http.post("/v1/completions", json=body) for _ in range(22)]
    with Browser(CHROMIUM) as browser:
        browser.open(f"{stack.base_url}/dashboard")
        browser.wait_for("document.querySelectorAll('#requests tr').length === 20", PATIENCE_S)
        browser.evaluate(ASKS_FOR + "(' unheard-of ')")
        browser.wait_for("document.getElementById('not-found').innerText", PATIENCE_S)
        missed = browser.markup()
        browser.evaluate(ASKS_FOR + f"('{answers[0].json()['id']}')")
        browser.wait_for("document.querySelector('#apart #events tr')", PATIENCE_S)
        found = browser.markup()
    assert "No request 'unheard-of' is known to router" in missed and '<section id="timeline" hidden' in missed
    own_id = answers[0].headers["x-request-id"]
    assert f">Request {own_id}, finished</h2>" in found and f'">{own_id}</a>' not in found
    assert '<span id="not-found" class="bad"></span>' in found and '<span id="problem" class="bad"></span>' in found
