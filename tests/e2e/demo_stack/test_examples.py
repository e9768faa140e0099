"""The examples run as they stand, and so do the requests that documents show with curl."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.stack import Stack
from tests.fakes.waiting import PATIENCE_S

ROOT = Path(__file__).parents[3]
CURL = re.compile(r"curl http://127\.0\.0\.1:8000(\S+)[^`]*?-d '(\{.*?\})'", re.DOTALL)
SHOWN = [
    (page.name, *request)
    for page in [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
    for request in CURL.findall(page.read_text(encoding="utf-8"))
]
"""Page, path and body of each request."""


SCRIPTS = sorted(path for path in ROOT.glob("examples/*.py") if path.stem not in ("tools", "connection"))
"""All but the one that needs a model with tools, which `tests/e2e/clients` runs, and what they import."""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_an_example_runs(demo_stack: Stack, script: Path) -> None:
    environment = os.environ | {"KVRELAY_URL": demo_stack.base_url}
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=2 * PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    assert EXPECTED[script.stem] in done.stdout


@pytest.mark.parametrize("name", ["chat", "program"])
def test_an_example_says_that_no_server_answers(name: str) -> None:
    environment = os.environ | {"KVRELAY_URL": "http://127.0.0.1:1"}
    script = ROOT / "examples" / f"{name}.py"
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "http://127.0.0.1:1" in done.stderr and "start a server with `make serve`" in done.stderr


def test_the_example_with_tools_says_that_the_demo_model_has_none(demo_stack: Stack) -> None:
    environment = os.environ | {"KVRELAY_URL": demo_stack.base_url}
    script = ROOT / "examples" / "tools.py"
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "serve a model that is trained to call tools" in done.stderr, done.stderr


EXPECTED = {
    "chat": "prompt tokens,",
    "constrained": "the same text with drafts: True",
    "many_at_once": "the last one: prefill prefill-0, decode decode-0",
    "offline": "second 1 ",
    "program": "An otter is",
    "scoring": "a large natural stream of water",
    "shared_prefix": "320 cached",
}


@pytest.mark.parametrize(("page", "path", "body"), SHOWN, ids=[f"{page} {path}" for page, path, _ in SHOWN])
def test_a_request_that_is_shown_is_answered(demo_stack: Stack, page: str, path: str, body: str) -> None:
    answer = demo_stack.http.post(path, json=json.loads(body))
    assert answer.status_code == 200, answer.text


def test_a_tokenization_is_what_is_shown(demo_stack: Stack) -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    (body, shown) = re.findall(r"8000/tokenize .*?-d '(\{.*?\})'\n```\n```json\n(.*?)\n```", text, re.DOTALL)[0]
    assert demo_stack.http.post("/tokenize", json=json.loads(body)).json() == json.loads(shown)


def test_the_readme_shows_what_its_request_gives(demo_stack: Stack) -> None:
    """But for the ids and the time. A model that was trained again may word it differently: then change the README."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    body = re.search(r"-d '(\{.*?\})'", readme, re.DOTALL)
    shown = re.search(r"```json\n(.*?)```", readme, re.DOTALL)
    assert body is not None and shown is not None
    given = demo_stack.http.post("/v1/chat/completions", json=json.loads(body[1])).raise_for_status().json()
    expected = json.loads(shown[1])
    for varying in ("id", "created"):
        del given[varying], expected[varying]
    assert given == expected
