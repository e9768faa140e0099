"""Constrained outputs of the whole system are valid, streamed and whole, and the same on every path."""

from __future__ import annotations

import json
import random
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.fakes.hostile_grammars import TOO_AMBIGUOUS
from tests.fakes.random_constraints import check_constraint, random_constraint
from tests.fakes.stack import Stack

pytestmark = pytest.mark.e2e

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["otter", "heron"]},
        "ages": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
        "wild": {"type": "boolean"},
    },
    "required": ["name", "kind", "ages", "wild"],
    "additionalProperties": False,
}


def check(text: str) -> None:
    found = json.loads(text)
    assert [*found] == ["name", "kind", "ages", "wild"]
    assert isinstance(found["name"], str) and len(found["name"]) <= 8 and found["kind"] in ("otter", "heron")
    assert len(found["ages"]) <= 3 and all(0 <= age <= 99 for age in found["ages"])
    assert type(found["wild"]) is bool


def complete(stack: Stack, prompt: str, **fields: Any) -> list[dict[str, Any]]:
    body = {"model": stack.model, "prompt": prompt, "max_tokens": 150, "seed": 7, **fields}
    answer = stack.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    choices: list[dict[str, Any]] = answer.json()["choices"]
    return choices


def streamed(stack: Stack, prompt: str, **fields: Any) -> tuple[str, str | None]:
    """The text and the finish reason."""
    body = {"model": stack.model, "prompt": prompt, "max_tokens": 150, "seed": 7, "stream": True, **fields}
    text, reason = "", None
    with stack.http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                text, reason = text + choice["text"], choice["finish_reason"] or reason
    return text, reason


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_stream_is_the_whole_answer(demo_stack: Stack, temperature: float) -> None:
    outputs = {"json": SCHEMA, "whitespace_pattern": " ?"}
    (whole,) = complete(demo_stack, "An animal:", temperature=temperature, structured_outputs=outputs)
    text, reason = streamed(demo_stack, "An animal:", temperature=temperature, structured_outputs=outputs)
    assert (text, reason) == (whole["text"], "stop")
    check(text)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forced_tokens_are_those_that_are_sampled_with_logprobs(demo_stack: Stack, temperature: float) -> None:
    outputs = {"json": SCHEMA, "whitespace_pattern": ""}
    fields: dict[str, Any] = {"temperature": temperature, "structured_outputs": outputs, "n": 2}
    jumping = complete(demo_stack, "An animal:", return_token_ids=True, **fields)
    sampled = complete(demo_stack, "An animal:", return_token_ids=True, logprobs=0, **fields)
    for ahead, one_by_one in zip(jumping, sampled, strict=True):
        assert (ahead["text"], ahead["token_ids"]) == (one_by_one["text"], one_by_one["token_ids"])
        assert ahead["finish_reason"] == "stop"
        check(ahead["text"])


