"""Decode workers of one prefill delayer's group as processes of their own: they let prompts in together, and none waits
for a member that is dead or stands still."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from kvrelay.fleet.worker_registry import Registry
from kvrelay.messaging.messenger import Messenger
from kvrelay.process import die_with_parent
from kvrelay.protocol.link import Delivered, LinkEvent, LinkSettings
from kvrelay.protocol.messages import Generate, PeerRef, Prompt, Status, StatusQuery, TokenBatch, pack_tokens
from kvrelay.protocol.sampling import Sampling
from tests.e2e.conftest import DEMO_MODEL
from tests.fakes.waiting import until

pytestmark = pytest.mark.component
LONG, SHORT = 8000, 3
FOREVER = ["--prefill-delayer-max-passes=65536", "--prefill-delayer-max-wait-s=60"]
GAVE_UP_WAITING = ("the longest wait is over", "some have no prompt, and the wait was long enough")


class Group:
    """The processes, and a router's side of the protocol."""

    def __init__(self, redis_url: str, *names: str, flags: list[str]) -> None:
        self.processes = {name: _start(redis_url, name, flags) for name in names}
        self.peers: dict[str, PeerRef] = {}
        self.statuses: dict[str, Status] = {}
        self.num_tokens: dict[str, int] = {}
        self.finished: set[str] = set()
        self._registry = Registry(redis_url)
        self._messenger = Messenger("router", self._on_event, settings=LinkSettings(peer_timeout_s=60.0))
        self._asking: asyncio.Task[None] | None = None

    async def ready(self) -> None:
        self._messenger.start()
        while len(self.peers) < len(self.processes):
            assert all(process.poll() is None for process in self.processes.values()), "a worker did not start"
            records = await self._registry.list_workers("m")
            self.peers = {each.worker_id: PeerRef(each.worker_id, each.incarnation, each.address) for each in records}
            await asyncio.sleep(0.05)
        self._asking = asyncio.create_task(self._ask())

    async def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
        self._messenger.close(0)
        await self._registry.close()
        for process in self.processes.values():
            process.kill()
            process.wait()

    def send(self, name: str, request: str, max_tokens: int) -> None:
        sampling = Sampling(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        tokens = random.Random(request).choices(range(4, 2048), k=20)
        prompt = Prompt(tokens=pack_tokens(tokens), sampling=sampling, timeout_s=600)
        self.num_tokens[request] = 0
        self._messenger.send(self.peers[name], Generate(prompt=prompt), request=request, attempt=1)

    def total(self, name: str, what: str) -> float:
        status = self.statuses.get(name)
        return status.totals.get(what, 0) if status is not None else 0

    async def heard(self, name: str, num_members: int) -> None:
        await until(lambda: self.total(name, "prefill_delayer_members") == num_members)

    async def delayed(self, name: str) -> None:
        await until(lambda: self.total(name, "prefill_delayed_passes") > 0)

    def signal(self, name: str, number: int) -> None:
        os.kill(self.processes[name].pid, number)

    async def _ask(self) -> None:
        for query in range(1, 1 << 30):
            for peer in self.peers.values():
                self._messenger.send(peer, StatusQuery(query=query))
            await asyncio.sleep(0.05)

    def _on_event(self, event: LinkEvent) -> None:
        if not isinstance(event, Delivered):
            return
        if isinstance(event.body, Status):
            self.statuses[event.peer.peer_id] = event.body
        elif isinstance(event.body, TokenBatch):
            for entry in event.body.entries:
                self.num_tokens[entry.request] += len(entry.token_ids)
                if entry.finish is not None:
                    self.finished.add(entry.request)


def _start(redis_url: str, name: str, flags: list[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "kvrelay_decode", f"--model={DEMO_MODEL}", "--served-model-name=m"]
    command += [f"--worker-id={name}", f"--redis-url={redis_url}", "--backend=simulated", "--num-blocks=2000"]
    command += ["--prefill-delayer", "--prefill-delayer-group=g", "--lease-interval-s=0.1", "--lease-ttl-s=60", *flags]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent())


@pytest.fixture
def run_group(redis_url: str) -> Callable[..., None]:
    def run(names: str, flags: list[str], test: Callable[[Group], Any]) -> None:
        async def whole() -> None:
            group = Group(redis_url, *names, flags=flags)
            try:
                await group.ready()
                await test(group)
            finally:
                await group.close()

        asyncio.run(whole())

    return run


async def busy_and_waiting(group: Group, busy: str, waiting: str) -> None:
    """One runs a long stream, and the other holds its prompt back for it."""
    group.send(busy, "long", LONG)
    await until(lambda: group.num_tokens["long"] > 0)
    await group.heard(waiting, 1)
    group.send(waiting, "waits", SHORT)
    await group.delayed(waiting)


def test_a_prompt_waits_until_the_other_has_one_and_both_go_in(run_group: Callable[..., None]) -> None:
    async def test(group: Group) -> None:
        await busy_and_waiting(group, "a", "b")
        assert not group.num_tokens["waits"]
        group.send("a", "together", SHORT)
        await until(lambda: {"waits", "together"} <= group.finished)
        for reason in GAVE_UP_WAITING:
            assert not group.total("b", f"prefill_delayer: {reason}")

    run_group("ab", [*FOREVER, "--prefill-delayer-silence-s=60"], test)


@pytest.mark.everyday(1)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_nobody_waits_for_a_member_that_is_dead_or_stands_still(
    run_group: Callable[..., None], number: signal.Signals
) -> None:
    async def test(group: Group) -> None:
        await busy_and_waiting(group, "a", "b")
        group.signal("a", number)
        await until(lambda: "waits" in group.finished)
        await group.heard("b", 0)
        for reason in GAVE_UP_WAITING:
            assert not group.total("b", f"prefill_delayer: {reason}")

    run_group("ab", [*FOREVER, "--prefill-delayer-silence-s=3", "--peer-timeout-s=60"], test)


def test_three_serve_all_prompts_although_one_is_killed(run_group: Callable[..., None]) -> None:
    async def test(group: Group) -> None:
        rng = random.Random(4)
        for number in range(90):
            name = "abc"[number % 3] if number < 45 else "bc"[number % 2]
            group.send(name, f"{name}{number}", rng.randint(1, 60))
            if number == 45:
                group.signal("a", signal.SIGKILL)
            await asyncio.sleep(rng.random() * 0.03)  # so that prompts come beside decodes
        wanted = {request for request in group.num_tokens if not request.startswith("a")}
        await until(lambda: wanted <= group.finished)

    run_group("abc", ["--prefill-delayer-max-wait-s=0.3"], test)
