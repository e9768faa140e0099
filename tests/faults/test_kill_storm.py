"""Decode workers are killed every two seconds until none is left for a while: no request fails, no token is different.

`kvrelay up` restarts them. Often both are down, so the requests that they had are retried. At the end it restarts none
until every client's request waits for a worker.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.conftest import DEMO_MODEL
from tests.fakes.stack import Stack
from tests.fakes.waiting import PATIENCE_S
from tests.faults.storm.processes import usual_dtype
from tests.faults.test_redis_under_streams import PROFILE

pytestmark = pytest.mark.timeout(900)

KILL_EVERY_S = 2.0
NUM_KILLS = 12
NUM_CLIENTS = 8
DECODE = ("decode-0", "decode-1")
SIMULATED = ("--backend", "simulated", "--profile")


def prompts() -> list[tuple[list[int], int]]:
    """Prompts and numbers of output tokens, which take from a part of a second to several."""
    rng = random.Random(11)
    return [(rng.choices(range(3, 2000), k=rng.randint(5, 200)), rng.choice([1, 20, 80, 200])) for _ in range(24)]


@pytest.mark.parametrize("backend", ["simulated", "cpu"])
def test_no_request_fails_while_decode_workers_are_killed_again_and_again(tmp_path: Path, backend: str) -> None:
    if backend == "cpu":
        flags = ["--dtype", usual_dtype(), "--threads", "1"]
    else:
        profile = tmp_path / "profile.json"
        profile.write_text(json.dumps(PROFILE | {"fixed_s": 0.01}))
        flags = [*SIMULATED, str(profile)]
    with Stack(DEMO_MODEL, tmp_path / "state", "--prefill", "1", "--decode", "2", *flags) as stack:
        outcome = asyncio.run(Storm(stack).run())
        print(dict(outcome))
        requests = stack.fleet()["requests"]
        assert not requests["failed"] and not requests["refused"] and not requests["timed_out"], requests
        stack.wait_until_clean()


class Storm:
    """The undisturbed run, then clients that ask until the last kill is over."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._counts: Counter[str] = Counter()
        self._over = asyncio.Event()

    async def run(self) -> Counter[str]:
        async with httpx.AsyncClient(base_url=self._stack.base_url, timeout=300) as http:
            self._expected = [await self._tokens(http, *each) for each in prompts()]
            async with asyncio.TaskGroup() as group:
                group.create_task(self._kill())
                for number in range(NUM_CLIENTS):
                    group.create_task(self._client(http, number))
        return self._counts

    async def _kill(self) -> None:
        """One of those that run; every second time both, so that none is left."""
        rng = random.Random(11)
        for number in range(NUM_KILLS):
            await asyncio.sleep(KILL_EVERY_S)
            running = {name: pid for name, pid in self._stack.children().items() if name in DECODE}
            victims = list(running) if number % 2 else rng.sample(sorted(running), min(1, len(running)))
            for name in victims:
                os.kill(running[name], signal.SIGKILL)
                self._counts["kills"] += 1
        await self._outage()
        self._over.set()

    async def _outage(self) -> None:
        """Both workers are dead until every client's request waits for one."""
        supervisor = psutil.Process(self._stack.process.pid)
        supervisor.suspend()
        try:
            async with asyncio.timeout(PATIENCE_S):
                while await self._num_waiting() < NUM_CLIENTS:
                    running = self._stack.children()
                    for name in running.keys() & set(DECODE):
                        os.kill(running[name], signal.SIGKILL)
                    await asyncio.sleep(0.1)
        finally:
            supervisor.resume()

    async def _num_waiting(self) -> int:
        num_waiting: int = (await asyncio.to_thread(self._stack.fleet))["requests"]["sequences_waiting_for_worker"]
        return num_waiting

    async def _client(self, http: httpx.AsyncClient, number: int) -> None:
        """Its last request is begun after the last kill."""
        rng, last = random.Random(number), False
        while not last:
            last = self._over.is_set()
            which = rng.randrange(len(self._expected))
            began = time.monotonic()
            assert await self._tokens(http, *prompts()[which]) == self._expected[which], (number, which)
            self._counts["requests"] += 1
            self._counts["slowest_s"] = max(self._counts["slowest_s"], int(time.monotonic() - began))

    async def _tokens(self, http: httpx.AsyncClient, prompt: list[int], max_tokens: int) -> list[int]:
        body: dict[str, Any] = {"model": self._stack.model, "prompt": prompt, "max_tokens": max_tokens, "stream": True}
        body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
        tokens: list[int] = []
        last = ""
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    content = json.loads(line.removeprefix("data: "))
                    assert "error" not in content, content
                    tokens += [token for choice in content["choices"] for token in choice["token_ids"]]
                last = line or last
        assert last == "data: [DONE]"
        return tokens
