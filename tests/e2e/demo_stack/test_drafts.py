"""Drafts change no output, whatever ends it: stop strings, limits, grammars."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest

from tests.e2e.prompts import prompt_of
from tests.fakes.stack import Stack
from tests.fakes.waiting import wait_until

pytestmark = pytest.mark.e2e

METHODS = ["ngram", "suffix"]
SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 6, "pattern": "^[ab]*$"}, "wild": {"type": "boolean"}},
        "required": ["name", "wild"],
        "additionalProperties": False,
    },
    "minItems": 5,
    "maxItems": 5,
}
CONSTRAINED = {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": ""}, "max_tokens": 400}


def complete(stack: Stack, body: dict[str, Any], method: str) -> dict[str, Any]:
    """What must not depend on drafts: choices and usage."""
    answer = stack.http.post("/v1/completions", json=body | {"model": stack.model, "speculation": method})
    assert answer.status_code == 200, answer.text
    content = answer.json()
    return {"choices": content["choices"], "completion_tokens": content["usage"]["completion_tokens"]}


def repeating(number: int = 0, **parameters: Any) -> dict[str, Any]:
    """Repeats a text; the demo model goes on with some of it."""
    body = {"prompt": prompt_of(30, seed=number) * 4, "max_tokens": 80, "temperature": 0, "return_token_ids": True}
    return body | {"seed": number, "ignore_eos": True} | parameters


def accepted(stack: Stack) -> int:
    return sum(worker["totals"]["accepted_tokens"] for worker in stack.workers("decode"))


def test_drafts_are_accepted(demo_stack: Stack) -> None:
    """Drafts end where steps are measured to be slow, so it may take some requests."""
    before, expected = accepted(demo_stack), complete(demo_stack, repeating(), "off")

    def has_accepted() -> bool:
        for method in METHODS:
            assert complete(demo_stack, repeating(), method) == expected
        return accepted(demo_stack) > before

    wait_until(has_accepted)


@pytest.mark.everyday(1)
@pytest.mark.parametrize("temperature", [0, 0.6])
def test_stop_strings_and_limits_end_drafted_outputs_at_the_same_place(demo_stack: Stack, temperature: float) -> None:
    whole = complete(demo_stack, repeating(temperature=temperature), "off")["choices"][0]
    text, token_ids = whole["text"], whole["token_ids"]
    third = len(text) // 3
    bodies = [
        *(repeating(temperature=temperature, max_tokens=count) for count in (1, 2, 3, 17, 64)),
        *(repeating(temperature=temperature, stop=[text[at : at + 3]]) for at in (third, 2 * third)),
        repeating(temperature=temperature, stop=[text[third : third + 2]], include_stop_str_in_output=True),
        repeating(temperature=temperature, stop_token_ids=[token_ids[40]], min_tokens=30),
        repeating(temperature=temperature, logprobs=2, presence_penalty=0.5, repetition_penalty=1.2),
        # With seed 0 a random number of the third sample falls within rounding of the limit between two tokens, so that
        # what is computed together decides.
        repeating(temperature=temperature, n=3, seed=11),
    ]
    expected = [complete(demo_stack, body, "off") for body in bodies]
    assert {"stop", "length"} == {each["choices"][0]["finish_reason"] for each in expected}
    with ThreadPoolExecutor(8) as threads:
        for method in METHODS:
            for body, alone, drafted in zip(
                bodies,
                expected,
                threads.map(complete, [demo_stack] * len(bodies), bodies, [method] * len(bodies)),
                strict=True,
            ):
                assert without_logprobs(drafted) == without_logprobs(alone), body


def without_logprobs(answer: dict[str, Any]) -> dict[str, Any]:
    """Log-probabilities are computed in batches of other sizes, so their last digits differ."""
    choices = [{name: value for name, value in choice.items() if name != "logprobs"} for choice in answer["choices"]]
    tokens = [choice["logprobs"] and choice["logprobs"]["tokens"] for choice in answer["choices"]]
    return answer | {"choices": choices, "tokens": tokens}


@pytest.mark.everyday(1)
@pytest.mark.parametrize("method", METHODS)
def test_constrained_outputs_with_drafts_are_valid_and_the_same(demo_stack: Stack, method: str) -> None:
    """With log-probabilities nothing is jumped over, so drafts are what brings several tokens."""
    bodies = [
        repeating(number, temperature=number % 2, ignore_eos=False, **(CONSTRAINED | extra))
        for number in range(4)
        for extra in ({}, {"logprobs": 0}, {"stop": ["true"]}, {"max_tokens": 37})
    ]
    expected = [complete(demo_stack, body, "off") for body in bodies]
    with ThreadPoolExecutor(8) as threads:
        drafted = list(threads.map(complete, [demo_stack] * len(bodies), bodies, [method] * len(bodies)))
    for body, got, alone in zip(bodies, drafted, expected, strict=True):
        assert without_logprobs(got) == without_logprobs(alone), body
        (choice,) = got["choices"]
        if "stop" not in body and choice["finish_reason"] == "stop":
            jsonschema.validate(json.loads(choice["text"]), SCHEMA)
    assert "stop" in {each["choices"][0]["finish_reason"] for each in drafted}
