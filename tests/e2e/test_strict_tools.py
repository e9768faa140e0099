"""Calls of tools with random schemas by a model with random weights: calls and formatted answers are valid."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.harmony_tokenizer import write_harmony_tokenizer
from tests.fakes.random_tools import check_call, check_turn, strict_call, typed_turn
from tests.fakes.stack import Stack
from tests.tiny_models import add_reasoning, build_model

NUM_AT_ONCE = 16
FLAGS = ("--dtype", "float32", "--threads", "1", "--tool-parser", "hermes")


def num_calls(stack: Stack, seed: int, **fields: Any) -> int:
    """Returns the number of calls in the answer to a request that must call one of its tools."""
    body = strict_call(stack.model, seed) | fields
    answer = stack.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, (seed, answer.text)
    (choice,) = answer.json()["choices"]
    assert choice["finish_reason"] == "tool_calls", (seed, choice)
    calls = [call["function"] for call in choice["message"]["tool_calls"]]
    for call in calls:
        check_call(body, call["name"], call["arguments"])
    if budget := fields.get("thinking_token_budget"):
        # The tokens of the budget and the marker, unless the model itself ended the reasoning before.
        details = answer.json()["usage"]["completion_tokens_details"]
        assert 1 <= details["reasoning_tokens"] <= budget + 1
    return len(calls)


@pytest.mark.parametrize("num_requests", [10, pytest.param(1000, marks=pytest.mark.slow)])
def test_every_call_of_a_strict_tool_is_valid(
    tiny_model: Callable[[str], Path], tmp_path: Path, num_requests: int
) -> None:
    with Stack(tiny_model("qwen3"), tmp_path, *FLAGS) as stack, ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        numbers = list(pool.map(lambda seed: num_calls(stack, seed), range(num_requests)))
    assert numbers == [1] * num_requests


def kind_of_turn(stack: Stack, seed: int) -> str:
    """Whether a request with tools and a format calls or answers; "" if its output was cut. Streams say the same."""
    body = typed_turn(stack.model, seed)
    answer = stack.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, (seed, answer.text)
    (choice,) = answer.json()["choices"]
    message, content, arguments = choice["message"], "", ""
    events = stack.http.post("/v1/chat/completions", json=body | {"stream": True}).text
    for line in events.split("\n"):  # not at other characters that end lines, which texts may have
        if line.startswith("data: {"):
            delta = json.loads(line.removeprefix("data: "))["choices"][0]["delta"]
            content += delta.get("content") or ""
            arguments += "".join(each["function"].get("arguments", "") for each in delta.get("tool_calls") or [])
    assert content == (message["content"] or "")
    assert arguments == "".join(call["function"]["arguments"] for call in message.get("tool_calls") or [])
    return "" if choice["finish_reason"] == "length" else check_turn(body, message)


@pytest.mark.parametrize("parser", ["hermes", "llama3_json"])
@pytest.mark.parametrize("num_requests", [16, pytest.param(500, marks=pytest.mark.slow)])
def test_a_turn_with_a_format_is_valid_calls_or_a_valid_answer(
    tiny_model: Callable[[str], Path], tmp_path: Path, num_requests: int, parser: str
) -> None:
    with Stack(tiny_model("qwen3"), tmp_path, *FLAGS[:-1], parser) as stack, ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        kinds = list(pool.map(lambda seed: kind_of_turn(stack, seed), range(num_requests)))
        stack.wait_until_clean()
    assert kinds.count("calls") > num_requests // 8 and kinds.count("text") > num_requests // 8, kinds


def test_strict_calls_follow_reasoning_with_a_budget(tmp_path: Path) -> None:
    """A model whose prompts open the reasoning, behind which the grammar of the calls begins."""
    model = add_reasoning(build_model("qwen3", tmp_path / "model"))
    with Stack(model, tmp_path, *FLAGS) as stack, ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        numbers = list(pool.map(lambda seed: num_calls(stack, seed, thinking_token_budget=1 + 2 * seed), range(10)))
        stack.wait_until_clean()
    assert numbers == [1] * 10


def test_budgets_and_constraints_of_reasoning_in_channels(tmp_path: Path) -> None:
    """A model with gpt-oss's markers: random weights would think for ever."""
    model = write_harmony_tokenizer(build_model("qwen3", tmp_path / "model"))
    with Stack(model, tmp_path, *FLAGS[:4]) as stack, ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        numbers = list(pool.map(lambda seed: num_harmony_calls(stack, seed), range(8)))
        animals = list(pool.map(lambda seed: harmony_json(stack, seed), range(8)))
        stack.wait_until_clean()
    assert numbers == [1] * 8
    assert all(set(animal) == {"legs"} and animal["legs"] in (2, 4) for animal in animals)


def num_harmony_calls(stack: Stack, seed: int) -> int:
    """As `num_calls`, with a budget of `seed` tokens."""
    body = strict_call(stack.model, seed) | {"thinking_token_budget": seed}
    answer = stack.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, (seed, answer.text)
    (choice,), usage = answer.json()["choices"], answer.json()["usage"]
    assert choice["finish_reason"] == "tool_calls", (seed, choice)
    num_markers, num_rest = 4, 3  # the last character may be completed
    assert usage["completion_tokens_details"]["reasoning_tokens"] <= seed + num_markers + num_rest
    (call,) = [call["function"] for call in choice["message"]["tool_calls"]]
    check_call(body, call["name"], call["arguments"])
    return 1


def harmony_json(stack: Stack, seed: int) -> dict[str, Any]:
    """The answer behind the reasoning."""
    schema = {"type": "object", "properties": {"legs": {"enum": [2, 4]}}, "required": ["legs"]}
    fields = {"guided_json": schema | {"additionalProperties": False}, "guided_whitespace_pattern": ""}
    body = {"model": stack.model, "messages": [{"role": "user", "content": f"Legs {seed}?"}], "seed": seed}
    answer = stack.http.post("/v1/chat/completions", json=body | fields | {"thinking_token_budget": seed})
    assert answer.status_code == 200, (seed, answer.text)
    (choice,) = answer.json()["choices"]
    assert choice["finish_reason"] == "stop", (seed, choice)
    parsed: dict[str, Any] = json.loads(choice["message"]["content"])
    return parsed
