"""A fleet of simulated devices under the real router, Redis and services: what every stream must say is known."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import pytest

from kvrelay.protocol.sampling import Sampling
from kvrelay.simulated.simulated_model import continuation, read_facts
from tests.e2e.conftest import DEMO_MODEL
from tests.fakes.stack import Stack
from tests.fakes.waiting import PATIENCE_S, until

pytestmark = pytest.mark.e2e

PROFILE = {
    "name": "quick",
    "fixed_s": 0.002,
    "token_s": 1e-5,
    "pair_s": 0.0,
    "kv_bytes_per_token": 1000,
    "kv_tokens": 16 * 1024,
    "transfer_bytes_s": 1e9,
}
VOCABULARY = read_facts(str(DEMO_MODEL)).vocabulary


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Stack]]:
    stacks: list[Stack] = []

    def starter(*flags: str, environ: Mapping[str, str] = MappingProxyType({}), **facts: float) -> Stack:
        profile = tmp_path / "quick.json"
        profile.write_text(json.dumps(PROFILE | facts))
        simulated = ("--backend", "simulated", "--profile", str(profile))
        stacks.append(Stack(DEMO_MODEL, tmp_path / "state", *simulated, *flags, environ=environ))
        return stacks[-1]

    yield starter
    for stack in stacks:
        stack.stop()


def prompts(count: int, seed: int) -> list[list[int]]:
    """Some of them begin alike."""
    rng = random.Random(seed)
    shared = rng.choices(range(3, 2048), k=100)
    return [
        shared[: rng.choice([0, 0, 40, 100])] + rng.choices(range(3, 2048), k=rng.randint(1, 400)) for _ in range(count)
    ]


def expected(prompt: list[int], parameters: dict[str, Any], sequence: int = 0) -> list[int]:
    known = {
        name: parameters[name] for name in ("temperature", "seed", "max_tokens", "ignore_eos") if name in parameters
    }
    return continuation(prompt, Sampling(**known), VOCABULARY, 8192, sequence)


async def streamed(client: httpx.AsyncClient, body: dict[str, Any], begun: asyncio.Event | None = None) -> list[int]:
    """A stream's tokens; it must end as streams do."""
    token_ids: list[int] = []
    last = ""
    async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                choices = json.loads(line.removeprefix("data: "))["choices"]
                token_ids += [token for choice in choices for token in choice["token_ids"]]
                if begun is not None:
                    begun.set()
            last = line or last
    assert last == "data: [DONE]"
    return token_ids


def test_sixteen_workers_in_two_processes_give_every_stream_its_tokens(start: Callable[..., Stack]) -> None:
    stack = start("--prefill", "8", "--decode", "8", "--num-workers", "8")
    assert set(stack.children()) == {"router", "prefill-0", "decode-0"}
    assert len(stack.workers("prefill")) == len(stack.workers("decode")) == 8
    bodies: list[dict[str, Any]] = [
        {"model": stack.model, "return_token_ids": True, "prompt": prompt, "max_tokens": 40}
        | ({"temperature": 0} if number % 2 else {"temperature": 1, "seed": number})
        for number, prompt in enumerate(prompts(60, seed=1))
    ]

    async def run() -> list[list[int]]:
        async with httpx.AsyncClient(base_url=stack.base_url, timeout=2 * PATIENCE_S) as client:
            return await asyncio.gather(*(streamed(client, body) for body in bodies))

    assert asyncio.run(run()) == [expected(body["prompt"], body) for body in bodies]
    assert sum(worker["totals"]["handoffs_committed"] for worker in stack.workers("decode")) > 0
    assert sum(worker["totals"]["local_prompts"] for worker in stack.workers("decode")) == 0
    stack.wait_until_clean()
    assert stack.stop() == 0
    logs = [path.read_text() for path in stack.state_dir.glob("*/*.log")]
    assert len(logs) == 3
    assert not any(" ERROR " in log for log in logs)
    assert all(f"worker_id=decode-0-{number}\n" in "".join(logs) for number in range(8))


