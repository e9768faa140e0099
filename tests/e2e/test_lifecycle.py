"""Whole systems of several shapes from their beginning to their end, however they end: nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.conftest import DEMO_MODEL
from tests.e2e.prompts import body_of, prompt_of
from tests.fakes.stack import Stack
from tests.fakes.waiting import PATIENCE_S, wait_until

SMALL = ("--dtype", "float32", "--threads", "1", "--token-budget", "128", "--max-running", "64", "--num-blocks", "600")


class Stream(threading.Thread):
    """Reads a stream in the background: its tokens, how it finished, and whether it ended as it must."""

    def __init__(self, stack: Stack, body: dict[str, Any], path: str = "/v1/completions") -> None:
        super().__init__(daemon=True)
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.last_line = ""
        self.begun = threading.Event()
        self._url = f"{stack.base_url}{path}"
        self._body = body | {"stream": True}
        self.start()

    def run(self) -> None:
        with httpx.stream("POST", self._url, json=self._body, timeout=2 * PATIENCE_S) as answer:
            for line in answer.iter_lines():
                self._take(line)

    def _take(self, line: str) -> None:
        if not line or line.startswith(":"):  # a sign of life
            return
        self.last_line = line
        if line != "data: [DONE]":
            (choice,) = json.loads(line.removeprefix("data: "))["choices"]
            self.token_ids += choice.get("token_ids") or []
            self.finish_reason = choice["finish_reason"] or self.finish_reason
            self.begun.set()


@contextmanager
def family_of(stack: Stack) -> Iterator[list[psutil.Process]]:
    """All processes of a system; in the end none of them is left."""
    root = psutil.Process(stack.process.pid)

    def has_compiler() -> bool:
        return any("kvrelay.text.grammar_check" in each.cmdline() for each in root.children(recursive=True))

    wait_until(has_compiler)  # the router starts it while it serves
    family = [root, *root.children(recursive=True)]
    yield family
    _, alive = psutil.wait_procs(family, timeout=PATIENCE_S)
    assert not alive


@pytest.mark.slow
def test_two_of_each_share_the_work_and_ctrl_c_lets_every_stream_end(tmp_path: Path) -> None:
    with (
        # Every other policy may choose one worker for all: the one that caches the prompt, or the one that was faster.
        Stack(
            DEMO_MODEL, tmp_path, *SMALL, "--prefill", "2", "--decode", "2", "--routing-policy", "round_robin"
        ) as stack,
        family_of(stack) as family,
    ):
        assert len(family) == 1 + 1 + 2 + 4  # up, redis, router and its compiler of grammars, workers
        expected = stack.complete(prompt_of(60), 400, ignore_eos=True)["token_ids"]
        streams = [Stream(stack, body_of(stack, max_tokens=400)) for _ in range(8)]
        assert all(stream.begun.wait(PATIENCE_S) for stream in streams)
        # A stream begins before its handoff ends.
        wait_until(lambda: all(worker["totals"]["handed_over"] for worker in stack.workers("prefill")))
        wait_until(lambda: all(worker["totals"]["handoffs_committed"] for worker in stack.workers("decode")))
        assert stack.stop() == 0
        for stream in streams:
            stream.join(PATIENCE_S)
            assert stream.token_ids == expected
            assert stream.finish_reason == "length"
            assert stream.last_line == "data: [DONE]"
    output = (tmp_path / "up.log").read_text()
    assert "decode-1" in output
    assert "Stopping" in output


@pytest.mark.slow
def test_decode_alone_serves_when_there_is_no_prefill_and_kill_9_leaves_no_process(tmp_path: Path) -> None:
    with Stack(DEMO_MODEL, tmp_path, *SMALL, "--prefill", "0") as stack, family_of(stack):
        body = body_of(stack, prompt=prompt_of(40))
        answer = stack.http.post("/v1/completions", json=body, headers={"x-request-id": "alone"})
        assert len(answer.json()["choices"][0]["token_ids"]) == 20
        assert "x-kvrelay-prefill" not in answer.headers
        assert answer.headers["x-kvrelay-decode"] == "decode-0"
        (sequence,) = stack.http.get("/requests/alone").json()["sequences"]
        assert sequence["usage"] == {
            "prompt_blocks": 3,
            "received_blocks": 0,
            "cached_blocks": 0,
            "computed_blocks": 3,
        }
        assert stack.fleet()["fallback"]["active"] is True
        stack.wait_until_clean()
        stack.process.kill()


@pytest.mark.slow
def test_a_small_pool_serves_more_than_it_holds_and_refuses_what_it_never_can(tmp_path: Path) -> None:
    flags = ("--dtype", "float32", "--threads", "1", "--token-budget", "128", "--max-running", "64")
    with Stack(DEMO_MODEL, tmp_path, *flags, "--num-blocks", "40") as stack:
        jobs = [(prompt_of(20 + 11 * (n % 12), seed=n), 90 + 5 * (n % 7)) for n in range(30)]
        alone = [stack.complete(*job, ignore_eos=True)["token_ids"] for job in jobs[:3]]

        async def run() -> list[list[int]]:
            async with httpx.AsyncClient(base_url=stack.base_url, timeout=2 * PATIENCE_S) as client:

                async def one(prompt: list[int], max_tokens: int) -> list[int]:
                    body = body_of(stack, prompt=prompt, max_tokens=max_tokens)
                    answer = await client.post("/v1/completions", json=body)
                    assert answer.status_code == 200, answer.text
                    token_ids: list[int] = answer.json()["choices"][0]["token_ids"]
                    return token_ids

                return await asyncio.gather(*(one(*job) for job in jobs))

        outputs = asyncio.run(run())
        assert [len(output) for output in outputs] == [max_tokens for _, max_tokens in jobs]
        assert outputs[:3] == alone
        assert sum(worker["totals"]["preemptions"] for worker in stack.workers("decode")) > 0
        stack.wait_until_clean()
        for prompt, max_tokens in ((prompt_of(641), 1), (prompt_of(600), 41), (prompt_of(640), 1)):
            answer = stack.http.post("/v1/completions", json=body_of(stack, prompt=prompt, max_tokens=max_tokens))
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["code"] == "context_length_exceeded"
            assert "640" in answer.json()["error"]["message"]
        assert len(stack.complete(prompt_of(600), 40, ignore_eos=True)["token_ids"]) == 40
        stack.wait_until_clean()


def test_a_worker_that_is_stopped_while_it_compiles_ends_with_its_compiler(tmp_path: Path) -> None:
    """Loading goes on in a thread, which a worker cannot stop: it leaves without it."""
    compiler = tmp_path / "gcc"
    compiler.write_text(f"#!/bin/sh\n[ $1 = --version ] && exit\nsleep {10 * PATIENCE_S} &\nwait\n")
    compiler.chmod(0o755)
    environ = os.environ | {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "KVRELAY_CACHE_DIR": str(tmp_path / "cache"),
    }
    command = [sys.executable, "-m", "kvrelay.cli.main", "decode", "--redis", "none", "--http-port", "0"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, env=environ, stdout=log, stderr=log)
    root = psutil.Process(process.pid)
    wait_until(lambda: len(root.children(recursive=True)) >= 2 or process.poll() is not None)
    family = root.children(recursive=True)
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == 0, (tmp_path / "log").read_text()
    _, alive = psutil.wait_procs(family, timeout=PATIENCE_S)
    assert family and not alive
