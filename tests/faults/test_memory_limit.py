"""The kernel kills a worker that reaches the memory limit of its control group, as a container's: no stream notices.

Needs the right to make control groups.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import DEMO_MODEL
from tests.e2e.test_lifecycle import Stream
from tests.fakes.memory_groups import memory_group
from tests.fakes.stack import Stack
from tests.fakes.waiting import wait_until

pytestmark = pytest.mark.timeout(900)
FLAGS = ("--dtype", "float32", "--threads", "1", "--prefill", "2", "--decode", "2", "--routing-policy", "round_robin")
NUM_STREAMS = 8
MAX_TOKENS = 400
LIMIT_BYTES = 64 << 10
"""Less than a process takes for its next pages. What it has already counts where it started."""


def body_of(stack: Stack, number: int) -> dict[str, Any]:
    """Half of them are greedy, the others seeded."""
    return {
        "model": stack.model,
        "prompt": [5 + number, *range(20, 220)],
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
        "temperature": number % 2,
        "seed": number,
        "return_token_ids": True,
    }


@pytest.mark.parametrize("victim", ["decode-0", "prefill-0"])
def test_streams_go_on_when_the_kernel_kills_a_worker_for_its_memory(victim: str, tmp_path: Path) -> None:
    with memory_group() as group, Stack(DEMO_MODEL, tmp_path, *FLAGS) as stack:
        bodies = [body_of(stack, number) for number in range(NUM_STREAMS)]
        answers = [stack.http.post("/v1/completions", json=body).raise_for_status().json() for body in bodies]
        before = stack.children()[victim]
        streams = [Stream(stack, body) for body in bodies]
        group.limit(LIMIT_BYTES)
        group.add(before)
        while True:
            for stream, answer in zip(streams, answers, strict=True):
                stream.join()
                assert stream.token_ids == answer["choices"][0]["token_ids"]
                assert stream.finish_reason == "length" and stream.last_line == "data: [DONE]"
            if group.num_killed:  # at the first page that the process did not have
                break
            streams = [Stream(stack, body) for body in bodies]
        requests = stack.fleet()["requests"]
        assert not requests["failed"] and not requests["timed_out"], requests
        wait_until(lambda: stack.children().get(victim, before) != before)
        stack.wait_until_clean()
        assert group.num_killed == 1
        assert re.search(rf"^{victim} +died +was killed by SIGKILL when memory ran out;", stack.log(), re.MULTILINE)