def test_prompts_stay_on_decode_once_a_link_was_slower_than_computing_them(start: Callable[..., Stack]) -> None:
    slow = {"kv_bytes_per_token": 100_000, "transfer_bytes_s": 1e8}  # so 700 tokens are on their way for 0.7 s
    stack = start(environ={"KVRELAY_LOCAL_PREFILL_TOKENS": ""}, **slow)
    all_prompts = [random.Random(number).choices(range(3, 2048), k=700) for number in range(4)]

    async def run() -> list[list[int]]:
        outputs = []
        async with httpx.AsyncClient(base_url=stack.base_url, timeout=2 * PATIENCE_S) as client:
            for prompt in all_prompts:
                body = {"model": stack.model, "prompt": prompt, "return_token_ids": True, "max_tokens": 4}
                outputs.append(await streamed(client, body | {"temperature": 0}))
                stack.workers()  # the router has what they measured
        return outputs

    assert asyncio.run(run()) == [expected(prompt, {"max_tokens": 4, "temperature": 0}) for prompt in all_prompts]
    (decode,) = stack.workers("decode")
    assert (decode["totals"]["handoffs_committed"], decode["totals"]["local_prompts"]) == (1, 3)
    (log,) = stack.state_dir.glob("*/prefill-0.log")
    assert log.read_text().count("KV blocks reach decode-0 at ") == 1


@pytest.mark.parametrize("num_prefill", [0, 1])
def test_groups_in_lockstep_give_every_stream_its_tokens(start: Callable[..., Stack], num_prefill: int) -> None:
    """Ranks that compute prompts, with the prefill delayer, and ranks that take them over from others."""
    delayer = () if num_prefill else ("--prefill-delayer",)
    stack = start(f"--prefill={num_prefill}", "--data-parallel-size=4", "--max-running=4", *delayer)
    names = ["decode-0", "decode-0-dp1", "decode-0-dp2", "decode-0-dp3"]
    assert sorted(worker["worker_id"] for worker in stack.workers("decode")) == names
    bodies: list[dict[str, Any]] = [
        {"model": stack.model, "return_token_ids": True, "prompt": prompt, "max_tokens": 40, "temperature": 0}
        for prompt in prompts(40, seed=4)
    ]

    async def run() -> list[list[int]]:
        async with httpx.AsyncClient(base_url=stack.base_url, timeout=2 * PATIENCE_S) as client:
            return await asyncio.gather(*(streamed(client, body) for body in bodies))

    assert asyncio.run(run()) == [expected(body["prompt"], body) for body in bodies]
    stack.wait_until_clean()
    totals = [worker["totals"] for worker in stack.workers("decode")]
    assert all(each["handoffs_committed"] if num_prefill else each["local_prompts"] for each in totals)
    if not num_prefill:
        assert all(any(name.startswith("prefill_delayer.") for name in each) for each in totals)
    assert stack.stop() == 0
    logs = [path.read_text() for path in stack.state_dir.glob("*/*.log")]
    assert not any(" ERROR " in log for log in logs)


def test_samples_text_and_logprobs_come_as_with_a_model(start: Callable[..., Stack]) -> None:
    stack = start()
    prompt = prompts(1, seed=3)[0]
    sampling = {"temperature": 1, "seed": 5, "max_tokens": 30, "ignore_eos": True}
    body = {"model": stack.model, "prompt": prompt, "return_token_ids": True, "n": 3, "logprobs": 2} | sampling
    choices = stack.http.post("/v1/completions", json=body).raise_for_status().json()["choices"]
    assert [choice["token_ids"] for choice in choices] == [expected(prompt, sampling, n) for n in range(3)]
    assert all(len(choice["logprobs"]["token_logprobs"]) == 30 for choice in choices)
    chat = {"model": stack.model, "messages": [{"role": "user", "content": "otter"}], "max_tokens": 20}
    answer = stack.http.post("/v1/chat/completions", json=chat).raise_for_status().json()
    assert answer["choices"][0]["message"]["content"]


