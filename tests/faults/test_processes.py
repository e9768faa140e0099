"""Workers and Redis are killed, stopped and restarted under load: every client's stream is that of an undisturbed run.

The model is real, in float32; half of the requests are greedy, the others seeded.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.fakes.stack import Stack
from tests.faults.storm.load import TOP_K

pytestmark = pytest.mark.timeout(900)  # workers that died often start again after longer and longer pauses
DEMO_MODEL = Path(__file__).parents[2] / "models" / "demo"
PEER_TIMEOUT_S = 2.5
PATIENCE_S = 120.0
NUM_JOBS = 40
OWNERS = {"prefill": "computing", "decode": "running"}
"""Of the blocks that a worker of this role holds while it works."""
WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
REQUEST_TIMEOUT_S = 100.0

Disturb = Callable[[], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class Job:
    """A request body, and the tokens of an undisturbed run."""

    body: dict[str, Any]
    expected: list[int]


@dataclass(slots=True)
class Loaded:
    """A running system and its load."""

    stack: Stack
    jobs: list[Job]
    num_runs: int = 0

    # -- load ---------------------------------------------------------------------------------------------------------

    async def run(self, disturb: Disturb, *, jobs: list[Job] | None = None, repeat: bool = False) -> None:
        """All jobs at once, while `disturb` does its work; with `repeat`, again and again until that is done."""
        self.num_runs += 1
        async with httpx.AsyncClient(base_url=self.stack.base_url, timeout=REQUEST_TIMEOUT_S + 20) as client:
            disturbing = asyncio.create_task(disturb())

            async def one(job: Job) -> None:
                while True:
                    body = job.body | {"cache_salt": str(self.num_runs)}  # or caches would spare prefill its work
                    assert await stream(client, body) == job.expected, "the output was changed"
                    if not repeat or disturbing.done():
                        return

            async with asyncio.TaskGroup() as group:
                for job in jobs or self.jobs:
                    group.create_task(one(job))
            await disturbing

    # -- the system's state -------------------------------------------------------------------------------------------

    def pid(self, name: str) -> int:
        return self.stack.children()[name]

    async def until_ready(self, names: tuple[str, ...] = WORKERS, *, since: dict[str, str] | None = None) -> None:
        """All of them are ready; with `since`, under another incarnation than then."""
        old = since or {}
        async with asyncio.timeout(2 * PATIENCE_S):
            while True:
                workers = {each["worker_id"]: each for each in (await self.fleet())["workers"]}
                found = [workers[name] for name in names if name in workers]
                if len(found) == len(names) and all(
                    each["state"] == "ready" and each["incarnation"] != old.get(each["worker_id"]) for each in found
                ):
                    return
                await asyncio.sleep(0.1)

    async def incarnations(self) -> dict[str, str]:
        return {each["worker_id"]: each["incarnation"] for each in (await self.fleet())["workers"]}

    async def fleet(self) -> dict[str, Any]:
        async with httpx.AsyncClient(base_url=self.stack.base_url, timeout=20) as client:
            answer: dict[str, Any] = (await client.get("/fleet")).json()
            return answer

    async def until_busy(self, name: str, state: str) -> None:
        """The worker holds such blocks."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                workers = {each["worker_id"]: each for each in (await self.fleet())["workers"]}
                if workers[name]["blocks"].get(state):
                    return
                await asyncio.sleep(0.01)

    async def until_clean(self) -> None:
        """All workers are back, and nothing is held by anybody."""
        await self.until_ready()
        async with asyncio.timeout(PATIENCE_S):
            while await asyncio.to_thread(self.stack.busy_blocks):
                await asyncio.sleep(0.05)
        requests = (await self.fleet())["requests"]
        assert requests["running"] == 0
        assert requests["failed"] == requests["timed_out"] == 0


async def stream(client: httpx.AsyncClient, body: dict[str, Any]) -> list[int]:
    """The tokens of a streamed completion, which must end as a stream must."""
    token_ids: list[int] = []
    finish_reason, last_line = None, ""
    async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if not line:
                continue
            last_line = line
            if line != "data: [DONE]":
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                (choice,) = event["choices"]
                token_ids += choice["token_ids"]
                finish_reason = choice["finish_reason"] or finish_reason
    assert finish_reason == "length"
    assert last_line == "data: [DONE]"
    return token_ids


