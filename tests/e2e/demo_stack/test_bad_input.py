"""Whatever a client sends to the whole system, it gets an answer or OpenAI's error object, and never a 500."""

from __future__ import annotations

import json
import random
from typing import Any

import httpx
import pytest

from tests.fakes.stack import Stack

COMPLETION: dict[str, Any] = {
    "model": "kvrelay-demo",
    "prompt": "An otter is",
    "max_tokens": 3,
    "temperature": 0.7,
    "top_p": 0.9,
    "n": 1,
    "logprobs": 2,
    "stop": ["never", "comes"],
    "logit_bias": {"50": 1.5},
    "seed": 7,
    "stream": False,
    "echo": True,
}
CHAT: dict[str, Any] = {
    "model": "kvrelay-demo",
    "messages": [
        {"role": "system", "content": "You know words."},
        {"role": "user", "content": [{"type": "text", "text": "What is an otter?"}]},
    ],
    "max_tokens": 3,
    "temperature": 0.7,
    "logprobs": True,
    "top_logprobs": 2,
    "presence_penalty": 0.5,
    "stream": True,
    "stream_options": {"include_usage": True},
}
JUNK: list[Any] = [
    *(None, True, False, 0, 1, -1, 3, 0.5, -0.0, 1e308, 2**63, -(2**63), 10**40, 2**31),
    *("", "otter", "🦦" * 50, "x" * 3000, "\x00", "<|im_end|>"),
    *([], [None], [[]], [[[5]]], [5, "a"], [-1], [2048], [2047], ["a", "b"]),
    *({}, {"": {}}, {"role": "user"}, {"50": "x"}, {"type": "text"}),
]
EXTRA = ["tools", "functions", "best_of", "min_p", "top_k", "suffix", "response_format", "user", "metadata", "prompt"]


def mutate(value: Any, rng: random.Random) -> Any:
    """Changes something somewhere in a JSON value."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        changed = dict(value)
        key = rng.choice([*changed, rng.choice(EXTRA)])
        match rng.randrange(6):
            case 0 if key in changed and key != "max_tokens":  # without it, a chat may go on for long
                del changed[key]
            case 1 | 2 if key in changed:
                changed[key] = mutate(changed[key], rng)
            case 3:
                changed[f"{key}x"] = changed.pop(key, None) if key != "max_tokens" else rng.choice(JUNK)
            case _:
                changed[key] = rng.choice(JUNK)
        if changed.get("max_tokens", 0) is None:
            changed["max_tokens"] = 2
        return changed
    if isinstance(value, list) and value and rng.random() < 0.7:
        position = rng.randrange(len(value))
        return [*value[:position], mutate(value[position], rng), *value[position + 1 :]]
    return rng.choice(JUNK)


def check_answer(answer: httpx.Response, sent: str) -> None:
    """A complete answer, or an error object with a status that says whose fault it is."""
    if answer.status_code == 200:
        if answer.headers["content-type"].startswith("text/event-stream"):
            assert answer.text.endswith("data: [DONE]\n\n"), sent
            assert '"error"' not in answer.text, sent
        else:
            assert answer.json()["choices"], sent
        return
    assert 400 <= answer.status_code < 500, f"{answer.status_code} for {sent}: {answer.text}"
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}, sent
    assert error["message"], sent
    assert error["type"] == "invalid_request_error", sent


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_bodies_with_random_mistakes_get_an_answer_or_an_error_object(demo_stack: Stack, path: str) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    valid = COMPLETION if path == "/v1/completions" else CHAT
    assert demo_stack.http.post(path, json=valid).status_code == 200
    statuses = []
    for _ in range(250):
        body = valid
        for _ in range(rng.choice([1, 1, 2, 3])):
            body = mutate(body, rng)
        sent = json.dumps(body)
        answer = demo_stack.http.post(path, content=sent, headers={"content-type": "application/json"})
        check_answer(answer, sent)
        statuses.append(answer.status_code)
    assert statuses.count(200) > 20
    assert statuses.count(400) > 20
    demo_stack.wait_until_clean()
    requests = demo_stack.fleet()["requests"]
    assert requests["failed"] == requests["running"] == 0
