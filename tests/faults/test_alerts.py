"""The alerts that ship, in a real Prometheus: each fires while a real fleet is in the trouble it tells of, and ends
with it. Those of defects, of broken hardware and of a pool that stays full are not brought about; promtool tests them.

The rules' durations are a thirtieth of theirs. Needs a `prometheus` on the path, or KVRELAY_PROMETHEUS to name one.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest
import pytest_asyncio
import yaml

from tests.faults.storm.load import MODEL
from tests.faults.storm.processes import FaultStack, StackSettings
from tests.unit.deploy.test_observability import OBSERVABILITY, rules

PROMETHEUS = os.environ.get("KVRELAY_PROMETHEUS") or shutil.which("prometheus")
pytestmark = [
    pytest.mark.skipif(PROMETHEUS is None, reason="no prometheus is installed, and KVRELAY_PROMETHEUS names none"),
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]
FASTER = 30
PAGES_PORT = 9100
PEER_TIMEOUT_S = 3.5
LONGEST_S = 150.0
"""Until an alert fires or ends: 15 and 30 minutes of the rules are 90 s, and two busy cores are slow."""
NEVER_BROUGHT_ABOUT = {
    "KvrelayBlocksLeaked",
    "KvrelayBlocksQuarantined",
    "KvrelayBlocksCorrupted",
    "KvrelayProtocolErrors",
    "KvrelayPoolExhausted",  # preemption keeps a busy pool of a quick model from being full at every look
}


def hurried(text: str) -> str:
    """The rules with shorter windows and shorter patience."""

    def shorter(match: re.Match[str]) -> str:
        seconds = int(match[2]) * {"s": 1, "m": 60, "h": 3600}[match[3]] / FASTER
        return f"{match[1]}{max(1, round(seconds))}s{match[4]}"

    return re.sub(r"(\[|for: )(\d+)([smh])(\]|$)", shorter, text, flags=re.MULTILINE)


@dataclass
class Watched:
    """A fleet under load and the Prometheus that watches it. `fired`: all alerts that were seen firing."""

    stack: FaultStack
    prometheus: str
    http: httpx.AsyncClient
    fired: set[str] = field(default_factory=set)

    async def firing(self) -> set[str]:
        answer = (await self.http.get(f"{self.prometheus}/api/v1/alerts")).json()
        firing = {each["labels"]["alertname"] for each in answer["data"]["alerts"] if each["state"] == "firing"}
        self.fired |= firing
        return firing

    async def until(self, what: str, condition: Callable[[set[str]], bool]) -> None:
        deadline = time.monotonic() + LONGEST_S
        while not condition(firing := await self.firing()):
            assert time.monotonic() < deadline, f"waited in vain for {what}; firing: {sorted(firing)}"
            await asyncio.sleep(0.3)

    async def until_firing(self, *names: str) -> None:
        """Each of them was seen firing since the call."""
        missing = set(names)

        def are_seen(firing: set[str]) -> bool:
            missing.difference_update(firing)
            return not missing

        await self.until(f"{', '.join(names)}", are_seen)

    async def complete(self, max_tokens: int = 4) -> None:
        body = {"model": MODEL, "prompt": "the moon and the sea", "max_tokens": max_tokens, "ignore_eos": True}
        with suppress(httpx.HTTPError):
            await self.http.post(f"{self.stack.url('router-0')}/v1/completions", json=body)

    @asynccontextmanager
    async def meanwhile(self, *again: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
        """While the block runs, each of these runs again and again."""

        async def repeat(what: Callable[[], Awaitable[None]]) -> None:
            while True:
                await what()

        tasks = [asyncio.create_task(repeat(each)) for each in again]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(each, asyncio.CancelledError) for each in results), results


def start_prometheus(directory: Path, stack: FaultStack) -> subprocess.Popen[bytes]:
    (directory / "alerts.yml").write_text(hurried((OBSERVABILITY / "alerts.yml").read_text()))
    jobs = {
        f"kvrelay-{role}": [f"{stack.network.join(name)[0]}:{PAGES_PORT}" for name in stack.names(role)]
        for role in ("router", "prefill", "decode")
    }
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(directory / "alerts.yml")],
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": targets}]} for job, targets in jobs.items()
        ],
    }
    (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
    command = [str(PROMETHEUS), f"--config.file={directory / 'prometheus.yml'}", "--web.listen-address=127.0.0.1:0"]
    with (directory / "prometheus.log").open("wb") as log:
        return subprocess.Popen([*command, f"--storage.tsdb.path={directory / 'data'}"], stdout=log, stderr=log)


async def port_of(process: subprocess.Popen[bytes]) -> int:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        for each in psutil.Process(process.pid).net_connections():
            if each.status == psutil.CONN_LISTEN:
                return int(each.laddr.port)
        await asyncio.sleep(0.1)
    raise AssertionError("prometheus does not listen")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def watched(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Watched]:
    directory = tmp_path_factory.mktemp("alerts")
    router = [f"--metrics-port={PAGES_PORT}", "--local-prefill-tokens=0", "--max-queued-requests=12"]
    router.append("--max-wait-for-worker-s=1")
    pages = [f"--http-port={PAGES_PORT}"]
    settings = StackSettings(
        num_prefill=1,
        num_decode=1,
        peer_timeout_s=PEER_TIMEOUT_S,
        max_attempts=2,
        extra={"router": router, "prefill": pages, "decode": pages},
    )
    stack = FaultStack(directory, settings)
    try:
        await stack.start()
        process = start_prometheus(directory, stack)
        try:
            async with httpx.AsyncClient(timeout=30, limits=httpx.Limits(max_connections=None)) as http:
                yield Watched(stack, f"http://127.0.0.1:{await port_of(process)}", http)
        finally:
            process.terminate()
            process.wait(30)
    finally:
        await stack.close()


async def test_nothing_fires_while_all_is_well(watched: Watched) -> None:
    async def one_after_the_other() -> None:
        await watched.complete()
        await asyncio.sleep(0.1)

    async with watched.meanwhile(one_after_the_other, one_after_the_other):
        await asyncio.sleep(12)
    assert await watched.firing() == set()


async def test_streams_and_first_tokens_are_slow(watched: Watched) -> None:
    """Prefill stands still for longer than a first token may take, decode for longer than a token may, and neither for
    so long that it is lost."""

    async def stand_still() -> None:
        await watched.stack.stand_still("prefill-0", PEER_TIMEOUT_S - 0.7)
        await asyncio.sleep(0.3)
        await watched.stack.stand_still("decode-0", 1.5)
        await asyncio.sleep(0.3)

    async def ask() -> None:
        await watched.complete(3)
        await asyncio.sleep(0.4)

    names = [f"Kvrelay{what}Burns{how}" for what in ("Ttft", "Tpot") for how in ("Fast", "Slowly")]
    async with watched.meanwhile(stand_still, *[ask] * 6):
        await watched.until_firing(*names)


async def test_decode_flaps(watched: Watched) -> None:
    async def flap() -> None:
        await watched.stack.stand_still("decode-0", PEER_TIMEOUT_S + 0.6)
        await asyncio.sleep(1.2)

    async def ask() -> None:  # seldom enough that those which decode leaves behind are a good part of all
        await watched.complete()
        await asyncio.sleep(0.4)

    async with watched.meanwhile(flap, *[ask] * 6):
        await watched.until_firing("KvrelayWorkersFlap", "KvrelayHandoffsFail", "KvrelayRetries")


async def test_a_role_is_gone(watched: Watched) -> None:
    stack = watched.stack
    old = await stack.incarnations()
    stack.kill("prefill-0")
    async with watched.meanwhile(*[watched.complete] * 2):
        await watched.until_firing("KvrelayNothingDisaggregated", "KvrelayTargetDown")
        stack.kill("decode-0")
        await watched.until_firing("KvrelayNoDecode", "KvrelayErrorsBurnFast", "KvrelayErrorsBurnSlowly")
    for name in ("prefill-0", "decode-0"):
        stack.spawn(name)
    await stack.until_ready(since=old)


async def test_more_comes_than_the_router_takes(watched: Watched) -> None:
    async def long_stream() -> None:
        await watched.complete(240)

    async with watched.meanwhile(*[long_stream] * 24):
        await watched.until_firing("KvrelayRefuses")


async def test_redis_and_the_router_are_gone(watched: Watched) -> None:
    await watched.stack.kill_redis(8)
    await watched.until_firing("KvrelayIndexLags")
    watched.stack.kill("router-0")
    await watched.until_firing("KvrelayNoRouter")
    watched.stack.spawn("router-0")
    await watched.stack.until_router_serves("router-0")


async def test_all_end_and_none_was_left_out(watched: Watched) -> None:
    async def ask() -> None:
        await watched.complete()
        await asyncio.sleep(0.1)

    async with watched.meanwhile(ask, ask):
        await watched.until("the end of all alerts", lambda firing: not firing)
    every = {rule["alert"] for rule in rules() if "alert" in rule}
    assert watched.fired == every - NEVER_BROUGHT_ABOUT, every - NEVER_BROUGHT_ABOUT - watched.fired