@pytest.mark.slow
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_process_of_many_workers_that_is_killed_costs_no_stream_a_token(
    start: Callable[..., Stack], role: str
) -> None:
    """Long enough to be in the middle of it whenever the kill comes: it waits until every stream has begun."""
    stack = start("--prefill", "8", "--decode", "8", "--num-workers", "4", "--max-attempts", "10")
    killed = stack.children()[f"{role}-0"]
    parameters = {"temperature": 0, "max_tokens": 1500, "ignore_eos": True}
    bodies = [
        {"model": stack.model, "return_token_ids": True, "prompt": prompt} | parameters
        for prompt in prompts(32, seed=2)
    ]

    async def run() -> list[list[int]]:
        async with httpx.AsyncClient(base_url=stack.base_url, timeout=2 * PATIENCE_S, limits=httpx.Limits()) as client:
            begun = [asyncio.Event() for _ in bodies]
            streams = [
                asyncio.create_task(streamed(client, body, each)) for body, each in zip(bodies, begun, strict=True)
            ]
            for each in begun:
                await each.wait()
            os.kill(killed, signal.SIGKILL)
            # Whoever computes prompts is idle by now: these meet the gap.
            late = [asyncio.create_task(streamed(client, body)) for body in bodies[:8]]
            return await asyncio.gather(*streams, *late)

    outputs = asyncio.run(run())
    texts = [expected(body["prompt"], parameters) for body in bodies]  # type: ignore[arg-type]
    assert outputs == texts + texts[:8]
    deadline = time.monotonic() + 60
    while len(stack.workers(role)) < 8 or stack.children().get(f"{role}-0") in (None, killed):
        assert time.monotonic() < deadline, "the process was not started again"
        time.sleep(0.1)


def test_a_repeat_follows_the_first_while_its_handoff_is_on_its_way(tmp_path: Path) -> None:
    """Decode has nothing of a prompt that prefill is still computing, so decode is not where it is almost done."""
    profile = tmp_path / "slow.json"
    profile.write_text(json.dumps(PROFILE | {"token_s": 1e-3, "kv_tokens": 64 * 1024}))  # seconds for the prompt
    flags = ("--backend", "simulated", "--profile", str(profile))
    prompt = random.Random(9).choices(range(3, 2048), k=4000)

    async def run(stack: Stack) -> list[int]:
        async with httpx.AsyncClient(base_url=stack.base_url, timeout=2 * PATIENCE_S) as client:

            async def ask(name: str) -> int:
                body = {"model": stack.model, "prompt": prompt, "max_tokens": 4, "ignore_eos": True}
                answer = await client.post("/v1/completions", json=body, headers={"x-request-id": name})
                usage: dict[str, Any] = answer.raise_for_status().json()["usage"]
                return int(usage["prompt_tokens_details"]["cached_tokens"])

            # With streams there, decode is no place for long prompts.
            begun = [asyncio.Event() for _ in range(8)]
            streams = [
                asyncio.create_task(streamed(client, stream_of(stack, number), event))
                for number, event in enumerate(begun)
            ]
            await asyncio.gather(*(event.wait() for event in begun))
            await until(lambda: stack.workers("prefill")[0]["load"].get("step_cost"))
            first = asyncio.create_task(ask("first"))
            await until(lambda: stack.http.get("/requests/first").status_code == 200)
            answers = await asyncio.gather(first, ask("second"), ask("third"))
            for stream in streams:
                stream.cancel()
            return [*answers]

    with Stack(DEMO_MODEL, tmp_path / "state", *flags, environ={"KVRELAY_LOCAL_PREFILL_TOKENS": ""}) as stack:
        assert asyncio.run(run(stack)) == [0, 3984, 3984]


def stream_of(stack: Stack, number: int) -> dict[str, Any]:
    options = {"return_token_ids": True, "max_tokens": 7000, "ignore_eos": True}
    return {"model": stack.model, "prompt": [number + 3] * 20, **options}
