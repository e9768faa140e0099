"""Real services whose transport goes wrong: a request gets exactly its tokens, or is given up with a cause, and nothing
stays behind. With the hash model every token proves that the right blocks were read."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest

from kvrelay.config.worker import WorkerConfig
from kvrelay.handoff.transports.base import TransferReceiver, TransferSender
from kvrelay.protocol.messages import Cancel, Reassign
from kvrelay.protocol.sampling import Sampling
from kvrelay.worker.context import Role, WorkerContext
from kvrelay_decode import incoming_handoffs
from kvrelay_decode.service import DecodeRole
from kvrelay_prefill.service import PrefillRole
from tests.component.transfer.transports import WRAPPED, Transport
from tests.component.workers.rig import Fleet, prompt_of
from tests.fakes.faulty_transport import (
    Every,
    Fault,
    Faults,
    FaultyReceiver,
    FaultySender,
    InnerSender,
    Point,
    Schedule,
    Script,
    Seeded,
)
from tests.fakes.hash_runner import HashRunner, expected_tokens
from tests.fakes.workers import LocalWorker, Received, StubRouter

pytestmark = pytest.mark.component
GREEDY = Sampling(temperature=0.0, max_tokens=40, ignore_eos=True)
SETTINGS = {"token_budget": 64, "max_running": 16}
SHARES = dict.fromkeys((Fault.DELAY, Fault.REORDER, Fault.DROP, Fault.CORRUPT, Fault.STALL), 0.06)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incoming_handoffs, "BLOCKS_DUE_S", 0.5)


@pytest.fixture(params=list(WRAPPED.values()), ids=list(WRAPPED))
def inner(request: pytest.FixtureRequest) -> tuple[Transport, InnerSender]:
    transport, make_inner = request.param
    if transport.why_not:
        pytest.skip(transport.why_not)
    return transport, make_inner


@dataclass
class FaultyFleet:
    """A prefill worker and some decode workers over faulty transports."""

    inner: tuple[Transport, InnerSender]
    sending: Schedule
    landing: Schedule = field(default_factory=Script)
    num_decode: int = 1
    checksums: bool = True

    def prefill_role(self, context: WorkerContext, _: WorkerConfig) -> Role:
        faults = Faults(self.sending)
        sender: TransferSender = FaultySender(context.pool_memory, self.inner[1], faults, checksums=self.checksums)
        return PrefillRole(context, {sender.name: sender})

    def decode_role(self, context: WorkerContext, _: WorkerConfig) -> Role:
        assert isinstance(context.pool_memory, np.ndarray)
        receiver: TransferReceiver = FaultyReceiver(
            self.inner[0].make_receiver(context.pool_memory), Faults(self.landing)
        )
        return DecodeRole(context, {receiver.name: receiver})

    @asynccontextmanager
    async def serving(self, redis_url: str) -> AsyncIterator[Fleet]:
        roles = ["prefill", *["decode"] * self.num_decode]
        workers = [LocalWorker(redis_url, role, HashRunner(), **SETTINGS) for role in roles]
        for worker in workers:
            worker.use(self.prefill_role if worker.config.role == "prefill" else self.decode_role)
        for worker in workers:
            await worker.start()
        fleet = Fleet(StubRouter(), workers[:1], workers[1:])
        try:
            yield fleet
            await fleet.until_clean()
        finally:
            for worker in workers:
                await worker.stop()
            fleet.router.close()


async def go_on(f: Fleet, got: Received, name: str) -> Received:
    """As the router does: another decode worker, if prefill needs one."""
    await got.until(lambda r: bool(r.finish or r.failed or r.need_decode), 30)
    if got.need_decode:
        f.router.send(f.decode[0].me, name, Cancel(reason="reassigned"))
        f.router.send(f.prefill[0].me, name, Reassign(decode=f.decode[1].me))
    return await got.finished()


@pytest.mark.everyday(8)
@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("fault", [Fault.DELAY, Fault.REORDER, Fault.DUPLICATE, Fault.DROP, Fault.CORRUPT, Fault.STALL])
async def test_a_faulty_message_costs_time_and_no_token(
    inner: tuple[Transport, InnerSender], redis_url: str, fault: Fault, number: int
) -> None:
    """Blocks that are lost or corrupted are sent to another decode worker."""
    if fault is Fault.DUPLICATE and inner[0].one_sided:
        pytest.skip(
            "a transport that writes one-sidedly must not write twice by itself: nobody could know when it ended"
        )
    async with FaultyFleet(inner, Script({(Point.PUSH, number): fault}), num_decode=2).serving(redis_url) as f:
        prompt = prompt_of(400)
        got = await go_on(f, f.router.prefill(f.prefill[0].me, f.decode[0].me, "a", prompt, GREEDY), "a")
        assert got.output == expected_tokens(prompt, GREEDY, 512)
        assert bool(got.need_decode) == (fault in (Fault.DROP, Fault.CORRUPT))


@pytest.mark.everyday(4)
@pytest.mark.parametrize("fault", [Fault.DELAY, Fault.REORDER, Fault.STALL])
async def test_samples_wait_for_the_one_whose_blocks_are_late(
    inner: tuple[Transport, InnerSender], redis_url: str, fault: Fault
) -> None:
    """The last block of a prompt is sent for one of them alone."""
    async with FaultyFleet(inner, Script({(Point.PUSH, number): fault for number in (1, 3)})).serving(redis_url) as f:
        prompt, sampling = prompt_of(150), Sampling(temperature=1.0, seed=3, max_tokens=20, ignore_eos=True)
        samples = [
            f.router.prefill(f.prefill[0].me, f.decode[0].me, "a", prompt, sampling, sample=(index, 5))
            for index in range(5)
        ]
        for index, sample in enumerate(samples):
            assert (await sample.finished()).output == expected_tokens(prompt, sampling, 512, index)


@pytest.mark.everyday(4)
@pytest.mark.parametrize("fault", [Fault.DELAY, Fault.REORDER, Fault.DUPLICATE, Fault.STALL])
async def test_late_or_doubled_reports_cost_time_and_no_token(
    inner: tuple[Transport, InnerSender], redis_url: str, fault: Fault
) -> None:
    sending = Every(Point.PUSHED, Fault.DELAY if fault is Fault.DUPLICATE else fault)
    async with FaultyFleet(inner, sending, Every(Point.LANDED, fault)).serving(redis_url) as f:
        for number in range(3):
            prompt = prompt_of(150 + number)
            got = await f.router.prefill(f.prefill[0].me, f.decode[0].me, f"r{number}", prompt, GREEDY).finished()
            assert got.output == expected_tokens(prompt, GREEDY, 512)


@pytest.mark.everyday(3)
@pytest.mark.parametrize(
    ("fault", "cause"), [(Fault.CORRUPT, "corrupted"), (Fault.DROP, "are missing"), (Fault.DIE, "broke")]
)
async def test_a_transport_that_never_delivers_is_given_up_and_another_decode_worker_is_asked_for(
    inner: tuple[Transport, InnerSender], redis_url: str, fault: Fault, cause: str
) -> None:
    async with FaultyFleet(inner, Every(Point.PUSH, fault)).serving(redis_url) as f:
        got = f.router.prefill(f.prefill[0].me, f.decode[0].me, "a", prompt_of(60), GREEDY)
        await got.until(lambda r: bool(r.need_decode))
        assert cause in got.need_decode[0].reason
        f.router.send(f.prefill[0].me, "a", Reassign(decode=None))
        await got.finished()
        assert got.failed == "no decode worker is left"


@pytest.mark.parametrize("seed", range(2))
async def test_many_requests_with_cancels_over_a_bad_network_get_their_tokens_or_end(
    inner: tuple[Transport, InnerSender], redis_url: str, seed: int
) -> None:
    async with FaultyFleet(inner, Seeded(seed, SHARES), Seeded(seed, SHARES)).serving(redis_url) as f:
        rng = random.Random(seed)
        kept = []
        for number in range(40):
            prompt = prompt_of(rng.randint(1, 150), number)
            got = f.router.prefill(f.prefill[0].me, f.decode[0].me, f"r{number}", prompt, GREEDY)
            if number % 2:
                kept.append((prompt, got))
            else:
                await asyncio.sleep(rng.random() * 0.03)
                for worker in (f.prefill[0].me, f.decode[0].me):
                    f.router.send(worker, f"r{number}", Cancel(reason="the client is gone"))
        for prompt, got in kept:
            await got.until(lambda r: bool(r.finish or r.failed or r.need_decode), 30)
            if got.need_decode:  # an outcome with a cause
                name = next(key[0] for key, value in f.router.received.items() if value is got)
                f.router.send(f.prefill[0].me, name, Reassign(decode=None))
                await got.finished()
            else:
                assert got.output == expected_tokens(prompt, GREEDY, 512)
        assert any(not got.need_decode for _, got in kept)
