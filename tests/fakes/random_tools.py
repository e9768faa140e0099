"""Requests that must call one of some strict tools with random schemas."""

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


def check_call(body: dict[str, Any], name: str, arguments: str) -> None:
    """Raises an error of `json`, `jsonschema`, or KeyError, unless this is a valid call of one of the tools."""
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in body["tools"]}
    jsonschema.validate(json.loads(arguments), schemas[name])
