"""The requests of a session of Claude Code, replayed through plain HTTP: its turns find their prompts in the cache.

They have what its requests have: a hash of each request in the system text, tools with schemas, cache marks, thinking,
and a stream. `clients/test_coding_agents.py` runs the program itself, where it is installed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.scripted.system import ScriptedSystem

TASK, DONE = "Rename greet to welcome in app.py.", "I renamed it."
HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14",
    "x-api-key": "none",
    "x-app": "cli",
}
EDIT = {"file_path": "app.py", "old_string": "def greet():", "new_string": "def welcome():"}
NAMES = ("Read", "Edit", "Bash", "Glob", "Grep", "Write", "WebFetch", "TodoWrite")


def written(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


RULES = [
    {"newest": ["And now thanks"], "answer": "You are welcome."},
    {"newest": ["has been updated"], "answer": DONE},
    {
        "newest": ["def greet"],
        "answer": "<think>\nI must edit it.\n</think>\n\nNow I edit it.\n" + written("Edit", EDIT),
    },
    {"newest": [TASK], "answer": "I read it.\n" + written("Read", {"file_path": "app.py"})},
]


@pytest.fixture
def system(tmp_path: Path) -> Iterator[ScriptedSystem]:
    with ScriptedSystem(tmp_path, RULES) as system:
        yield system


def tool(name: str) -> dict[str, Any]:
    properties = {
        f"{name.lower()}_{number}": {"type": "string", "description": f"Field {number} of {name}. " * 8}
        for number in range(6)
    }
    properties |= {each: {"type": "string"} for each in EDIT}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return {"name": name, "description": f"What {name} does, at length. " * 40, "input_schema": schema}


def request_body(system: ScriptedSystem, number: int, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The newest message has the mark up to which Anthropic caches; the last request's mark is gone."""
    *earlier, newest = messages
    last = [{**part, "cache_control": {"type": "ephemeral"}} for part in newest["content"][-1:]]
    marked = {**newest, "content": [*newest["content"][:-1], *last]}
    cached = {"cache_control": {"type": "ephemeral"}}
    return {
        "model": system.model,
        "max_tokens": 32_000,
        "stream": True,
        "system": [
            {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={number * 7919:05x};"},
            {"type": "text", "text": "You are an agent in a terminal.", **cached},
            {"type": "text", "text": "Follow the rules of this repository. " * 150, **cached},
        ],
        "tools": [tool(name) for name in NAMES],
        "messages": [*earlier, marked],
        "thinking": {"type": "adaptive"},
        "metadata": {"user_id": f"user_0_session_{number}"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    }


def answered(
    system: ScriptedSystem, number: int, messages: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """The content of an answer, collected from its stream as the program does, and its usage."""
    blocks: list[dict[str, Any]] = []
    usage: dict[str, int] = {}
    inputs: dict[int, str] = {}
    body = request_body(system, number, messages)
    with system.http.stream("POST", "/v1/messages?beta=true", json=body, headers=HEADERS) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            event: dict[str, Any] = json.loads(line[6:]) if line.startswith("data: ") else {}
            match event:
                case {"type": "message_start", "message": message}:
                    usage |= message["usage"]
                case {"type": "content_block_start", "content_block": block}:
                    blocks.append(dict(block))
                case {"type": "content_block_delta", "index": index, "delta": delta}:
                    if delta["type"] == "input_json_delta":
                        inputs[index] = inputs.get(index, "") + delta["partial_json"]
                    else:
                        field = delta["type"].removesuffix("_delta")
                        text = delta[field]
                        blocks[index][field] += text
                case {"type": "message_delta", "usage": more}:
                    usage |= more
    for index, text in inputs.items():
        blocks[index]["input"] = json.loads(text)
    return blocks, usage


def test_each_turn_finds_at_least_95_percent_of_its_prompt_in_the_cache(system: ScriptedSystem) -> None:
    messages = [user({"type": "text", "text": TASK})]
    results = {"Read": "     1\tdef greet():\n     2\t    return 'hello'\n" * 3, "Edit": "app.py has been updated."}
    shares, calls = list[float](), list[str]()
    while len(shares) < 3:
        blocks, usage = answered(system, len(shares), messages)
        shares.append(usage["cache_read_input_tokens"] / (usage["cache_read_input_tokens"] + usage["input_tokens"]))
        messages.append({"role": "assistant", "content": blocks})
        made = [block for block in blocks if block["type"] == "tool_use"]
        if not made:
            break
        calls += [block["name"] for block in made]
        messages.append(
            user(
                *[{"type": "tool_result", "tool_use_id": each["id"], "content": results[each["name"]]} for each in made]
            )
        )
    assert calls == ["Read", "Edit"] and blocks[-1]["text"] == DONE
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] > 3000, "as long as prompts of agents are"
    # A session of a second turn is a new process with the same conversation.
    messages.append(user({"type": "text", "text": "And now thanks"}))
    blocks, usage = answered(system, 9, messages)
    assert blocks[-1]["text"] == "You are welcome."
    second = usage["cache_read_input_tokens"] / (usage["cache_read_input_tokens"] + usage["input_tokens"])
    assert shares[0] == 0 and min(*shares[1:], second) >= 0.95, (shares, second)


def user(*content: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": [*content]}
