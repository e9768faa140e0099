"""Decode workers are killed while they write constrained answers: each stream has the tokens of an undisturbed run, and
is valid JSON."""

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

pytestmark = pytest.mark.timeout(900)  # the undisturbed run takes minutes on a busy machine
DEMO_MODEL = Path(__file__).parents[2] / "models" / "demo"
FLAGS = ("--dtype", "float32", "--threads", "1", "--prefill", "1", "--decode", "2", "--routing-policy", "round_robin")
PROPERTIES = {
    "customer_name": {"type": "string", "maxLength": 8},
    "preferred_colour": {"enum": ["dark red", "dark blue", "bright yellow"]},
    "number_of_visits": {"type": "integer", "minimum": 0, "maximum": 9999},
}
RECORD = {
    "type": "object",
    "properties": PROPERTIES,
    "required": [*PROPERTIES],
    "additionalProperties": False,
}
SEEDS = (0, 21, 2, 23, 4, 35, 6, 27)
"""With these seeds no random number comes closer than 1e-5 to a limit between two tokens. At 1e-6 rounding in float32
decides, and a resumed stream computes its KV in another order."""
SCHEMA = {"type": "array", "items": RECORD, "minItems": 16, "maxItems": 16}


def body_of(stack: Stack, number: int) -> dict[str, Any]:
    """Half of them are greedy, the others seeded; half of these bring log-probabilities, so nothing is jumped over."""
    return {
        "model": stack.model,
        "prompt": [5 + number, *range(20, 60)],
        "max_tokens": 900,
        "temperature": number % 2,
        "seed": SEEDS[number],
        "return_token_ids": True,
        "structured_outputs": {"json": SCHEMA, "whitespace_pattern": ""},
        **({"logprobs": 0} if number % 4 == 3 else {}),
    }


@pytest.mark.always
def test_streams_go_on_with_the_same_tokens_when_their_decode_worker_is_killed(tmp_path: Path) -> None:
    with Stack(DEMO_MODEL, tmp_path, *FLAGS) as stack:
        bodies = [body_of(stack, number) for number in range(len(SEEDS))]
        answers = [stack.http.post("/v1/completions", json=body).raise_for_status().json() for body in bodies]
        expected = [answer["choices"][0] for answer in answers]
        for choice in expected:
            jsonschema.validate(json.loads(choice["text"]), SCHEMA)
        before = {worker["worker_id"]: worker["totals"]["handoffs_committed"] for worker in stack.workers("decode")}
        streams = [Stream(stack, body) for body in bodies]
        wait_until(
            lambda: all(
                worker["totals"]["handoffs_committed"] > before[worker["worker_id"]]
                for worker in stack.workers("decode")
            )
        )
        os.kill(stack.children()["decode-0"], signal.SIGKILL)
        for stream, choice in zip(streams, expected, strict=True):
            stream.join(PATIENCE_S)
            assert stream.token_ids == choice["token_ids"]
            assert stream.finish_reason == "stop" and stream.last_line == "data: [DONE]"
        stack.wait_until_clean()
