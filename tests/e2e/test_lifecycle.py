"""Requests and whole systems from their beginning to their end, however they end: nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import socket
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
from tests.fakes.stack import Stack
from tests.fakes.waiting import PATIENCE_S, until, wait_until

BLOCK = 16
SMALL = ("--dtype", "float32", "--threads", "1", "--token-budget", "128", "--max-running", "64", "--num-blocks", "600")


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed * 7919 + length).choices(range(4, 2048), k=length)


def body_of(stack: Stack, **parameters: Any) -> dict[str, Any]:
    values = {"model": stack.model, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return values | {"prompt": prompt_of(60), "max_tokens": 20} | parameters


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(DEMO_MODEL, tmp_path_factory.mktemp("stack"), *SMALL) as running:
        yield running


def steps_taken(stack: Stack) -> int:
    return int(sum(worker["totals"]["steps"] for role in ("prefill", "decode") for worker in stack.workers(role)))


# -- clients that go away ---------------------------------------------------------------------------------------------


async def wait_for_blocks(stack: Stack, role: str, owner: str) -> None:
    await until(lambda: any(worker["blocks"][owner] for worker in stack.workers(role)))


async def leave_once(stack: Stack, body: dict[str, Any], role: str, owner: str) -> None:
    """Sends a request and closes the connection as soon as a worker holds such a block for it."""
    async with httpx.AsyncClient(base_url=stack.base_url, timeout=2 * PATIENCE_S) as client:
        request = asyncio.create_task(client.post("/v1/completions", json=body))
        await wait_for_blocks(stack, role, owner)
        assert not request.done()
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("role", "owner"), [("prefill", "computing"), ("decode", "running")])
def test_a_client_that_leaves_frees_everything(stack: Stack, stream: bool, role: str, owner: str) -> None:
    long = {"prompt": prompt_of(7000, seed=stream), "max_tokens": 1000} if role == "prefill" else {"max_tokens": 4000}
    asyncio.run(leave_once(stack, body_of(stack, stream=stream, **long), role, owner))
    stack.wait_until_clean()
    steps = steps_taken(stack)
    assert stack.complete([5, 6, 7], 1)["finish_reason"] == "length"
    assert steps_taken(stack) == steps + 1  # the request that left is in no later step


def test_a_hundred_requests_that_finish_leave_or_are_refused_leave_nothing(stack: Stack) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)

    async def finish(client: httpx.AsyncClient, body: dict[str, Any]) -> str:
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert len(answer.json()["choices"][0]["token_ids"]) == body["max_tokens"]
        return "finished"

    async def leave(client: httpx.AsyncClient, body: dict[str, Any], after_s: float) -> str:
        try:
            async with asyncio.timeout(after_s):
                async with client.stream("POST", "/v1/completions", json=body) as answer:
                    async for _ in answer.aiter_bytes():
                        pass
        except TimeoutError:
            return "left"
        return "finished"

    async def refuse(client: httpx.AsyncClient, body: dict[str, Any]) -> str:
        answer = await client.post("/v1/completions", json=body | {"temperature": -1})
        assert answer.status_code == 400
        return "refused"

    async def run() -> list[str]:
        limits = httpx.Limits(max_connections=100)
        async with httpx.AsyncClient(base_url=stack.base_url, timeout=2 * PATIENCE_S, limits=limits) as client:

            async def one(number: int) -> str:
                await asyncio.sleep(rng.random() * 4)
                prompt = prompt_of(rng.choice([1, 16, 17, 100, 300]), number % 20)
                body = body_of(stack, prompt=prompt, max_tokens=rng.randint(1, 30), stream=False)
                match number % 5:
                    case 0:
                        return await refuse(client, body)
                    case 1 | 2:
                        return await finish(client, body)
                    case _:
                        body |= {"stream": bool(number % 2), "max_tokens": 400}
                        return await leave(client, body, rng.random() ** 2 * 3)

            return await asyncio.gather(*(one(number) for number in range(100)))

    before = stack.fleet()["requests"]
    outcomes = asyncio.run(run())
    stack.wait_until_clean()
    after = stack.fleet()["requests"]
    assert outcomes.count("refused") == 20
    assert outcomes.count("left") > 20
    assert after["running"] == 0
    assert after["failed"] == before["failed"]
    assert after["finished"] - before["finished"] >= outcomes.count("finished")


def test_a_client_that_sends_half_a_request_holds_nothing(stack: Stack) -> None:
    host, port = stack.base_url.removeprefix("http://").split(":")
    before = stack.fleet()["requests"]["submitted"]
    for rest in (b"", b'{"model": "kvrelay-demo", "prompt": "x"'):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n" + rest)
    stack.wait_until_clean()
    assert stack.fleet()["requests"]["submitted"] == before


# -- who did what -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 16, 17, 128, 129, 500])
def test_every_prompt_block_was_handed_over_or_cached_at_decode(stack: Stack, length: int) -> None:
    for turn in range(2):
        name = f"blocks-{length}-{turn}"
        body = body_of(stack, prompt=prompt_of(length, seed=77))
        answer = stack.http.post("/v1/completions", json=body, headers={"x-request-id": name})
        assert answer.status_code == 200
        record = stack.http.get(f"/requests/{name}").json()
        (sequence,) = record["sequences"]
        usage = sequence["usage"]
        num_blocks = -(-length // BLOCK)
        assert usage["prompt_blocks"] == num_blocks
        assert usage["received_blocks"] + usage["cached_blocks"] == num_blocks
        assert usage["computed_blocks"] == 0
        assert usage["cached_blocks"] == (0 if turn == 0 else (length - 1) // BLOCK)
        assert record["num_attempts"] == 1
        assert answer.json()["usage"]["prompt_tokens"] == length


def test_the_next_turn_of_a_conversation_finds_the_last_one_in_both_caches(stack: Stack) -> None:
    first = prompt_of(70, seed=5)
    answer = stack.complete(first, 45, ignore_eos=True)
    second = first + answer["token_ids"] + prompt_of(20, seed=6)
    told = stack.http.post(
        "/v1/completions", json=body_of(stack, prompt=second), headers={"x-request-id": "second-turn"}
    ).json()
    (sequence,) = stack.http.get("/requests/second-turn").json()["sequences"]
    # Prefill has seen the first prompt only; decode also has the answer, of which the last token was never fed.
    assert told["usage"]["prompt_tokens_details"]["cached_tokens"] == len(first) // BLOCK * BLOCK
    assert sequence["cached_tokens"] == len(first) // BLOCK * BLOCK
    assert sequence["usage"]["cached_blocks"] == (len(first) + 45 - 1) // BLOCK
    assert sequence["usage"]["received_blocks"] == -(-len(second) // BLOCK) - sequence["usage"]["cached_blocks"]
    assert sequence["usage"]["computed_blocks"] == 0


# -- systems of other shapes ------------------------------------------------------------------------------------------


class Stream(threading.Thread):
    """Reads a stream in the background: its tokens, how it finished, and whether it ended as it must."""

    def __init__(self, stack: Stack, body: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.last_line = ""
        self.begun = threading.Event()
        self._url = f"{stack.base_url}/v1/completions"
        self._body = body | {"stream": True}
        self.start()

    def run(self) -> None:
        with httpx.stream("POST", self._url, json=self._body, timeout=2 * PATIENCE_S) as answer:
            for line in answer.iter_lines():
                self._take(line)

    def _take(self, line: str) -> None:
        if not line:
            return
        self.last_line = line
        if line != "data: [DONE]":
            (choice,) = json.loads(line.removeprefix("data: "))["choices"]
            self.token_ids += choice["token_ids"]
            self.finish_reason = choice["finish_reason"] or self.finish_reason
            self.begun.set()


@contextmanager
def family_of(stack: Stack) -> Iterator[list[psutil.Process]]:
    """All processes of a system; in the end none of them is left."""
    root = psutil.Process(stack.process.pid)
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
        assert len(family) == 1 + 1 + 1 + 4  # up, redis, router, workers
        expected = stack.complete(prompt_of(60), 150, ignore_eos=True)["token_ids"]
        streams = [Stream(stack, body_of(stack, max_tokens=150)) for _ in range(8)]
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
        jobs = [(prompt_of(20 + 11 * (n % 12), n), 90 + 5 * (n % 7)) for n in range(30)]
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


# -- starts that fail -------------------------------------------------------------------------------------------------


def failed_start(tmp_path: Path, *flags: str) -> tuple[int, str]:
    """Exit status and what was said."""
    command = [sys.executable, "-m", "kvrelay.cli.main", "up", "--port", "0", "--state-dir", str(tmp_path / "state")]
    done = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=2 * PATIENCE_S)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--model", "/nowhere/at/all"), ("/nowhere/at/all", "config.json")),
        (("--prefill", "-1"), ("--prefill", "-1")),
        (("--decode", "0"), ("--decode",)),
        (("--dtype", "float64"), ("--dtype", "float64", "bfloat16")),
        (("--block-size", "12"), ("--block-size", "power of two")),
        (("--max-running", "1000"), ("max_running", "token_budget")),
        (("--otter",), ("--otter",)),
        (("--redis", "http://127.0.0.1"), ("redis://",)),
    ],
)
def test_flags_that_make_no_sense_are_refused_at_once(
    tmp_path: Path, flags: tuple[str, ...], words: tuple[str]
) -> None:
    status, output = failed_start(tmp_path, *flags)
    assert status == 2, output
    assert all(word in output for word in words), output
    assert "Traceback" not in output


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        status, output = failed_start(tmp_path, "--port", str(port))
    assert status == 2
    assert str(port) in output
    assert "--port" in output


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_ends_the_start_with_its_reason(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (broken / name).write_bytes((DEMO_MODEL / name).read_bytes())
    status, output = failed_start(tmp_path, "--model", str(broken), "--threads", "1")
    assert status == 1, output
    assert "before it was ready" in output
    assert str(broken) in output


def test_an_interrupt_during_the_start_ends_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvrelay.cli.main", "up", "--port", "0", "--state-dir", str(tmp_path)]
    with (tmp_path / "out").open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
    root = psutil.Process(process.pid)
    wait_until(lambda: len(root.children(recursive=True)) >= 4 or process.poll() is not None)
    family = root.children(recursive=True)
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE_S) in (0, 130)
    _, alive = psutil.wait_procs(family, timeout=PATIENCE_S)
    assert not alive
