"""Random faults, drawn from a seed: what happens to whom, for how long, and how many at a time."""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tests.faults.storm.network import Way
from tests.faults.storm.processes import FaultStack

FaultKind = Literal[
    "kill", "drain", "drain in a hurry", "stop shortly", "stop for long", "partition", "stall", "one-way stall",
    "cut from redis", "kill redis", "kill router", "stop router",
]  # fmt: skip
WEIGHTS: dict[FaultKind, int] = {
    "kill": 5,
    "drain": 2,
    "drain in a hurry": 1,
    "stop shortly": 3,
    "stop for long": 4,
    "partition": 3,
    "stall": 3,
    "one-way stall": 3,
    "cut from redis": 1,
    "kill redis": 1,
    "kill router": 1,
    "stop router": 1,
}
PAIR_FAULTS: dict[FaultKind, Way] = {"partition": Way.CUT, "stall": Way.STALLED, "one-way stall": Way.STALLED}
RESTARTS: tuple[FaultKind, ...] = ("kill", "drain", "drain in a hurry", "kill router")


@dataclass(frozen=True, slots=True)
class Fault:
    """`others`: the other end of a pair; `lasts`: how long, in peer timeouts."""

    kind: FaultKind
    target: str
    other: str = ""
    lasts: float = 0.0
    pause_s: float = 0.0  # before it

    def __str__(self) -> str:
        pair = f" / {self.other}" if self.other else ""
        return f"{self.kind} {self.target}{pair} for {self.lasts:.2f} timeouts"


def draw_faults(
    seed: int,
    workers: Sequence[str],
    routers: Sequence[str],
    *,
    kinds: Sequence[FaultKind] = tuple(WEIGHTS),
    pause_s: float = 1.0,
) -> Iterator[Fault]:
    """Endless, and the same for the same seed. Every kind comes once before they come at random."""
    rng = random.Random(f"faults {seed}")
    processes = [*workers, *routers]
    first = list(kinds)
    rng.shuffle(first)
    while True:
        kind = first.pop() if first else rng.choices(kinds, [WEIGHTS[kind] for kind in kinds])[0]
        target, other = rng.sample(processes, 2)
        if target in routers and other in routers:
            other = rng.choice(workers)
        if kind in ("kill router", "stop router"):
            target, other = rng.choice(routers), ""
        elif kind not in PAIR_FAULTS:
            target, other = rng.choice(processes if kind == "cut from redis" else workers), ""
        if kind == "kill redis":
            target = "redis"
        short = kind == "stop shortly" or (kind != "stop for long" and rng.random() < 0.4)
        lasts = rng.uniform(0.2, 0.8) if short else rng.uniform(1.2, 2.5)
        yield Fault(kind, target, other, lasts, rng.expovariate(1 / pause_s))


@dataclass(slots=True)
class Trouble:
    """Carries faults out, up to `at_a_time` at once, and none on a target that has one. Of the workers of a role one at
    a time is down: without any, requests rightly fail after a while."""

    stack: FaultStack
    faults: Iterator[Fault]
    at_a_time: int = 2
    counts: Counter[str] = field(default_factory=Counter)
    _busy: set[str] = field(default_factory=set)

    async def run(self, until: asyncio.Event) -> None:
        """Until the event is set; what has begun is brought to its end."""
        room = asyncio.Semaphore(self.at_a_time)
        async with asyncio.TaskGroup() as group:
            for fault in self.faults:
                await _sleep_unless(until, fault.pause_s)
                await room.acquire()
                if until.is_set():
                    return
                touched = self._touched(fault)
                if touched & self._busy:
                    room.release()
                    continue
                self._busy |= touched
                group.create_task(self._one(fault, touched, room))

    def _touched(self, fault: Fault) -> set[str]:
        touched = {fault.target, fault.other} - {""}
        if fault.kind in RESTARTS:
            touched.add(f"a {self.stack.services[fault.target].role} is down")
        return touched

    async def _one(self, fault: Fault, touched: set[str], room: asyncio.Semaphore) -> None:
        try:
            self.counts[fault.kind] += 1
            await self._do(fault)
        finally:
            self._busy -= touched
            room.release()

    async def _do(self, fault: Fault) -> None:
        stack, name = self.stack, fault.target
        for_s = fault.lasts * stack.settings.peer_timeout_s
        match fault.kind:
            case "kill" | "kill router":
                old = await self._incarnations()
                stack.kill(name)
                await asyncio.sleep(for_s if fault.lasts < 1 else for_s / 2)
                await self._start(name, old)
            case "drain" | "drain in a hurry":
                old = await self._incarnations()
                stack.terminate(name)
                if fault.kind == "drain in a hurry":
                    await asyncio.sleep(for_s / 4)
                    if stack.services[name].is_running:
                        stack.terminate(name)
                status = await stack.until_gone(name, stack.settings.drain_timeout_s + 20)
                # A second signal may come when the event loop, and with it the handler, is gone already.
                allowed = (0,) if fault.kind == "drain" else (0, -signal.SIGTERM)
                assert status in allowed, f"{name} ended its drain with {status}"
                await self._start(name, old)
            case "stop shortly" | "stop for long" | "stop router":
                await stack.stand_still(name, for_s)
            case "kill redis":
                await stack.kill_redis(for_s)
            case "cut from redis":
                await self._disturb([(name, "redis")], Way.CUT, for_s)
            case "one-way stall":
                await self._disturb([(name, fault.other)], Way.STALLED, for_s)
            case _:
                await self._disturb([(name, fault.other), (fault.other, name)], PAIR_FAULTS[fault.kind], for_s)

    async def _disturb(self, ways: list[tuple[str, str]], way: Way, for_s: float) -> None:
        told = ", ".join(f"{source} > {target}" for source, target in ways)
        self.stack.note(f"{way.value} {told}")
        for source, target in ways:
            self.stack.network.set(source, target, way)
        await asyncio.sleep(for_s)
        for source, target in ways:
            self.stack.network.set(source, target, Way.OPEN)
        self.stack.note(f"healed {told}")

    async def _incarnations(self) -> dict[str, str]:
        return await self.stack.known_incarnations()

    async def _start(self, name: str, old: dict[str, str]) -> None:
        stack = self.stack
        stack.spawn(name)
        if stack.services[name].role == "router":
            await stack.until_router_serves(name)
        else:
            await stack.until_seen_ready(name, old.get(name, ""))
        stack.note(f"{name} is back")


async def _sleep_unless(event: asyncio.Event, seconds: float) -> None:
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        return
