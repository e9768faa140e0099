"""Requests on a running system from their beginning to their end, however they end: nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any

import httpx
import pytest

from tests.e2e.prompts import body_of, prompt_of
from tests.fakes.stack import Stack
from tests.fakes.waiting import PATIENCE_S, until

BLOCK = 16


def steps_taken(stack: Stack) -> int:
    return int(sum(worker["totals"]["steps"] for worker in stack.workers()))


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
def test_a_client_that_leaves_frees_everything(demo_stack: Stack, stream: bool, role: str, owner: str) -> None:
    long = {"prompt": prompt_of(7000, seed=stream), "max_tokens": 1000} if role == "prefill" else {"max_tokens": 4000}
    asyncio.run(leave_once(demo_stack, body_of(demo_stack, stream=stream, **long), role, owner))
    demo_stack.wait_until_clean()
    steps = steps_taken(demo_stack)
    assert demo_stack.complete([5, 6, 7], 1)["finish_reason"] == "length"
    assert steps_taken(demo_stack) == steps + 1  # the request that left is in no later step


def test_a_hundred_requests_that_finish_leave_or_are_refused_leave_nothing(demo_stack: Stack) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)

    async def finish(client: httpx.AsyncClient, body: dict[str, Any]) -> str:
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert len(answer.json()["choices"][0]["token_ids"]) == body["max_tokens"]
        return "finished"

    async def leave(client: httpx.AsyncClient, body: dict[str, Any], after_s: float) -> str:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(after_s):
                async with client.stream("POST", "/v1/completions", json=body) as answer:
                    async for _ in answer.aiter_bytes():
                        pass
                    return "finished"
        return "left"

    async def refuse(client: httpx.AsyncClient, body: dict[str, Any]) -> str:
        answer = await client.post("/v1/completions", json=body | {"temperature": -1})
        assert answer.status_code == 400
        return "refused"

    async def run() -> list[str]:
        limits = httpx.Limits(max_connections=100)
        async with httpx.AsyncClient(base_url=demo_stack.base_url, timeout=2 * PATIENCE_S, limits=limits) as client:

            async def one(number: int) -> str:
                await asyncio.sleep(rng.random() * 4)
                prompt = prompt_of(rng.choice([1, 16, 17, 100, 300]), seed=number % 20)
                body = body_of(demo_stack, prompt=prompt, max_tokens=rng.randint(1, 30), stream=False)
                match number % 5:
                    case 0:
                        return await refuse(client, body)
                    case 1 | 2:
                        return await finish(client, body)
                    case _:
                        # More tokens than any machine generates until then.
                        body |= {"stream": bool(number % 2), "max_tokens": 7000}
                        return await leave(client, body, rng.random() ** 2 * 3)

            return await asyncio.gather(*(one(number) for number in range(100)))

    before = demo_stack.fleet()["requests"]
    outcomes = asyncio.run(run())
    demo_stack.wait_until_clean()
    after = demo_stack.fleet()["requests"]
    assert outcomes.count("refused") == 20
    assert outcomes.count("left") == outcomes.count("finished") == 40
    assert after["running"] == 0
    assert after["failed"] == before["failed"]
    assert after["finished"] - before["finished"] >= outcomes.count("finished")


# -- who did what -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 16, 17, 512, 513, 1100])  # prompts are computed by 512 tokens
def test_every_prompt_block_was_handed_over_or_cached_at_decode(demo_stack: Stack, length: int) -> None:
    for turn in range(2):
        name = f"blocks-{length}-{turn}"
        body = body_of(demo_stack, prompt=prompt_of(length, seed=77))
        answer = demo_stack.http.post("/v1/completions", json=body, headers={"x-request-id": name})
        assert answer.status_code == 200
        record = demo_stack.http.get(f"/requests/{name}").json()
        (sequence,) = record["sequences"]
        usage = sequence["usage"]
        num_blocks = -(-length // BLOCK)
        assert usage["prompt_blocks"] == num_blocks
        assert usage["received_blocks"] + usage["cached_blocks"] == num_blocks
        assert usage["computed_blocks"] == 0
        assert usage["cached_blocks"] == (0 if turn == 0 else (length - 1) // BLOCK)
        assert record["num_attempts"] == 1
        assert answer.json()["usage"]["prompt_tokens"] == length


def test_the_next_turn_of_a_conversation_finds_the_last_one_in_both_caches(demo_stack: Stack) -> None:
    first = prompt_of(70, seed=5)
    answer = demo_stack.complete(first, 45, ignore_eos=True)
    second = first + answer["token_ids"] + prompt_of(20, seed=6)
    told = demo_stack.http.post(
        "/v1/completions", json=body_of(demo_stack, prompt=second), headers={"x-request-id": "second-turn"}
    ).json()
    (sequence,) = demo_stack.http.get("/requests/second-turn").json()["sequences"]
    # Prefill has seen the first prompt only; decode also has the answer, of which the last token was never fed.
    assert told["usage"]["prompt_tokens_details"]["cached_tokens"] == len(first) // BLOCK * BLOCK
    assert sequence["cached_tokens"] == len(first) // BLOCK * BLOCK
    assert sequence["usage"]["cached_blocks"] == (len(first) + 45 - 1) // BLOCK
    assert sequence["usage"]["received_blocks"] == -(-len(second) // BLOCK) - sequence["usage"]["cached_blocks"]
    assert sequence["usage"]["computed_blocks"] == 0