def make_bodies(model: str) -> list[dict[str, Any]]:
    rng = random.Random(0)
    return [
        {
            "model": model,
            "prompt": rng.choices(range(4, 2048), k=rng.choice([5, 40, 150, 400])),
            "max_tokens": rng.randint(80, 160),
            "temperature": number % 2,
            "seed": number,
            "top_k": TOP_K,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        for number in range(NUM_JOBS)
    ]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    flags = ["--dtype", "float32", "--threads", "1", "--prefill", "2", "--decode", "2", "--num-blocks", "800"]
    flags += ["--token-budget", "128", "--max-running", "64", f"--peer-timeout-s={PEER_TIMEOUT_S}"]
    flags += [f"--request-timeout-s={REQUEST_TIMEOUT_S}"]
    flags += ["--routing-policy", "least_loaded"]  # every worker is to have work, whoever holds the prompts already
    with Stack(DEMO_MODEL, tmp_path_factory.mktemp("stack"), *flags) as stack:

        async def undisturbed() -> list[Job]:
            async with httpx.AsyncClient(base_url=stack.base_url, timeout=120) as client:
                bodies = make_bodies(stack.model)
                outputs = await asyncio.gather(*(stream(client, body) for body in bodies))
                return [Job(*pair) for pair in zip(bodies, outputs, strict=True)]

        jobs = asyncio.run(undisturbed())
        assert all(len(job.expected) == job.body["max_tokens"] for job in jobs)
        yield Loaded(stack, jobs)


async def kill(loaded: Loaded, name: str) -> None:
    os.kill(loaded.pid(name), signal.SIGKILL)


def check_deaths(
    loaded: Loaded, names: tuple[str, ...], *, while_busy: str, delay_s: float = 0.0, jobs: list[Job] | None = None
) -> None:
    """These die together `delay_s` after one is busy; every output is whole, and they come back."""

    async def disturb() -> None:
        await loaded.until_busy(while_busy, OWNERS[while_busy[:-2]])
        await asyncio.sleep(delay_s)
        await asyncio.gather(*(kill(loaded, name) for name in names))

    async def test() -> None:
        old = await loaded.incarnations()
        await loaded.run(disturb, jobs=jobs)
        await loaded.until_ready(names, since=old)
        await loaded.until_clean()

    asyncio.run(test())


@pytest.mark.parametrize(("name", "delay_s"), [("prefill-0", 0.0), ("prefill-1", 0.3)])
def test_a_prefill_worker_dies(loaded: Loaded, name: str, delay_s: float) -> None:
    check_deaths(loaded, (name,), while_busy=name, delay_s=delay_s)


@pytest.mark.parametrize(
    ("name", "delay_s"), [pytest.param("decode-0", 0.0, marks=pytest.mark.always), ("decode-1", 1.0)]
)
def test_a_decode_worker_dies_in_the_middle_of_its_streams(loaded: Loaded, name: str, delay_s: float) -> None:
    check_deaths(loaded, (name,), while_busy=name, delay_s=delay_s)


def test_both_prefill_workers_die_and_decode_does_all_the_work(loaded: Loaded) -> None:
    check_deaths(loaded, ("prefill-0", "prefill-1"), while_busy="decode-0")


def test_both_decode_workers_die_and_the_streams_wait_for_the_next(loaded: Loaded) -> None:
    check_deaths(loaded, ("decode-0", "decode-1"), while_busy="decode-0", jobs=loaded.jobs[:12])


@pytest.mark.parametrize("name", ["prefill-0", "decode-1"])
def test_a_worker_stands_still_for_longer_than_its_peers_wait(loaded: Loaded, name: str) -> None:
    """It wakes up in the middle of what others do by now; it is the same process before and after."""

    async def disturb() -> None:
        await loaded.until_busy(name, OWNERS[name[:-2]])
        pid = loaded.pid(name)
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(PEER_TIMEOUT_S + 2)
        finally:
            os.kill(pid, signal.SIGCONT)

    async def test() -> None:
        old = await loaded.incarnations()
        await loaded.run(disturb, repeat=True)
        await loaded.until_clean()
        assert await loaded.incarnations() == old

    asyncio.run(test())


def test_a_rolling_restart_disturbs_nobody(loaded: Loaded) -> None:
    async def roll(role: str) -> None:
        for name in [name for name in WORKERS if name.startswith(role)]:
            old = await loaded.incarnations()
            os.kill(loaded.pid(name), signal.SIGTERM)
            await loaded.until_ready((name,), since=old)

    async def disturb() -> None:
        await asyncio.gather(roll("prefill"), roll("decode"))

    async def test() -> None:
        before = (await loaded.fleet())["requests"]
        await loaded.run(disturb, jobs=loaded.jobs[:16], repeat=True)
        await loaded.until_clean()
        after = (await loaded.fleet())["requests"]
        assert after["finished"] - before["finished"] >= 16

    asyncio.run(test())


def test_redis_dies_and_nobody_notices(loaded: Loaded) -> None:
    def redis() -> psutil.Process:
        children = psutil.Process(loaded.stack.process.pid).children(recursive=True)
        (found,) = [child for child in children if "redis-server" in child.name()]
        return found

    async def disturb() -> None:
        for _ in range(2):
            await asyncio.sleep(1)
            gone = redis()
            gone.kill()
            async with asyncio.timeout(PATIENCE_S):
                while gone.is_running() and gone.status() != psutil.STATUS_ZOMBIE:
                    await asyncio.sleep(0.05)
            await asyncio.sleep(3)

    async def test() -> None:
        old = await loaded.incarnations()
        await loaded.run(disturb, repeat=True)
        async with asyncio.timeout(PATIENCE_S):
            while (fleet := await loaded.fleet())["router"]["registry"] != "ok" or not all(
                each["registered"] for each in fleet["workers"]
            ):
                await asyncio.sleep(0.1)
        await loaded.until_clean()
        assert await loaded.incarnations() == old

    asyncio.run(test())


def test_deaths_of_any_worker_at_any_moment(loaded: Loaded) -> None:
    seed = int(time.time())
    print(f"seed {seed}")
    rng = random.Random(seed)

    async def kill_in_turn(names: list[str]) -> None:
        for name in names:
            await asyncio.sleep(rng.random() * 2)
            old = await loaded.incarnations()
            await kill(loaded, name)
            await loaded.until_ready((name,), since=old)

    async def disturb() -> None:
        roles = [[name for name in rng.sample(WORKERS, 4) if name.startswith(role)] for role in OWNERS]
        await asyncio.gather(*map(kill_in_turn, roles))

    async def test() -> None:
        await loaded.run(disturb, repeat=True)
        await loaded.until_clean()

    asyncio.run(test())
