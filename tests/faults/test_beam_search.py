"""A worker is killed in the middle of beam searches: clients get the texts of an undisturbed run."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import DEMO_MODEL
from tests.fakes.stack import Stack

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    flags = ["--dtype", "float32", "--threads", "1", "--prefill", "1", "--decode", "2", "--num-blocks", "800"]
    flags += ["--token-budget", "128", "--max-running", "64", "--peer-timeout-s=2.5", "--request-timeout-s=100"]
    flags += ["--routing-policy", "least_loaded"]  # the victim is to have work
    with Stack(DEMO_MODEL, tmp_path_factory.mktemp("stack"), *flags) as stack:
        yield stack


def bodies(model: str) -> list[dict[str, Any]]:
    rng = random.Random(1)
    return [
        {
            "model": model,
            "prompt": rng.choices(range(4, 2048), k=rng.choice([5, 40, 1200])),
            "use_beam_search": True,
            "n": 1 + number % 4,
            "best_of": 4,
            "max_tokens": 100,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        for number in range(8)
    ]


async def search(client: httpx.AsyncClient, body: dict[str, Any]) -> list[tuple[list[int], float]]:
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return [(choice["token_ids"], choice["score"]) for choice in answer.json()["choices"]]


@pytest.mark.parametrize("victim", ["decode-0", "prefill-0"])
def test_a_worker_dies_in_the_middle(stack: Stack, victim: str) -> None:
    async def is_busy(client: httpx.AsyncClient) -> bool:
        if victim.startswith("decode"):
            workers = {each["worker_id"]: each for each in (await client.get("/fleet")).json()["workers"]}
            return bool(workers[victim]["blocks"].get("running"))
        # Prompts are computed within moments, which the workers' reports may miss: what the router has sent counts.
        for each in (await client.get("/requests")).json()["requests"]:
            if each["state"] == "running":
                record = (await client.get(f"/requests/{each['request_id']}")).json()
                if any(attempt["prefill"] == victim for one in record["sequences"] for attempt in one["attempts"]):
                    return True
        return False

    async def until_busy() -> None:
        async with asyncio.timeout(120), httpx.AsyncClient(base_url=stack.base_url) as client:
            while not await is_busy(client):
                await asyncio.sleep(0.01)

    async def test() -> None:
        wanted = bodies(stack.model)
        async with httpx.AsyncClient(base_url=stack.base_url, timeout=120) as client:
            undisturbed = await asyncio.gather(*(search(client, body) for body in wanted))
            fresh = [body | {"cache_salt": victim} for body in wanted]
            running = asyncio.gather(*(search(client, body) for body in fresh))
            await until_busy()
            os.kill(stack.children()[victim], signal.SIGKILL)
            for got, expected in zip(await running, undisturbed, strict=True):
                assert [tokens for tokens, _ in got] == [tokens for tokens, _ in expected]
                assert [score for _, score in got] == pytest.approx([score for _, score in expected], abs=1e-4)

    asyncio.run(test())
