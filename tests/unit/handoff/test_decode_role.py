"""A decode worker's role and its scheduler, message by message, without links, transports and forwards."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from types import SimpleNamespace
from typing import cast

import pytest

from kvrelay.awake_clock import MAX_GAP_S
from kvrelay.handoff.quarantine import SETTLE_TICKS
from kvrelay.handoff.transports.base import Landed, ReceiverEvent
from kvrelay.handoff.transports.pool_memory import BlockPart
from kvrelay.kv.pool import BlockState
from kvrelay.protocol.failure_kind import FailureKind
from kvrelay.protocol.link import Delivered
from kvrelay.protocol.messages import (
    Abort,
    AnyBody,
    Drained,
    Failed,
    Generate,
    Granted,
    Handoff,
    Header,
    PeerRef,
    Prompt,
    Refused,
    Released,
    Reserve,
    TokenBatch,
    pack_tokens,
)
from kvrelay.protocol.sampling import Sampling
from kvrelay.scheduling.plan import SequenceOutput
from kvrelay.scheduling.queue.waiting_queue import PROBES_A_STEP
from kvrelay.scheduling.sequence import Sequence
from kvrelay.step.batch import ModelSpec
from kvrelay.telemetry.metrics import Instruments
from kvrelay.telemetry.tracer import RecentEvents
from kvrelay.worker.context import WorkerContext
from kvrelay_decode import incoming_handoffs
from kvrelay_decode.incoming_handoffs import BLOCKS_DUE_S
from kvrelay_decode.service import DecodeRole
from tests.unit.scheduling.bench import BLOCK_SIZE, Bench

ROUTER = PeerRef("router", "1", "tcp://router")
PREFILL = PeerRef("p1", "1", "tcp://p1")
OTHER = PeerRef("p2", "1", "tcp://p2")


class SilentReceiver:
    """A transport by which nothing comes."""

    name = "silent"

    def __init__(self, is_one_sided: bool) -> None:
        self.is_one_sided = is_one_sided
        self.endpoint: dict[str, str] = {}

    def start(self, on_event: Callable[[ReceiverEvent], None]) -> None:
        self.report = on_event

    def admit(self, reservation: str, first_block: int, slots: Seq[int], parts: Seq[BlockPart] = ()) -> None:
        pass

    def release(self, reservation: str) -> None:
        pass

    def close(self) -> None:
        pass


class DecodeWorker:
    """`sent`: what the role has sent to prefill workers. `num_wakes`: how often it has woken the step loop."""

    def __init__(
        self, num_blocks: int = 16, max_running: int = 8, *, one_sided: bool = True, numerics: str = ""
    ) -> None:
        self.bench = Bench(num_blocks, max_running=max_running)
        self.scheduler = self.bench.scheduler
        self.sent: list[tuple[PeerRef, AnyBody]] = []
        self.num_wakes = 0
        spec = ModelSpec(
            "m", 100, num_blocks * BLOCK_SIZE, (), 1, 1, 1, BLOCK_SIZE, num_blocks, 1, "float32", "f", numerics
        )
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
            recent=RecentEvents(),
        )
        self.receiver = SilentReceiver(one_sided)
        self.role = DecodeRole(cast("WorkerContext", context), {"silent": self.receiver})
        self.role.start()

    def _send(self, peer: PeerRef, body: AnyBody, **about: object) -> None:
        self.sent.append((peer, body))

    def _wake(self) -> None:
        self.num_wakes += 1

    def _add(self, sequence: Sequence) -> None:
        self.scheduler.add(sequence)
        self._wake()

    def deliver(self, peer: PeerRef, body: AnyBody, request: str) -> None:
        self.role.on_message(Delivered(peer, self._header(peer, request), body))

    @staticmethod
    def _header(peer: PeerRef, request: str) -> Header:
        return Header(
            sender=peer.peer_id,
            incarnation="1",
            reply_to=peer.address,
            to_incarnation="1",
            link=1,
            request=request,
            attempt=1,
        )

    def reserve(self, request: str, tokens: list[int], prefill: PeerRef = PREFILL, numerics: str = "") -> None:
        prompt = Prompt(tokens=pack_tokens(tokens), sampling=Sampling(max_tokens=3))
        body = Reserve(prompt=prompt, router=ROUTER, transports=["silent"], numerics=numerics)
        self.deliver(prefill, body, request)

    def generate(self, request: str, tokens: list[int], router: PeerRef = ROUTER) -> None:
        prompt = Prompt(tokens=pack_tokens(tokens), sampling=Sampling(max_tokens=3))
        self.deliver(router, Generate(prompt=prompt), request)

    def hand_over(self, request: str, reservation: str, num_tokens: int) -> None:
        num_blocks = len(self.granted().slots)
        body = Handoff(reservation=reservation, index=0, token_id=7, num_tokens=num_tokens, num_blocks=num_blocks)
        self.deliver(PREFILL, body, request)

    def granted(self, peer: PeerRef = PREFILL) -> Granted:
        """The last grant to a worker."""
        return next(body for to, body in reversed(self.sent) if to == peer and isinstance(body, Granted))

    def sent_to(self, peer: PeerRef) -> list[type[AnyBody]]:
        return [type(body) for to, body in self.sent if to == peer]

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
    assert not worker.sent_to(OTHER)
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


def test_a_step_is_one_message_to_each_router() -> None:
    worker = DecodeWorker()
    other = PeerRef("r2", "1", "tcp://r2:1")
    for number, router in enumerate([ROUTER, ROUTER, other, ROUTER]):
        worker.generate(f"q{number}", [number] * 4, router)
    running = {row.sequence.key[0]: row.sequence for row in worker.scheduler.schedule().rows}
    outputs = [SequenceOutput(running[f"q{number}"], 0, (7,)) for number in range(4)]
    worker.role.callbacks().committed(outputs)
    batches = [
        (to, [each.request for each in body.entries]) for to, body in worker.sent if isinstance(body, TokenBatch)
    ]
    assert batches == [(ROUTER, ["q0", "q1", "q3"]), (other, ["q2"])]


# -- what may stay in quarantine for ever ---------------------------------------------------------------------------


def lose_three_quarters(worker: DecodeWorker) -> None:
    """12 of the pool's 16 blocks go into quarantine, and their sender is silent."""
    worker.reserve("lost", [9] * 48)
    worker.role.on_peer_lost(PREFILL, "silent", replaced=False)
    assert worker.num_quarantined == 12


