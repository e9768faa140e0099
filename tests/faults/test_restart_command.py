"""`kvrelay restart` of every worker of a stack under load: no request fails, every output is that of an undisturbed
run."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.fakes.command import command
from tests.fakes.stack import Stack

restart = command("restart")

PROMPTS = [[7 + number, *range(20, 90)] for number in range(8)]
MAX_TOKENS = 64


@pytest.mark.timeout(600)
def test_restarts_one_after_the_other_fail_nothing(tmp_path: Path) -> None:
    with Stack(None, tmp_path, "--prefill", "2", "--decode", "2") as stack:
        expected = [stack.complete(prompt, MAX_TOKENS)["token_ids"] for prompt in PROMPTS]
        done = threading.Event()

        def ask_again(number: int) -> int:
            count = 0
            while not done.is_set():
                assert stack.complete(PROMPTS[number], MAX_TOKENS)["token_ids"] == expected[number]
                count += 1
            return count

        with ThreadPoolExecutor(len(PROMPTS)) as clients:
            counts = [clients.submit(ask_again, number) for number in range(len(PROMPTS))]
            before = stack.children()
            try:
                for name in ("decode-0", "prefill-0", "decode-1", "prefill-1"):
                    assert restart([name, "--state-dir", str(tmp_path)]) == 0
            finally:
                done.set()
        num_requests = sum(count.result() for count in counts)
        after = stack.children()
        assert {name for name in before if before[name] != after[name]} == before.keys() - {"router"}
        requests = stack.fleet()["requests"]
        print(f"{num_requests} requests, {requests['retries']} retries")
        assert num_requests > 4 * len(PROMPTS) and requests["failed"] == 0
