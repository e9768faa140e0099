"""Workers are killed while drafts are verified: each stream has the tokens of an undisturbed run without drafts."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.prompts import prompt_of
from tests.e2e.test_lifecycle import Stream
from tests.fakes.stack import Stack
from tests.fakes.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.timeout(900)  # the undisturbed runs take minutes on a busy machine
DEMO_MODEL = Path(__file__).parents[2] / "models" / "demo"
FLAGS = ("--dtype", "float32", "--threads", "1", "--prefill", "2", "--decode", "2", "--routing-policy", "round_robin")
NUM_STREAMS = 8
MAX_TOKENS = 300


def body_of(stack: Stack, number: int, **parameters: Any) -> dict[str, Any]:
    """A prompt that repeats a text. Half of the requests are greedy, the others seeded; of these, half sample among few
    tokens, so that drafts are often rejected."""
    text = prompt_of(40, seed=number)
    few = {"allowed_token_ids": text[:12]} if number % 4 == 3 else {}
    return {
        "model": stack.model,
        "prompt": text * 5,
        "max_tokens": MAX_TOKENS,
        "temperature": 0.6 * (number % 2),
        "seed": number,
        "ignore_eos": True,
        "return_token_ids": True,
        **few,
        **parameters,
    }


def num_drafts(stack: Stack, kind: str) -> int:
    """`drafted_tokens` or `accepted_tokens` of the decode workers that run."""
    return sum(worker["totals"].get(kind, 0) for worker in stack.workers("decode"))


def kill(stack: Stack, name: str) -> None:
    os.kill(stack.children()[name], signal.SIGKILL)


def check_and_wait_for_all(stack: Stack, streams: list[Stream], expected: list[list[int]]) -> None:
    for stream, token_ids in zip(streams, expected, strict=True):
        stream.join(PATIENCE_S)
        assert stream.token_ids == token_ids
        assert stream.finish_reason == "length" and stream.last_line == "data: [DONE]"
    wait_until(lambda: len(stack.children()) == 5 and all(each["state"] == "ready" for each in stack.workers()))


@pytest.mark.parametrize("method", [pytest.param("ngram", marks=pytest.mark.always), "suffix"])
def test_drafted_streams_go_on_with_the_same_tokens_when_workers_are_killed(tmp_path: Path, method: str) -> None:
    with Stack(DEMO_MODEL, tmp_path, *FLAGS, "--speculation", method) as stack:
        expected = []
        for number in range(NUM_STREAMS):
            body = body_of(stack, number, speculation="off")
            answer = stack.http.post("/v1/completions", json=body).raise_for_status().json()
            expected.append(answer["choices"][0]["token_ids"])
        assert num_drafts(stack, "drafted_tokens") == 0
        bodies = [body_of(stack, number) for number in range(NUM_STREAMS)]

        # `suffix` finds these outputs in the next runs.
        check_and_wait_for_all(stack, [Stream(stack, body) for body in bodies], expected)
        drafted = num_drafts(stack, "drafted_tokens")
        assert 0 < num_drafts(stack, "accepted_tokens") < drafted

        for victim in ("decode-0", "decode-1"):
            drafted = num_drafts(stack, "drafted_tokens")
            streams = [Stream(stack, body) for body in bodies]
            wait_until(partial(has_drafted_more, stack, drafted))
            kill(stack, victim)
            check_and_wait_for_all(stack, streams, expected)

        for victim in ("prefill-0", "prefill-1"):
            handed_over = num_handed_over(stack)
            streams = [Stream(stack, body) for body in bodies]
            wait_until(partial(has_handed_over_more, stack, handed_over))
            kill(stack, victim)
            check_and_wait_for_all(stack, streams, expected)

        streams = [Stream(stack, body) for body in bodies]
        assert streams[0].begun.wait(PATIENCE_S)
        for victim in ("prefill-1", "decode-1"):
            kill(stack, victim)
        check_and_wait_for_all(stack, streams, expected)
        stack.wait_until_clean()


def has_drafted_more(stack: Stack, before: int) -> bool:
    return num_drafts(stack, "drafted_tokens") > before


def has_handed_over_more(stack: Stack, before: int) -> bool:
    return num_handed_over(stack) > before


def num_handed_over(stack: Stack) -> int:
    return sum(worker["totals"]["handed_over"] for worker in stack.workers("prefill"))
