"""Hostile grammars get 400 beside streams that go on with the same tokens."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.demo_stack.test_constrained_output import streamed
from tests.fakes.hostile_grammars import ENDLESS, HEAVY, REFUSED
from tests.fakes.stack import Stack

pytestmark = pytest.mark.e2e

STREAMS: list[dict[str, Any]] = [
    {"max_tokens": 300, "ignore_eos": True},
    {"max_tokens": 200, "ignore_eos": True},
    {"max_tokens": 150, "guided_regex": "([a-z]{1,9} ){40}"},
    {"max_tokens": 150, "guided_json": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 40}},
]


def read(stack: Stack, number: int) -> tuple[str, str | None]:
    return streamed(stack, f"Story {number}:", temperature=0.0, **STREAMS[number])


def test_hostile_grammars_are_refused_beside_streams(demo_stack: Stack) -> None:
    alone = [read(demo_stack, number) for number in range(len(STREAMS))]
    with ThreadPoolExecutor(12) as pool:
        reading = [pool.submit(read, demo_stack, number % len(STREAMS)) for number in range(2 * len(STREAMS))]
        asked = {
            name: pool.submit(
                demo_stack.http.post, "/v1/completions", json={"model": demo_stack.model, "prompt": "So", **fields}
            )
            for name, fields in (ENDLESS | REFUSED | HEAVY).items()
        }
        again = pool.submit(read, demo_stack, 2)
        answers = {name: each.result() for name, each in asked.items()}
        assert [each.result() for each in reading] == alone * 2
        assert again.result() == alone[2]
    for name in ENDLESS | REFUSED:
        error = answers[name].json()["error"]
        field = next(iter((ENDLESS | REFUSED)[name]))
        assert (answers[name].status_code, error["param"]) == (400, field), (name, error)
        assert len(error["message"]) < 2000
    for name in HEAVY:
        assert answers[name].status_code in (200, 400), answers[name].text
    assert all("to compile" in answers[name].json()["error"]["message"] for name in ENDLESS)  # time or memory
    demo_stack.wait_until_clean()
