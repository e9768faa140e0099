"""Libraries of agents, unmodified, with tools and an output type in one run: calls first, then the typed answer.

The model is scripted. Each answer must follow the grammar of the library's own request, and the grammar must forbid an
answer of another form. Whole and streamed runs print the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.clients.installed import MISSING, NODE_MODULES, PROGRAMS, PYTHON, call, run_alone
from tests.fakes.scripted.system import ScriptedSystem

FIELDS = {"name": "otter", "kind": "mammal", "legs": 4, "homes": [{"place": "a river", "depth_m": None}]}
ANSWER, TEXT = json.dumps(FIELDS), "It is a mammal."
CALLS = f"{call('define', word='otter', kind='noun')}\n{call('today')}"
DEFINED = [r"<tool_response>\notter, noun: a mammal that swims\n", r"<tool_response>\n2026-11-28\n"]
WRONG = json.dumps(FIELDS | {"legs": "four"})
WRONG_CALL = call("define", word="otter", kind="adjective")


def turns(marks: list[str], answer: str, *forbidden: str) -> list[dict[str, Any]]:
    """Rules for the turns of a run whose prompts have these marks: the calls, and `answer` behind their results."""
    return [
        {"when": [*marks, *DEFINED], "answer": answer, "forbidden": forbidden},
        {"when": [*marks, "What is an otter"], "answer": CALLS, "forbidden": forbidden},
    ]


def typed(tool: str) -> list[dict[str, Any]]:
    """Rules for a library that gets its typed output by a call of this tool, which must come."""
    shown, answer = f'"name": "{tool}"', call(tool, **FIELDS)
    forbidden = [TEXT, ANSWER, WRONG_CALL, call(tool, **(FIELDS | {"legs": "four"}))]
    described: dict[str, Any] = {"when": [shown, "Describe an otter"], "answer": answer, "forbidden": forbidden}
    return [*turns([shown], answer, *forbidden), described]


RULES: list[dict[str, Any]] = [
    *typed("final_result"),  # of pydantic-ai
    *typed("Animal"),  # of LangChain
    *turns(["JSON object"], ANSWER, TEXT),  # the prompt alone has the schema
    *turns(["Calls are free"], ANSWER, TEXT, WRONG),
    *turns([], ANSWER, TEXT, WRONG, WRONG_CALL),
    {"when": ["Describe an otter"], "answer": ANSWER, "forbidden": [TEXT]},
]
ANIMAL = "Animal(name='otter', kind='mammal', legs=4, homes=[Home(place='a river', depth_m=None)])"


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedSystem]:
    with ScriptedSystem(tmp_path_factory.mktemp("system"), RULES) as system:
        yield system


@pytest.mark.skipif(not PYTHON.exists(), reason=MISSING)
@pytest.mark.parametrize(
    ("program", "lines"),
    [
        ("openai_agents.py", 4 * [f"{way}: define today, {ANIMAL}" for way in ("whole", "streamed")]),
        (
            "pydantic_ai_agents.py",
            2
            * [
                f"{way}: define today{last}, {ANIMAL}"
                for last in ("", " final_result", "")
                for way in ("whole", "streamed")
            ],
        ),
        (
            "langchain_agents.py",
            2
            * [
                *[f"{way}: define today{last}, {ANIMAL}" for last in ("", " Animal") for way in ("whole", "streamed")],
                *[f"{method}: {ANIMAL}" for method in ("json_schema", "function_calling", "json_mode") for _ in "12"],
            ],
        ),
    ],
)
def test_a_python_library(system: ScriptedSystem, tmp_path: Path, program: str, lines: list[str]) -> None:
    assert run_alone([PYTHON, PROGRAMS / program, system.base_url], tmp_path).splitlines() == lines


@pytest.mark.skipif(not (NODE_MODULES / "openai").exists(), reason=MISSING)
def test_the_openai_package_of_npm(system: ScriptedSystem, tmp_path: Path) -> None:
    (tmp_path / "node_modules").symlink_to(NODE_MODULES)
    program = tmp_path / "openai_tools.mjs"
    program.write_text((PROGRAMS / program.name).read_text(encoding="utf-8"), encoding="utf-8")
    ways = ("parse", "stream", "runTools", "runTools, streamed", "responses", "responses, streamed")
    said = run_alone(["node", program.name, system.base_url], tmp_path).splitlines()
    assert said == [f"{way}: define today, {json.dumps(FIELDS, separators=(',', ':'))}" for way in ways]
