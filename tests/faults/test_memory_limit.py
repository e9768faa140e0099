"""Workers under the memory limit of a control group, as a container's. The kernel kills one that reaches it, and no
stream notices; under what `kvrelay size` prints none does; under too little it does not start.

Needs the right to make control groups.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvrelay.process import HeldPort
from tests.e2e.conftest import DEMO_MODEL
from tests.e2e.test_lifecycle import Stream
from tests.fakes.memory_groups import MemoryGroup, memory_group
from tests.fakes.stack import Stack
from tests.fakes.waiting import PATIENCE_S, wait_until

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


POOL = ("--kv-memory-bytes=256MiB", "--dtype=float32")
COMMAND = (sys.executable, "-m", "kvrelay")


def start_worker(group: MemoryGroup, log: Path, *flags: str) -> subprocess.Popen[bytes]:
    """A decode worker without Redis that is in the group from its start."""
    shell = ["sh", "-c", 'read _ && exec "$@"', "sh", *COMMAND, "decode", f"--model={DEMO_MODEL}", "--redis-url=none"]
    with log.open("wb") as output:
        worker = subprocess.Popen([*shell, *flags], stdin=subprocess.PIPE, stdout=output, stderr=output)
    group.add(worker.pid)
    assert worker.stdin is not None
    worker.stdin.write(b"\n")
    worker.stdin.close()
    return worker


def answers(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False


def test_a_worker_serves_its_largest_steps_under_the_request_of_kvrelay_size(tmp_path: Path) -> None:
    printed = subprocess.run(
        [*COMMAND, "size", str(DEMO_MODEL), "--json", *POOL], check=True, capture_output=True, timeout=PATIENCE_S
    ).stdout
    request = json.loads(printed)["workers"][1]["request"]
    with memory_group() as group, ExitStack() as closing:
        pages, port = (closing.enter_context(HeldPort()).port for _ in range(2))
        group.limit(request)
        worker = start_worker(group, tmp_path / "log", *POOL, f"--http-port={pages}")
        closing.callback(worker.wait)
        closing.callback(worker.kill)
        wait_until(lambda: answers(f"http://127.0.0.1:{pages}/ready"))
        flags = [f"--model={DEMO_MODEL}", "--redis-url=none", f"--static-workers=http://127.0.0.1:{pages}"]
        router = subprocess.Popen([*COMMAND, "router", *flags, f"--port={port}"], stderr=subprocess.DEVNULL)
        closing.callback(router.wait)
        closing.callback(router.kill)
        wait_until(lambda: answers(f"http://127.0.0.1:{port}/ready"))
        body = {"model": "kvrelay-demo", "max_tokens": 40, "top_p": 0.9, "ignore_eos": True}

        def send(number: int) -> int:
            prompt = [5 + number, *range(20, 320)]
            url = f"http://127.0.0.1:{port}/v1/completions"
            return httpx.post(url, json={**body, "prompt": prompt}, timeout=PATIENCE_S).status_code

        with ThreadPoolExecutor(256) as threads:
            assert list(threads.map(send, range(256))) == [200] * 256
        assert worker.poll() is None and not group.num_killed


def test_a_worker_that_needs_more_than_the_limit_says_so_and_does_not_start(tmp_path: Path) -> None:
    with memory_group() as group:
        group.limit(1200 << 20)
        worker = start_worker(group, tmp_path / "log", "--kv-memory-bytes=1GiB", "--dtype=float32", "--http-port=0")
        assert worker.wait(PATIENCE_S) == 1 and not group.num_killed
    (line,) = [line for line in (tmp_path / "log").read_text().splitlines() if "ERROR" in line]
    assert re.search(
        r"the memory limit of this container is 1200 MiB, and the worker needs at least \d+ MiB \(.* for the pool.*\): "
        r"raise it \(`kvrelay size MODEL` prints what is needed\), or lower kv_memory_bytes",
        line,
    )
