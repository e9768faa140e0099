"""A real router, prefill and decode worker whose messages to each other are changed on the way, field by field.

After each batch the next request gets its tokens, and nothing is held for those that were disturbed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import msgspec
import pytest

from kvrelay.curve import CurveKey, CurveKeys
from kvrelay.messaging.messenger import Messenger
from kvrelay.process import HeldPort
from kvrelay.protocol import codec
from kvrelay.protocol.link import LinkEvent, LinkSettings
from kvrelay.protocol.messages import (
    Alive,
    AnyBody,
    Committed,
    FirstToken,
    Granted,
    Handoff,
    PeerRef,
    Prefill,
    Reject,
    Reserve,
    Status,
    StatusQuery,
    TokenBatch,
)
from kvrelay.protocol.sampling import Sampling
from kvrelay.worker import requests
from kvrelay_router.dispatch.dispatcher import RouterDispatcher
from kvrelay_router.dispatch.interface import DispatchSettings, GenerateRequest, NoWorkerReady, RequestFailed
from kvrelay_router.fleet.watch import StaticWorkers
from tests.fakes.delta_reader import read_batches
from tests.fakes.hash_runner import HashRunner, expected_tokens
from tests.fakes.traffic import with_changed_bytes, with_changed_field
from tests.fakes.waiting import PATIENCE_S, until
from tests.fakes.workers import LocalWorker

pytestmark = [pytest.mark.component, pytest.mark.timeout(240)]

NUM_BATCHES = 3
NUM_REQUESTS = 5
NUM_CHANGED = 12
"""Messages that are changed in a batch."""
NUM_REPLAYED = 60
SHARE_CHANGED = 0.4
DISTURBED_TIMEOUT_S = 4.0
SETTINGS = LinkSettings(0.1, 2.0)
RECORDED = {Prefill, Reserve, Granted, Handoff, Committed, FirstToken, TokenBatch, StatusQuery, Status}
TRUSTED = frozenset({"kind", "incarnation"})
"""Fields that stay. The name of a newer incarnation ends the link to the present one: that a worker has restarted is
taken on trust from routers (SECURITY.md), and a wrong name costs the pair `peer_timeout_s`."""
_numbers = itertools.count()


@dataclass
class Wire:
    """Records every body that is encoded, by kind, and changes some while `num_left` lasts."""

    rng: random.Random
    num_left: int = 0
    corpus: defaultdict[type, list[bytes]] = field(default_factory=lambda: defaultdict(list))
    changed: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._encode: Callable[[AnyBody], list[bytes]] = codec.encode_body

    def encode(self, body: AnyBody) -> list[bytes]:
        frame, *tokens = self._encode(body)
        if isinstance(body, Alive | Reject | msgspec.Raw):
            return [frame]
        self.corpus[type(body)].append(frame)
        if self.num_left and self.rng.random() < SHARE_CHANGED:
            self.num_left -= 1
            self.changed[type(body).__name__] += 1
            frame = with_changed_field(frame, self.rng, TRUSTED)
        return [frame, *tokens]


@dataclass
class Fleet:
    dispatcher: RouterDispatcher
    workers: list[LocalWorker]
    curve: CurveKeys | None

    def submit(self, sampling: Sampling, prompt: list[int], timeout_s: float, num_sequences: int = 1) -> Any:
        name = f"r{next(_numbers)}"
        return self.dispatcher.submit(
            GenerateRequest(
                request_id=name,
                prompt_ids=prompt,
                sampling=sampling,
                num_sequences=num_sequences,
                timeout_s=timeout_s,
            )
        )

    async def check_a_good_request(self, rng: random.Random) -> None:
        """Its tokens are those of an undisturbed run."""
        prompt, sampling = rng.choices(range(1, 900), k=70), Sampling(temperature=0.0, max_tokens=12, ignore_eos=True)
        await until(lambda: self.dispatcher.ready_workers() == {"prefill": 1, "decode": 1})
        tokens: list[int] = []
        async for deltas in read_batches(self.submit(sampling, prompt, PATIENCE_S)):
            tokens += [token for delta in deltas for token in delta.token_ids]
        assert tokens == expected_tokens(prompt, sampling, 512)

    async def until_clean(self) -> None:
        """Nothing is held for any request."""
        await until(lambda: all(worker.is_clean() for worker in self.workers))
        assert not self.dispatcher.num_running and self.dispatcher.load.is_empty
        for worker in self.workers:
            worker.context.pool.check_integrity()
            assert not worker.runner.num_sequences
            assert worker._task is not None and not worker._task.done()


@asynccontextmanager
async def real_fleet(curve_file: Path | None) -> AsyncIterator[Fleet]:
    curve = None if curve_file is None else CurveKeys.read(curve_file)
    with HeldPort() as one, HeldPort() as other:
        workers = [
            LocalWorker(
                "none", role, HashRunner(), worker_id=f"{role}-0", http_port=port.port, curve_key_file=curve_file
            )
            for role, port in (("prefill", one), ("decode", other))
        ]

        def open_messenger(on_event: Callable[[LinkEvent], None]) -> Messenger:
            return Messenger("router", on_event, settings=SETTINGS, curve=curve)

        static = StaticWorkers([f"http://127.0.0.1:{port.port}" for port in (one, other)], "hash-model", 0.05)
        settings = DispatchSettings(registry_interval_s=0.05, status_interval_s=0.2, local_prefill_tokens=0)
        dispatcher = RouterDispatcher(open_messenger, None, settings, static=static)
        try:
            for worker in workers:
                await worker.start()
            dispatcher.start()
            yield Fleet(dispatcher, workers, curve)
        finally:
            await dispatcher.close()
            for worker in workers:
                worker.die()


def some_sampling(rng: random.Random) -> Sampling:
    return Sampling(
        temperature=rng.choice([0.0, 1.0]),
        seed=rng.getrandbits(40),
        max_tokens=rng.choice([1, 8, 20]),
        logprobs=rng.choice([None, 2]),
        ignore_eos=True,
    )


async def disturbed(fleet: Fleet, rng: random.Random) -> None:
    """A request that may fail, or bring the tokens of other parameters. It ends."""
    prompt = rng.choices(range(1, 900), k=rng.randint(1, 90))
    with contextlib.suppress(RequestFailed, NoWorkerReady):
        running = fleet.submit(some_sampling(rng), prompt, DISTURBED_TIMEOUT_S, rng.choice([1, 1, 3]))
        async for _ in read_batches(running):
            pass


@pytest.fixture(params=[False, True], ids=["plain", "curve"])
def curve_file(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    if not request.param:
        return None
    path = tmp_path / "key"
    path.write_bytes(CurveKey.new().secret)
    path.chmod(0o600)
    return path


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Iterator[Wire]:
    monkeypatch.setattr(requests, "DEADLINE_GRACE_S", 0.5)
    wire = Wire(random.Random(7))
    with patch.object(codec, "encode_body", wire.encode):
        yield wire


def run(test: Callable[[], Any]) -> None:
    asyncio.run(test())


async def test_changed_fields_disturb_no_other_request_and_leave_nothing(wire: Wire, curve_file: Path | None) -> None:
    async with real_fleet(curve_file) as fleet:
        await fleet.check_a_good_request(wire.rng)
        for _ in range(NUM_BATCHES):
            wire.num_left = NUM_CHANGED
            while wire.num_left:
                await asyncio.gather(*[disturbed(fleet, wire.rng) for _ in range(NUM_REQUESTS)])
            await fleet.check_a_good_request(wire.rng)
            await fleet.until_clean()
        assert sum(wire.changed.values()) == NUM_BATCHES * NUM_CHANGED


async def test_a_stranger_that_replays_changed_messages_leaves_nothing(wire: Wire, curve_file: Path | None) -> None:
    """All kinds, to all processes, about requests that run and that do not; fields and bytes are changed."""
    async with real_fleet(curve_file) as fleet:
        await fleet.check_a_good_request(wire.rng)
        await until(lambda: wire.corpus.keys() >= RECORDED)
        frames = [frame for kind in wire.corpus.values() for frame in kind]
        targets = [fleet.dispatcher.messenger.me, *[worker.me for worker in fleet.workers]]
        for number in range(NUM_BATCHES):
            running = asyncio.create_task(fleet.check_a_good_request(wire.rng))
            stranger = Messenger(f"stranger-{number}", lambda _: None, settings=SETTINGS, curve=fleet.curve)
            stranger.start()
            for _ in range(NUM_REPLAYED):
                frame = wire.rng.choice(frames)
                body = msgspec.Raw(
                    with_changed_bytes(frame, wire.rng)
                    if wire.rng.random() < 1 / 3
                    else with_changed_field(frame, wire.rng, TRUSTED)
                )
                _send_raw(stranger, wire.rng.choice(targets), body, f"r{wire.rng.randrange(8)}")
                await asyncio.sleep(0)
            await running
            stranger.close()
            await fleet.check_a_good_request(wire.rng)
            await fleet.until_clean()


def _send_raw(stranger: Messenger, to: PeerRef, body: msgspec.Raw, request: str) -> None:
    stranger.send(to, cast("AnyBody", body), request=request, attempt=1, sequence=0)
