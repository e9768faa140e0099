"""A decode worker is killed in the middle of a call: the client gets the whole call, with the tokens of an undisturbed
run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.fakes.scripted.system import ScriptedSystem

ARGUMENTS = {"words": [f'word {number} "é🦦" {"otter " * 3}' for number in range(40)]}
WRITTEN = json.dumps(ARGUMENTS, ensure_ascii=False)
RULES = [{"answer": f'I look.\n<tool_call>\n{{"name": "define", "arguments": {WRITTEN}}}\n</tool_call>'}]
SCHEMA = {
    "type": "object",
    "properties": {"words": {"type": "array", "items": {"type": "string"}}},
    "required": ["words"],
    "additionalProperties": False,
}
STEP_S = 0.003  # some seconds for the call


@pytest.fixture
def system(tmp_path: Path) -> Iterator[ScriptedSystem]:
    with ScriptedSystem(tmp_path, RULES, num_decode=2, step_s=STEP_S) as system:
        yield system


@pytest.mark.always
@pytest.mark.parametrize("is_strict", [False, True])
def test_a_call_outlives_the_worker_that_writes_it(system: ScriptedSystem, is_strict: bool) -> None:
    function = {"name": "define", "parameters": SCHEMA, "strict": is_strict}
    body: dict[str, Any] = {
        "model": system.model,
        "messages": [{"role": "user", "content": "Define all of them."}],
        "tools": [{"type": "function", "function": function}],
        "return_token_ids": True,
    }
    whole = system.http.post("/v1/chat/completions", json=body).raise_for_status().json()["choices"][0]
    assert whole["finish_reason"] == "tool_calls"
    name, arguments, killed, finish = "", "", "", None
    token_ids: list[int] = []
    with system.http.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as answer:
        request_id = answer.headers["x-request-id"]
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            (choice,) = json.loads(line.removeprefix("data: "))["choices"]
            for part in choice["delta"].get("tool_calls") or []:
                name += part["function"].get("name") or ""
                arguments += part["function"].get("arguments") or ""
            token_ids += choice.get("token_ids") or []
            finish = choice["finish_reason"] or finish
            if arguments and not killed:
                killed = system.attempts(request_id)[-1]["decode"]
                system.kill(killed)
                assert len(arguments) < len(WRITTEN) / 2, "the call was complete before the kill"
    assert (name, finish) == ("define", "tool_calls")
    assert arguments == WRITTEN == whole["message"]["tool_calls"][0]["function"]["arguments"]
    jsonschema.validate(json.loads(arguments), SCHEMA)
    assert token_ids == whole["token_ids"]
    assert [attempt["decode"] == killed for attempt in system.attempts(request_id)] == [True, False]