def test_what_a_grammar_forces_first_comes_with_the_first_token(demo_stack: Stack) -> None:
    outputs = {"json": SCHEMA, "whitespace_pattern": ""}
    fields = {"model": demo_stack.model, "prompt": "An animal:", "max_tokens": 150, "structured_outputs": outputs}
    before = demo_stack.http.get("/fleet").json()["opening_tokens"]
    with demo_stack.http.stream("POST", "/v1/completions", json={**fields, "stream": True}) as answer:
        first = next(json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {"))
    assert first["choices"][0]["text"].startswith('{"name":"')
    assert demo_stack.http.get("/fleet").json()["opening_tokens"] > before
    # The prompt's tokens are those of the request, also if the opening is in the cache with them.
    usages = [
        demo_stack.http.post("/v1/completions", json={**fields, "prompt": [7] * 64, "temperature": 0.0, "n": n}).json()
        for n in (1, 1, 2)
    ]
    for usage in (each["usage"] for each in usages):
        assert usage["prompt_tokens"] == 64
        assert usage["prompt_tokens_details"]["cached_tokens"] <= 64
    for limit in range(1, 8):
        (cut,) = complete(demo_stack, "An animal:", max_tokens=limit, structured_outputs=outputs, return_token_ids=True)
        assert len(cut["token_ids"]) == limit and cut["finish_reason"] == "length"
        assert '{"name":"'.startswith(cut["text"]) or cut["text"].startswith('{"name":"')


@pytest.mark.parametrize("stop", [["kind"], ['":"o', "ages"], ["me"]])
def test_a_stop_string_within_forced_tokens_ends_the_text(demo_stack: Stack, stop: list[str]) -> None:
    outputs = {"json": SCHEMA, "whitespace_pattern": ""}
    (whole,) = complete(demo_stack, "An animal:", temperature=0.0, structured_outputs=outputs)
    (cut,) = complete(demo_stack, "An animal:", temperature=0.0, structured_outputs=outputs, stop=stop)
    assert cut["text"] == min((whole["text"].split(each)[0] for each in stop), key=len)
    assert cut["finish_reason"] == "stop"


def test_logprobs_and_penalties_go_together_with_a_grammar(demo_stack: Stack) -> None:
    fields = {"guided_regex": "(yes|no){1,3}", "logprobs": 3, "presence_penalty": 0.5, "logit_bias": {"5": -1}}
    (choice,) = complete(demo_stack, "Well,", temperature=1.0, **fields)
    assert re.fullmatch("(yes|no){1,3}", choice["text"])
    assert len(choice["logprobs"]["tokens"]) == len(choice["logprobs"]["token_logprobs"])


def ask_at_random(stack: Stack, seed: int) -> None:
    """Every answer to a random request is valid, or cut."""
    rng = random.Random(seed)
    fields: dict[str, Any] = {
        "temperature": rng.choice([0.0, 0.3, 1.0, 2.0]),
        "seed": seed,
        "max_tokens": rng.choice([1, 7, 60, 200]),
        **random_constraint(rng),
    }
    if rng.random() < 0.5:
        found = [streamed(stack, f"Number {seed}:", **fields)]
    else:
        choices = complete(stack, f"Number {seed}:", n=rng.choice([1, 1, 2, 4]), **fields)
        found = [(choice["text"], choice["finish_reason"]) for choice in choices]
    for text, reason in found:
        if reason != "length":
            assert reason == "stop", (fields, reason)
            check_constraint(fields, text)


@pytest.mark.sends_requests
@pytest.mark.parametrize("num_requests", [16, pytest.param(400, marks=pytest.mark.slow)])
def test_answers_to_random_requests_are_valid_or_cut(
    demo_stack: Stack, num_requests: int, pytestconfig: pytest.Config
) -> None:
    """`--requests 2000` sends as many."""
    num_requests = pytestconfig.getoption("--requests") or num_requests
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(lambda seed: ask_at_random(demo_stack, seed), range(num_requests)))
    demo_stack.wait_until_clean()


def test_min_tokens_and_ignore_eos_put_off_the_end_of_a_grammar(demo_stack: Stack) -> None:
    """And a grammar that has ended ends the output."""
    for fields in ({"min_tokens": 30}, {"ignore_eos": True}):
        outputs: dict[str, Any] = {"guided_regex": "(yes|no){0,5}", "max_tokens": 40, **fields}
        for choice in complete(demo_stack, "Well,", n=2, temperature=1.0, **outputs):
            assert re.fullmatch("(yes|no){5}", choice["text"]) and choice["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_limits_of_tokens_hold_with_and_without_a_grammar(demo_stack: Stack, stream: bool) -> None:
    digits = [tokens_of(demo_stack, digit)[0] for digit in "0123456789"]
    fields: dict[str, Any] = {
        "allowed_token_ids": digits,
        "temperature": 1.0,
        "max_tokens": 30,
        "bad_words": ["7", "12"],
    }
    for constraint in ({}, {"guided_regex": "[0-9a-z]{1,60}", "min_tokens": 30}):
        if stream:
            texts = [streamed(demo_stack, "Say", **fields, **constraint)[0]]
        else:
            texts = [choice["text"] for choice in complete(demo_stack, "Say", n=3, **fields, **constraint)]
        for text in texts:
            assert re.fullmatch(r"\d{30}", text) and "7" not in text and "12" not in text


def test_a_contradiction_that_shows_on_the_way_gets_400(demo_stack: Stack) -> None:
    (a,) = tokens_of(demo_stack, "a")
    body = {"model": demo_stack.model, "prompt": "Say", "guided_regex": "a{3}b", "allowed_token_ids": [a]}
    answer = demo_stack.http.post("/v1/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "no_token_allowed")
    demo_stack.wait_until_clean()


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_becomes_too_much_work_gets_400_or_the_error_behind_its_tokens(
    demo_stack: Stack, stream: bool
) -> None:
    body = {"model": demo_stack.model, "prompt": "So", "max_tokens": 30, "stream": stream}
    body |= {"guided_grammar": TOO_AMBIGUOUS, "min_tokens": 30}
    answer = demo_stack.http.post("/v1/completions", json=body)
    if not stream:
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "grammar_failed")
        assert "<state>" not in answer.text
    else:
        *_, last, done = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
        assert (json.loads(last)["error"]["code"], done) == ("grammar_failed", "[DONE]")
    demo_stack.wait_until_clean()


def tokens_of(stack: Stack, text: str) -> list[int]:
    answer = stack.http.post("/tokenize", json={"prompt": text, "add_special_tokens": False})
    tokens: list[int] = answer.raise_for_status().json()["tokens"]
    return tokens
