"""The real dispatcher and the real services with the hash model on one event loop, over real sockets, to be disturbed.

Every token is a hash of what the cache holds, so one wrong, missing or early block shows in the output.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import Literal
from unittest.mock import patch

from kvrelay.fleet import Registry
from kvrelay.messaging.messenger import Messenger
from kvrelay.protocol.link import LinkEvent, LinkSettings
from kvrelay.protocol.sampling import FinishReason, Sampling
from kvrelay.telemetry.tracer import Tracer
from kvrelay_router.dispatch.dispatcher import RouterDispatcher
from kvrelay_router.dispatch.interface import DispatchSettings, GenerateRequest, NoWorkerReady, RequestFailed
from tests.fakes.delta_reader import read_batches
from tests.fakes.hash_runner import EOS_TOKEN_ID, VOCAB_SIZE, HashRunner, expected_tokens
from tests.fakes.workers import LocalWorker

Role = Literal["prefill", "decode"]
PEER_TIMEOUT_S = 0.8
PEER_INTERVAL_S = 0.1
MAX_MODEL_LEN = 224
HANGS_AFTER_S = 60.0


@dataclass(frozen=True, slots=True)
class Job:
    """A request, and the output of an undisturbed run for each of its sequences. `leave_after`: tokens until its
    client goes away; None: it stays."""

    name: str
    prompt: list[int]
    sampling: Sampling
    num_sequences: int
    leave_after: int | None
    expected: list[list[int]]
    opening: tuple[int, ...] = ()  # as if a grammar forced the first tokens of all its sequences


def make_job(number: int, rng: random.Random) -> Job:
    """Prompts of a few families, so that prefixes are shared; some clients leave early."""
    family = random.Random(rng.randrange(12)).choices(range(1, VOCAB_SIZE), k=160)
    prompt = family[: rng.randint(1, 120)] + rng.choices(range(1, VOCAB_SIZE), k=rng.randint(0, 30))
    sampling = Sampling(
        temperature=rng.choice([0.0, 1.0]),
        seed=rng.getrandbits(40),
        max_tokens=rng.choice([1, 2, rng.randint(3, 60)]),
        ignore_eos=rng.random() < 0.7,
    )
    num_sequences = rng.choice([1, 1, 1, 3])
    expected = [expected_tokens(prompt, sampling, MAX_MODEL_LEN, index) for index in range(num_sequences)]
    leave_after = rng.randint(0, 20) if rng.random() < 0.2 else None
    num_forced = rng.choice([0, 0, rng.randint(1, 20)])
    same = takewhile(lambda tokens: len({*tokens}) == 1 and tokens[0] != EOS_TOKEN_ID, zip(*expected, strict=False))
    opening = tuple(tokens[0] for tokens in islice(same, min(num_forced, sampling.max_tokens - 1)))
    return Job(f"job-{number}", prompt, sampling, num_sequences, leave_after, expected, opening)


@dataclass
class LocalFleet:
    """Workers keep their names over restarts, as a supervisor's do."""

    redis_url: str
    prefix: str
    make_runner: Callable[[], HashRunner]
    settings: dict[str, object]
    dispatcher: RouterDispatcher
    workers: dict[str, LocalWorker] = field(default_factory=dict)
    events: list[str] = field(default_factory=list)  # what was done to the fleet, for the message of a failure

    async def start_worker(self, role: Role, name: str) -> None:
        settings = {
            "worker_id": name,
            "redis_prefix": self.prefix,
            "peer_timeout_s": PEER_TIMEOUT_S,
            "token_budget": 48,
            "max_running": 12,
        }
        worker = LocalWorker(self.redis_url, role, self.make_runner(), **(settings | self.settings))
        await worker.start()
        self.workers[name] = worker

    def check_nobody_crashed(self) -> None:
        """Raises what ended a worker that nobody stopped."""
        for name, worker in self.workers.items():
            assert worker._task is not None
            if worker._task.done():
                raise AssertionError(f"{name} ended by itself") from worker._task.exception()

    def living(self, role: Role) -> list[str]:
        return [name for name, worker in self.workers.items() if worker.config.role == role]

    async def until_ready(self, names: set[str]) -> None:
        """The router sees all of them ready."""
        async with asyncio.timeout(120):
            while True:
                described = self.dispatcher.view.describe(frozenset(), asyncio.get_running_loop().time())
                if {each["worker_id"] for each in described if each["state"] == "ready"} >= names:
                    return
                await asyncio.sleep(0.02)

    # -- disturbances -------------------------------------------------------------------------------------------------

    def kill(self, name: str) -> Role:
        """As SIGKILL looks to the others."""
        self.events.append(f"kill {name}")
        worker = self.workers.pop(name)
        worker.die()
        return worker.config.role

    async def restart(self, name: str, *, hurried: bool = False) -> None:
        """SIGTERM, drain, and a new start. `hurried` as for `LocalWorker.stop`."""
        self.events.append(f"restart {name}{' in a hurry' if hurried else ''}")
        worker = self.workers.pop(name)
        await worker.stop(hurried=hurried)
        await self.start_worker(worker.config.role, name)

    async def mute(self, name: str, for_s: float) -> None:
        """Nothing that it sends arrives; it hears all the others."""
        self.events.append(f"mute {name} for {for_s:.2f} s")
        with patch.object(self.workers[name].context.messenger._sockets, "send", lambda address, frames: None):
            await asyncio.sleep(for_s)

    async def deafen(self, name: str, for_s: float) -> None:
        """It hears nobody; what it sends arrives."""
        self.events.append(f"deafen {name} for {for_s:.2f} s")
        with patch.object(self.workers[name].context.messenger._links, "receive", lambda frames, now: None):
            await asyncio.sleep(for_s)

    async def lose_messages(self, name: str, for_s: float, share: float, rng: random.Random) -> None:
        """Some of what it sends is dropped on the way."""
        self.events.append(f"lose {share:.0%} of what {name} sends for {for_s:.2f} s")
        sockets = self.workers[name].context.messenger._sockets
        assert sockets is not None
        send = sockets.send

        def sometimes(address: str, frames: list[bytes]) -> None:
            if rng.random() > share:
                send(address, frames)

        with patch.object(sockets, "send", sometimes):
            await asyncio.sleep(for_s)

    # -- requests -----------------------------------------------------------------------------------------------------

    async def run(self, job: Job) -> None:
        """Holds what comes against what must come, token by token."""
        try:
            async with asyncio.timeout(HANGS_AFTER_S):
                await self._run(job)
        except (TimeoutError, RequestFailed) as error:
            record = self.dispatcher.recent_request(job.name)
            raise AssertionError(f"{job.name}: {error!r}: {record}; fleet: {self.held()}") from error

    async def _run(self, job: Job) -> None:
        request = GenerateRequest(
            request_id=job.name,
            prompt_ids=job.prompt,
            sampling=job.sampling,
            num_sequences=job.num_sequences,
            opening=job.opening,
        )
        while True:
            try:
                handle = self.dispatcher.submit(request)
                break
            except NoWorkerReady:  # 503 with Retry-After: the client comes again
                await asyncio.sleep(0.1)
        outputs: list[list[int]] = [[] for _ in job.expected]
        finished: dict[int, FinishReason] = {}
        async for deltas in read_batches(handle):
            for delta in deltas:
                assert delta.sequence not in finished, f"{job.name}: tokens after the end"
                outputs[delta.sequence] += delta.token_ids
                expected = job.expected[delta.sequence][: len(outputs[delta.sequence])]
                assert outputs[delta.sequence] == expected, f"{job.name}: {outputs[delta.sequence]} is not {expected}"
                if delta.finish is not None:
                    finished[delta.sequence] = delta.finish
            if job.leave_after is not None and sum(map(len, outputs)) >= job.leave_after:
                handle.cancel()
                return
        assert outputs == job.expected, f"{job.name}: ended early"
        for index, output in enumerate(job.expected):
            ends_by_token = output[-1] == EOS_TOKEN_ID and not job.sampling.ignore_eos
            assert finished[index] == (FinishReason.STOP_TOKEN if ends_by_token else FinishReason.LENGTH)

    def held(self) -> dict[str, tuple[dict[str, int], dict[str, int]]]:
        """Blocks by state and queues of the living workers."""
        return {name: (worker.blocks, worker.started.role.queues()) for name, worker in self.workers.items()}

    async def until_clean(self, timeout_s: float = 120.0) -> None:
        """The router and the living workers hold nothing of any request, and their books add up."""
        assert self.dispatcher.num_running == 0
        assert self.dispatcher.load.is_empty
        try:
            async with asyncio.timeout(timeout_s):
                while not all(worker.is_clean() for worker in self.workers.values()):
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"something is still held: {self.held()}") from None
        for worker in self.workers.values():
            worker.context.pool.check_integrity()
            assert worker.runner.num_sequences == 0, "a sampler's state was kept"


