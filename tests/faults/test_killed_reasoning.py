"""Decode workers are killed while answers reason under a budget: each stream has the tokens of an undisturbed run, and
its reasoning ends behind the budget."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.e2e.test_lifecycle import Stream
from tests.fakes.stack import Stack
from tests.fakes.waiting import PATIENCE_S, wait_until
from tests.faults.storm.processes import usual_dtype
from tests.tiny_models import add_reasoning, build_model

pytestmark = pytest.mark.timeout(900)
FLAGS = ("--threads", "1", "--prefill", "1", "--decode", "2", "--routing-policy", "round_robin")
BUDGET = 250
NUM_STREAMS = 8
CHAT = "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["dark red", "dark blue"]}, "size": {"type": "integer", "maximum": 9999}},
    "required": ["colour", "size"],
    "additionalProperties": False,
}


def body_of(stack: Stack, end_id: int, number: int) -> dict[str, Any]:
    """Nothing but the budget ends the reasoning. Half of the answers are JSON behind it; half of each are greedy."""
    body: dict[str, Any] = {
        "model": stack.model,
        "messages": [{"role": "user", "content": f"Number {number}."}],
        "max_tokens": BUDGET + 150,
        "temperature": number % 2,
        "seed": number,
        "return_token_ids": True,
        "thinking_token_budget": BUDGET,
        "logit_bias": {str(end_id): -100},
        "ignore_eos": True,
        "speculation": ["off", "ngram"][number // 4],
    }
    if number // 2 % 2:
        body["structured_outputs"] = {"json": SCHEMA, "whitespace_pattern": ""}
    return body


def test_streams_reason_as_long_when_their_decode_worker_is_killed(tmp_path: Path) -> None:
    model = add_reasoning(build_model("qwen3", tmp_path / "model"))
    with Stack(model, tmp_path, "--dtype", usual_dtype(), *FLAGS) as stack:
        answer = stack.http.post("/tokenize", json={"model": stack.model, "prompt": "</think>"})
        (end_id,) = answer.raise_for_status().json()["tokens"]
        bodies = [body_of(stack, end_id, number) for number in range(NUM_STREAMS)]
        expected = [check(stack, body, end_id) for body in bodies]
        before = {worker["worker_id"]: worker["totals"]["handoffs_committed"] for worker in stack.workers("decode")}
        streams = [Stream(stack, body, CHAT) for body in bodies]
        wait_until(
            lambda: all(
                worker["totals"]["handoffs_committed"] > before[worker["worker_id"]]
                for worker in stack.workers("decode")
            )
        )
        os.kill(stack.children()["decode-0"], signal.SIGKILL)
        for stream, token_ids in zip(streams, expected, strict=True):
            stream.join(PATIENCE_S)
            assert stream.token_ids == token_ids
            assert stream.last_line == "data: [DONE]"
        stack.wait_until_clean()


def check(stack: Stack, body: dict[str, Any], end_id: int) -> list[int]:
    """The tokens of an answer, whose reasoning has the tokens of the budget and the marker."""
    answer = stack.http.post(CHAT, json=body).raise_for_status().json()
    (choice,) = answer["choices"]
    token_ids: list[int] = choice["token_ids"]
    assert token_ids.index(end_id) == BUDGET
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == BUDGET + 1
    if "structured_outputs" in body:
        jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
        assert choice["finish_reason"] == "stop"
    return token_ids