def test_a_prompt_that_no_longer_fits_fails_at_once_and_those_behind_it_run() -> None:
    worker = DecodeWorker()
    lose_three_quarters(worker)
    worker.generate("large", [5] * 17)
    worker.generate("small", [6] * 4)
    assert not worker.scheduler.schedule().has_work
    worker.role.on_tick(time.monotonic())
    failed = [body for _, body in worker.sent if isinstance(body, Failed)]
    assert [(each.failure, each.retriable, each.refused) for each in failed] == [
        (FailureKind.OUT_OF_MEMORY, True, True)
    ]
    assert "12 of 16 are in quarantine" in failed[0].cause
    assert [row.sequence.key[0] for row in worker.scheduler.schedule().rows] == ["small"]


def test_a_handoff_that_no_longer_fits_is_refused_and_those_behind_it_are_granted() -> None:
    worker = DecodeWorker()
    lose_three_quarters(worker)
    worker.reserve("large", [5] * 17, OTHER)
    worker.reserve("small", [6] * 4, OTHER)
    assert not any(isinstance(body, Granted) for to, body in worker.sent if to == OTHER)
    worker.role.on_tick(time.monotonic())
    assert worker.sent_to(OTHER) == [Refused, Granted]


def test_what_fits_the_rest_of_the_pool_waits_for_its_turn() -> None:
    worker = DecodeWorker()
    lose_three_quarters(worker)
    worker.generate("first", [5] * 13)
    worker.generate("second", [6] * 16)
    assert [row.sequence.key[0] for row in worker.scheduler.schedule().rows] == ["first"]
    worker.role.on_tick(time.monotonic())
    assert not any(isinstance(body, Failed) for _, body in worker.sent)


def test_a_prompt_may_use_a_cached_prefix_that_is_in_quarantine() -> None:
    worker = DecodeWorker()
    worker.generate("before", [9] * 32)
    worker.bench.run()
    worker.reserve("lost", [9] * 48)
    worker.role.on_peer_lost(PREFILL, "silent", replaced=False)
    assert worker.num_quarantined == 12
    worker.generate("shares", [9] * 32 + [5] * 8)
    worker.role.on_tick(time.monotonic())
    assert not any(isinstance(body, Failed) for _, body in worker.sent)
    assert worker.scheduler.schedule().has_work


def test_the_whole_pool_counts_again_when_the_sender_is_proven_gone() -> None:
    worker = DecodeWorker()
    lose_three_quarters(worker)
    worker.role.on_tick(time.monotonic())
    worker.deliver(PREFILL, Drained(reservation=worker.granted().reservation), "lost")
    for _ in range(SETTLE_TICKS):
        worker.role.on_tick(time.monotonic())
    worker.generate("large", [5] * 40)
    worker.role.on_tick(time.monotonic())
    assert not any(isinstance(body, Failed) for _, body in worker.sent)
    assert worker.scheduler.schedule().has_work


def test_a_sample_group_that_no_longer_fits_as_a_whole_is_admitted_in_parts() -> None:
    worker = DecodeWorker()
    lose_three_quarters(worker)
    worker.role.on_tick(time.monotonic())
    for index in range(5):
        worker.bench.add([5] * 7, 2, sample=("samples", index, 5))
    assert worker.scheduler.schedule().has_work


