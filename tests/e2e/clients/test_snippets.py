"""The programs of docs/clients.md, with the real clients, against a scripted model behind the real services."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.clients.installed import MISSING, NODE_MODULES, PYTHON, ROOT, call, run, snippet
from tests.fakes.scripted.system import ScriptedSystem

ANSWER = "It is a mammal that swims."
CALLED = 'define {"word": "otter"}'
RULES = [
    {"newest": ["a mammal that swims"], "answer": ANSWER},
    {"newest": ["as JSON"], "answer": '{"name": "otter", "legs": 4}'},
    {"newest": ["What is an otter"], "answer": f"I look it up.\n{call('define', word='otter')}"},
]


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedSystem]:
    with ScriptedSystem(tmp_path_factory.mktemp("system"), RULES) as system:
        yield system


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        (
            "openai",
            [f"streamed: {CALLED}", f"chat: {ANSWER}", f"response: {ANSWER}"]
            + [f"{kind}: name='otter' legs=4" for kind in ("chat", "response")],
        ),
        ("anthropic", ["streamed: define {'word': 'otter'}", f"message: {ANSWER}"]),
    ],
)
def test_a_client_of_the_development_environment(
    system: ScriptedSystem, tmp_path: Path, name: str, lines: list[str]
) -> None:
    pytest.importorskip(name)
    assert run([sys.executable, "-c", snippet(name, system)], tmp_path).splitlines() == lines


@pytest.mark.skipif(not PYTHON.exists(), reason=MISSING)
@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("openai-agents", [f"whole: {ANSWER}", f"streamed: {ANSWER}"] * 2),
        ("langchain-openai", ["whole: define {'word': 'otter'}", f"streamed: {ANSWER}"] * 2),
        ("litellm", [f"whole: {CALLED}", f"streamed: {ANSWER}"]),
    ],
)
def test_a_python_client(system: ScriptedSystem, tmp_path: Path, name: str, lines: list[str]) -> None:
    environment = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # otherwise litellm downloads prices
    assert run([PYTHON, "-c", snippet(name, system)], tmp_path, environment).splitlines() == lines


@pytest.mark.skipif(not (NODE_MODULES / "ai").exists(), reason=MISSING)
def test_the_ai_sdk(system: ScriptedSystem, tmp_path: Path) -> None:
    (tmp_path / "node_modules").symlink_to(NODE_MODULES)
    (tmp_path / "words.mjs").write_text(snippet("ai-sdk", system), encoding="utf-8")
    said = run(["node", "words.mjs"], tmp_path)
    assert [line.replace("I look it up.", "").strip() for line in said.splitlines() if line] == [
        line.strip() for _ in range(3) for line in (f"whole: {ANSWER}", f"streamed: {ANSWER}")
    ], said


def test_the_example_with_a_tool(system: ScriptedSystem, tmp_path: Path) -> None:
    said = run([sys.executable, ROOT / "examples" / "tools.py"], tmp_path, {"KVRELAY_URL": system.base_url})
    assert said.splitlines() == ['define({"word": "otter"}) is \'a mammal that swims\'', ANSWER]
