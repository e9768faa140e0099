"""Requests with random tools: that must call one, or that may also give an answer of a random format."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema

from tests.fakes.random_constraints import random_schema

MAX_TOKENS = 1200


def random_parameters(rng: random.Random) -> dict[str, Any]:
    names = rng.sample(["a", "naïve name", "名", "the_last"], rng.randint(1, 3))
    properties = {name: random_schema(rng, 2) for name in names}
    required = [name for name in names if rng.random() < 0.7]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def strict_call(model: str, seed: int) -> dict[str, Any]:
    """The body of a chat completion that calls one of its one to three tools."""
    rng = random.Random(seed)
    tools = [
        {"name": f"tool_{number}", "parameters": random_parameters(rng), "strict": True}
        for number in range(rng.randint(1, 3))
    ]
    return {
        "model": model,
        "messages": [{"role": "user", "content": f"Number {seed}."}],
        "tools": [{"type": "function", "function": function} for function in tools],
        "tool_choice": "required",
        "parallel_tool_calls": False,  # equally likely tokens would begin one call after the other
        "max_tokens": MAX_TOKENS,
        "temperature": 1,
        "seed": seed,
    }


def typed_turn(model: str, seed: int) -> dict[str, Any]:
    """The body of a chat completion that calls one of its tools, of which some are strict, or answers in a format."""
    body, rng = strict_call(model, seed), random.Random(-seed)
    for tool in body["tools"]:
        tool["function"]["strict"] = rng.random() < 0.5
    schema = {**random_parameters(rng), "type": "object"}
    described = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    more = {"tool_choice": "auto", "response_format": described, "guided_whitespace_pattern": ""}
    return body | more


def check_turn(body: dict[str, Any], message: dict[str, Any]) -> str:
    """Returns "calls" or "text". Raises as `check_call` does, unless all of the message is valid."""
    strict = {tool["function"]["name"] for tool in body["tools"] if tool["function"]["strict"]}
    for call in message.get("tool_calls") or []:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        assert isinstance(json.loads(arguments), dict) and not message["content"]
        if name in strict:
            check_call(body, name, arguments)
    if message.get("tool_calls"):
        return "calls"
    jsonschema.validate(json.loads(message["content"]), body["response_format"]["json_schema"]["schema"])
    return "text"


def check_call(body: dict[str, Any], name: str, arguments: str) -> None:
    """Raises an error of `json`, `jsonschema`, or KeyError, unless this is a valid call of one of the tools."""
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in body["tools"]}
    jsonschema.validate(json.loads(arguments), schemas[name])