# -- blocks that do not come ----------------------------------------------------------------------------------------


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(incoming_handoffs, "time", SimpleNamespace(monotonic=lambda: self.now))

    def tick(self, worker: DecodeWorker, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += MAX_GAP_S
            worker.role.on_tick(self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_a_handoff_whose_blocks_do_not_come_is_released(clock: Clock) -> None:
    worker = DecodeWorker(one_sided=False)
    worker.reserve("a", [5] * 12)
    clock.tick(worker, 2 * BLOCKS_DUE_S)
    assert worker.role.num_open, "prefill still computes"
    worker.hand_over("a", worker.granted().reservation, 12)
    clock.tick(worker, BLOCKS_DUE_S + 1)
    released = worker.sent[-1][1]
    assert isinstance(released, Released) and released.transport_failed and "3 blocks are missing" in released.reason
    assert not worker.role.num_open


def test_a_worker_that_was_suspended_takes_no_block_for_overdue(clock: Clock) -> None:
    worker = DecodeWorker()
    worker.reserve("a", [5] * 12)
    worker.hand_over("a", worker.granted().reservation, 12)
    worker.role.on_tick(clock.now + 2 * BLOCKS_DUE_S)
    assert not any(isinstance(body, Released) for _, body in worker.sent)


def test_blocks_of_another_sequence_show_that_the_transport_works(clock: Clock) -> None:
    worker = DecodeWorker(num_blocks=32)
    worker.reserve("a", [5] * 12)
    worker.hand_over("a", worker.granted().reservation, 12)
    worker.reserve("b", [6] * 12)
    other = worker.granted().reservation
    for block in range(3):
        clock.tick(worker, 0.6 * BLOCKS_DUE_S)
        worker.receiver.report(Landed(other, (block,)))
    assert not any(isinstance(body, Released) for _, body in worker.sent)


def test_a_handoff_message_of_another_sequence_is_no_sign_of_blocks(clock: Clock) -> None:
    worker = DecodeWorker(num_blocks=32)
    worker.reserve("a", [5] * 12)
    first = worker.granted().reservation
    worker.hand_over("a", first, 12)
    worker.reserve("b", [6] * 12)
    clock.tick(worker, 0.6 * BLOCKS_DUE_S)
    worker.hand_over("b", worker.granted().reservation, 12)
    clock.tick(worker, 0.6 * BLOCKS_DUE_S)
    released = [body.reservation for _, body in worker.sent if isinstance(body, Released)]
    assert released == [first]


# -- the order of ends ----------------------------------------------------------------------------------------------


def test_handoffs_of_a_lost_router_are_granted_nothing_before_they_end() -> None:
    worker = DecodeWorker(max_running=1)
    worker.reserve("a", [5] * 4)
    worker.reserve("b", [6] * 4)
    num_sent = len(worker.sent)
    worker.role.on_peer_lost(ROUTER, "silent", replaced=False)
    assert [type(body) for _, body in worker.sent[num_sent:]] == [Refused, Released]


def test_handoffs_that_a_worker_abandons_are_granted_nothing_before_they_end() -> None:
    worker = DecodeWorker(max_running=1)
    worker.generate("a", [5] * 4)
    worker.scheduler.commit(plan := worker.scheduler.schedule(), worker.bench.forward(plan))
    worker.reserve("b", [6] * 4)
    num_sent = len(worker.sent)
    worker.role.abandon("the worker stops")
    assert [type(body) for _, body in worker.sent[num_sent:]] == [Refused, Failed]


def test_prefill_that_asks_again_for_what_was_committed_here_is_refused() -> None:
    """Another decode worker was named meanwhile, and then this one again."""
    worker = DecodeWorker(one_sided=False)
    worker.reserve("a", [5] * 12)
    granted = worker.granted()
    worker.receiver.report(Landed(granted.reservation, tuple(range(3))))
    worker.hand_over("a", granted.reservation, 12)
    num_sent = len(worker.sent)
    worker.reserve("a", [5] * 12)
    assert [type(body) for to, body in worker.sent[num_sent:] if to == PREFILL] == [Refused]
    assert worker.scheduler.schedule().has_work, "it runs on here"


def test_a_prompt_is_cached_under_the_numerics_of_the_worker_that_computes_it() -> None:
    worker = DecodeWorker(num_blocks=64, numerics="avx")
    worker.generate("own", [5] * 12)
    for name, numerics in (("alike", "avx"), ("other", "amx"), ("same other", "amx"), ("unknown", "")):
        worker.reserve(name, [5] * 12, numerics=numerics)
    roots = {key[0]: request.sequence.root for key, request in worker.role._requests.items()}
    assert roots["own"] == roots["alike"]
    assert roots["other"] == roots["same other"]
    assert len(set(roots.values())) == 3
