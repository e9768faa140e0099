"""A decode worker's role and its scheduler, message by message, without links, transports and forwards."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from types import SimpleNamespace
from typing import cast

import pytest

from kvrelay.engine.batch import ModelSpec
from kvrelay.kv.pool import BlockState
from kvrelay.protocol.link import Delivered
from kvrelay.protocol.messages import (
    Abort,
    AnyBody,
    Deferred,
    Drained,
    Generate,
    Granted,
    Header,
    PeerRef,
    Prompt,
    Refused,
    Reserve,
    pack_tokens,
)
from kvrelay.protocol.sampling import Sampling
from kvrelay.scheduling.queue.waiting_queue import PROBES_A_STEP
from kvrelay.scheduling.sequence import Sequence
from kvrelay.telemetry.instruments import Instruments
from kvrelay.telemetry.stages import RecentStages
from kvrelay.transfer.base import ReceiverEvent
from kvrelay.worker.context import WorkerContext
from kvrelay_decode.quarantine import SETTLE_TICKS
from kvrelay_decode.service import DecodeRole
from tests.unit.scheduling.bench import BLOCK_SIZE, Bench

pytestmark = pytest.mark.unit

ROUTER = PeerRef("router", "1", "tcp://router")
PREFILL = PeerRef("p1", "1", "tcp://p1")
OTHER = PeerRef("p2", "1", "tcp://p2")


class SilentReceiver:
    """A transport by which nothing comes."""

    name = "silent"

    def __init__(self, needs_quarantine: bool) -> None:
        self.needs_quarantine = needs_quarantine
        self.endpoint: dict[str, str] = {}

    def start(self, on_event: Callable[[ReceiverEvent], None]) -> None:
        self.report = on_event

    def admit(self, reservation: str, first_block: int, slots: Seq[int]) -> None:
        pass

    def release(self, reservation: str) -> None:
        pass

    def close(self) -> None:
        pass


class DecodeWorker:
    """`sent`: what the role has sent to prefill workers. `num_wakes`: how often it has woken the step loop."""

    def __init__(self, num_blocks: int = 16, max_running: int = 8, *, one_sided: bool = True) -> None:
        self.bench = Bench(num_blocks, max_running=max_running)
        self.scheduler = self.bench.scheduler
        self.sent: list[tuple[PeerRef, AnyBody]] = []
        self.num_wakes = 0
        spec = ModelSpec("m", 100, num_blocks * BLOCK_SIZE, (), 1, 1, 1, BLOCK_SIZE, num_blocks, 1, "float32", "f")
        context = SimpleNamespace(
            spec=spec,
            scheduler=self.scheduler,
            messenger=SimpleNamespace(send=self._send, me=PeerRef("d", "1", "tcp://d")),
            steps=SimpleNamespace(
                wake=self._wake, adopt=self.scheduler.adopt, abort=self.scheduler.abort, add=self._add
            ),
            instruments=Instruments(),
            metrics=None,
            tracer=None,
            events=None,
            recent=RecentStages(),
        )
        self.role = DecodeRole(cast("WorkerContext", context), {"silent": SilentReceiver(one_sided)})
        self.role.start()

    def _send(self, peer: PeerRef, body: AnyBody, **about: object) -> None:
        self.sent.append((peer, body))

    def _wake(self) -> None:
        self.num_wakes += 1

    def _add(self, sequence: Sequence) -> None:
        self.scheduler.add(sequence)
        self._wake()

    def deliver(self, peer: PeerRef, body: AnyBody, request: str) -> None:
        header = Header(
            sender=peer.peer_id,
            incarnation="1",
            reply_to=peer.address,
            to_incarnation="1",
            link=1,
            request=request,
            attempt=1,
        )
        self.role.on_message(Delivered(peer, header, body))

    def reserve(self, request: str, tokens: list[int], prefill: PeerRef = PREFILL) -> None:
        prompt = Prompt(tokens=pack_tokens(tokens), sampling=Sampling(max_tokens=3))
        body = Reserve(prompt=prompt, router=ROUTER, transports=["silent"], num_blocks=1)
        self.deliver(prefill, body, request)

    def generate(self, request: str, tokens: list[int]) -> None:
        self.deliver(
            ROUTER, Generate(prompt=Prompt(tokens=pack_tokens(tokens), sampling=Sampling(max_tokens=3))), request
        )

    def granted(self, peer: PeerRef = PREFILL) -> Granted:
        """The last grant to a worker."""
        return next(body for to, body in reversed(self.sent) if to == peer and isinstance(body, Granted))

    def abort(self, request: str) -> None:
        self.deliver(PREFILL, Abort(reservation=self.granted().reservation, reason="cancelled"), request)

    @property
    def num_quarantined(self) -> int:
        return self.bench.pool.counts()[BlockState.QUARANTINED]


def test_a_local_prompt_that_waits_for_a_handoffs_prefix_is_scheduled_when_that_handoff_is_given_up() -> None:
    """Nothing runs, so that the step loop sleeps until it is woken; a lost sender may never send Drained."""
    worker = DecodeWorker()
    worker.reserve("a", [5] * 12)
    worker.generate("b", [5] * 12)
    assert not worker.scheduler.schedule().has_work, "b waits for a's blocks"
    woken = worker.num_wakes
    worker.abort("a")
    assert worker.num_quarantined
    assert worker.num_wakes > woken
    assert worker.scheduler.schedule().has_work


def test_a_handoff_that_waits_for_a_place_is_granted_when_another_goes_into_quarantine() -> None:
    worker = DecodeWorker(max_running=1)
    worker.reserve("a", [5] * 4)
    worker.reserve("b", [6] * 4, OTHER)
    assert isinstance(worker.sent[-1][1], Deferred)
    worker.abort("a")
    assert worker.granted(OTHER).slots


@pytest.mark.parametrize("one_sided", [True, False])
def test_a_lost_prefill_worker_is_granted_nothing_any_more(one_sided: bool) -> None:
    worker = DecodeWorker(max_running=1, one_sided=one_sided)
    worker.reserve("a", [5] * 4)
    worker.reserve("b", [6] * 4)
    worker.reserve("c", [7] * 4, OTHER)
    num_sent = len([to for to, _ in worker.sent if to == PREFILL])
    worker.role.on_peer_lost(PREFILL, "silent", replaced=False)
    assert len([to for to, _ in worker.sent if to == PREFILL]) == num_sent
    assert worker.num_quarantined == one_sided
    assert worker.granted(OTHER).slots


def test_a_prefill_worker_that_asks_again_after_its_reservation_went_into_quarantine_is_refused() -> None:
    """The router may name a decode worker again from which it took the sequence."""
    worker = DecodeWorker()
    worker.reserve("a", [5] * 4)
    worker.abort("a")
    assert worker.num_quarantined
    num_sent = len(worker.sent)
    worker.reserve("a", [5] * 4)
    assert [type(body) for _, body in worker.sent[num_sent:]] == [Refused]
    worker.deliver(PREFILL, Drained(reservation=worker.granted().reservation), "a")
    for _ in range(SETTLE_TICKS):
        worker.role.on_tick(time.monotonic())
    assert not worker.num_quarantined
    worker.reserve("a", [5] * 4)
    assert isinstance(worker.sent[-1][1], Granted)


def test_a_prompt_behind_many_that_wait_for_one_handoff_does_not_wait_for_it() -> None:
    """More than a pass looks up. Nothing runs, so that no step follows in which the rest is looked up."""
    worker = DecodeWorker(num_blocks=32)
    worker.reserve("a", [5] * 12)
    for number in range(PROBES_A_STEP + 1):
        worker.generate(f"b{number}", [5] * 12)
    worker.generate("c", [6] * 4)
    assert not worker.scheduler.schedule().has_work
    woken = worker.num_wakes
    worker.role.on_tick(time.monotonic())
    assert worker.num_wakes > woken
    assert [row.sequence.key[0] for row in worker.scheduler.schedule().rows] == ["c"]