@asynccontextmanager
async def local_fleet(
    redis_url: str,
    prefill: int,
    decode: int,
    make_runner: Callable[[], HashRunner],
    *,
    tracer: Tracer | None = None,
    **settings: object,
) -> AsyncIterator[LocalFleet]:
    """Workers prefill-0, ..., decode-0, ... behind one dispatcher."""
    prefix = f"faults-{next(_numbers)}"
    registry = Registry(redis_url, prefix)
    link = LinkSettings(alive_interval_s=PEER_INTERVAL_S, peer_timeout_s=PEER_TIMEOUT_S)

    def open_messenger(on_event: Callable[[LinkEvent], None]) -> Messenger:
        return Messenger("router", on_event, settings=link)

    dispatcher = RouterDispatcher(
        open_messenger,
        lambda: registry.list_workers("hash-model"),
        DispatchSettings(max_attempts=50, registry_interval_s=0.1, status_interval_s=0.2, max_requests=2500),
        tracer=tracer,
    )
    fleet = LocalFleet(redis_url, prefix, make_runner, settings, dispatcher)
    dispatcher.start()
    try:
        for number in range(prefill):
            await fleet.start_worker("prefill", f"prefill-{number}")
        for number in range(decode):
            await fleet.start_worker("decode", f"decode-{number}")
        await fleet.until_ready(set(fleet.workers))
        yield fleet
    finally:
        await dispatcher.close()
        for worker in fleet.workers.values():
            worker.die()
        await registry.close()


_numbers = itertools.count()
