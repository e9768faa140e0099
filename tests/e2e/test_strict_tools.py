"""Calls of tools with random schemas by a model with random weights: each call is valid."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.fakes.random_constraints import random_schema
from tests.fakes.stack import Stack

NUM_AT_ONCE = 16
MAX_TOKENS = 1200
FLAGS = ("--dtype", "float32", "--threads", "1", "--tool-parser", "hermes")


def random_parameters(rng: random.Random) -> dict[str, Any]:
    names = rng.sample(["a", "naïve name", "名", "the_last"], rng.randint(1, 3))
    properties = {name: random_schema(rng, 2) for name in names}
    required = [name for name in names if rng.random() < 0.7]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def check_call(stack: Stack, seed: int) -> int:
    """Returns the number of calls in the answer to a request that must call one of its tools."""
    rng = random.Random(seed)
    schemas = {f"tool_{number}": random_parameters(rng) for number in range(rng.randint(1, 3))}
    functions = [{"name": name, "parameters": schema, "strict": True} for name, schema in schemas.items()]
    body = {
        "model": stack.model,
        "messages": [{"role": "user", "content": f"Number {seed}."}],
        "tools": [{"type": "function", "function": function} for function in functions],
        "tool_choice": "required",
        "parallel_tool_calls": False,  # equally likely tokens would begin one call after the other
        "max_tokens": MAX_TOKENS,
        "temperature": 1,
        "seed": seed,
    }
    answer = stack.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, (seed, answer.text)
    (choice,) = answer.json()["choices"]
    assert choice["finish_reason"] == "tool_calls", (seed, choice)
    calls = [call["function"] for call in choice["message"]["tool_calls"]]
    for call in calls:
        jsonschema.validate(json.loads(call["arguments"]), schemas[call["name"]])
    return len(calls)


@pytest.mark.parametrize("num_requests", [20, pytest.param(1000, marks=pytest.mark.slow)])
def test_every_call_of_a_strict_tool_is_valid(
    tiny_model: Callable[[str], Path], tmp_path: Path, num_requests: int
) -> None:
    with Stack(tiny_model("qwen3"), tmp_path, *FLAGS) as stack, ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        numbers = list(pool.map(lambda seed: check_call(stack, seed), range(num_requests)))
    assert numbers == [1] * num_requests
