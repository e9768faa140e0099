"""A dispatcher that gets changed recorded messages from workers and strangers: nothing raises, a request on honest
workers gets its tokens, and nothing is left of the others."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterable
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.messaging.messenger import Messenger
from kvrelay.protocol import codec
from kvrelay.protocol.link import Delivered, LinkEvent, PeerLost, PeerRefused
from kvrelay.protocol.messages import (
    AnyBody,
    FirstToken,
    Header,
    PeerRef,
    SequenceUsage,
    Status,
    TokenBatch,
    TokenEntry,
)
from kvrelay.protocol.sampling import FinishReason, Sampling
from kvrelay_router.dispatch.dispatcher import RouterDispatcher
from kvrelay_router.dispatch.interface import DispatchSettings, GenerateRequest
from kvrelay_router.dispatch.running_request import RunningRequest
from tests.fakes.traffic import changed, recorded_traffic
from tests.thoroughness import examples
from tests.unit.dispatch.routed_fleet import peer_of, record_of

ME = PeerRef("router", "1", "tcp://router")
GOOD, OTHERS = "good", ("r0", "r1")
MAX_TOKENS = 6
TOKENS = list(range(100, 100 + MAX_TOKENS))
WORKERS = ("p0", "p1", "d0", "d1")


class NoSockets:
    """A messenger that keeps what is sent."""

    me = ME
    alive_interval_s = 0.5

    def __init__(self) -> None:
        self.sent: list[tuple[PeerRef, AnyBody, str]] = []

    def send(self, peer: PeerRef, body: AnyBody, *, request: str = "", **_: object) -> None:
        self.sent.append((peer, codec.decode_body([b"", *codec.encode_body(body)]), request))

    def silent_s(self, peer: PeerRef) -> float:
        return 0.0

    def close(self) -> None:
        return


class Scene:
    """A dispatcher with two workers of each role, one good request and two others."""

    def __init__(self) -> None:
        self.messenger = NoSockets()
        self.dispatcher = RouterDispatcher(
            lambda _: cast("Messenger", self.messenger), None, DispatchSettings(local_prefill_tokens=0)
        )
        records = [record_of(name) for name in WORKERS]
        self.peers = [peer_of(record) for record in records]
        self.dispatcher.view.registered(records, time.monotonic())
        for peer in self.peers:
            status = Status(query=1, draining=False, queues={}, blocks={"free": 4096}, totals={})
            self.dispatcher.view.answered(peer, status, time.monotonic())
        self.good = self.submit(GOOD)
        workers = self.good.served_by.prefill, self.good.served_by.decode
        self.prefill, self.decode = (next(peer for peer in self.peers if peer.peer_id == name) for name in workers)
        self.hostile = [peer for peer in self.peers if peer not in (self.prefill, self.decode)]
        self.hostile += [PeerRef("stranger", "1", "tcp://s"), PeerRef(self.decode.peer_id, "0", "tcp://old")]
        self.others = [self.submit(name, num_sequences=2) for name in OTHERS]
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.num_good = 0

    def submit(self, name: str, num_sequences: int = 1) -> RunningRequest:
        sampling = Sampling(max_tokens=MAX_TOKENS, logprobs=None)
        return self.dispatcher.submit(
            GenerateRequest(
                request_id=name, prompt_ids=[1, 2, 3], sampling=sampling, num_sequences=num_sequences, timeout_s=600
            )
        )

    def take(self, event: LinkEvent) -> None:
        self.dispatcher._inbox.take(event)
        self.dispatcher.load.check_integrity()
        for handle in (self.good, *self.others):
            for delta in handle.take():
                got = self.tokens.setdefault((handle.request.request_id, delta.sequence), [])
                got += delta.token_ids
                assert len(got) <= MAX_TOKENS

    def tell_good(self) -> None:
        """The next message of the honest workers."""
        index, self.num_good = self.num_good, self.num_good + 1
        header = _header(GOOD, 1, 0)
        if index == 0:
            self.take(Delivered(self.prefill, header, FirstToken(index=0, token_id=TOKENS[0])))
        elif index < MAX_TOKENS:
            finish = FinishReason.LENGTH if index + 1 == MAX_TOKENS else None
            entry = TokenEntry(
                request=GOOD, attempt=1, sequence=0, index=index, token_ids=[TOKENS[index]], finish=finish
            )
            self.take(Delivered(self.decode, header, TokenBatch(entries=[entry])))

    async def end(self, handles: Iterable[RunningRequest]) -> None:
        """Cancels these. Nothing of any request is left then."""
        for handle in handles:
            handle.cancel()
        await asyncio.sleep(0)
        assert not self.dispatcher.num_running and self.dispatcher.load.is_empty
        assert not self.dispatcher._sequences and not self.dispatcher._driver.waits
        await self.dispatcher.close()


def _header(request: str, attempt: int, sequence: int) -> Header:
    return Header(
        sender="w", incarnation="1", reply_to="tcp://w", to_incarnation="1", link=1, seq=1, request=request,
        attempt=attempt, sequence=sequence,
    )  # fmt: skip


def hostile_event(rng: random.Random, peer: PeerRef) -> LinkEvent:
    """A message as the link reports it. One with invalid fields ends the link."""
    match rng.random():
        case chance if chance < 0.05:
            return PeerLost(peer, "gone", is_alive=rng.random() < 0.5)
        case chance if chance < 0.07:
            return PeerRefused(peer, "another model")
    each = rng.choice([each for each in recorded_traffic() if each.kind in KINDS or rng.random() < 0.1])
    tree: dict[str, Any] = msgspec.msgpack.decode(each.body)
    names = GOOD, *OTHERS
    for entry in tree.get("entries", []):
        entry |= {"request": rng.choice(names), "attempt": rng.randint(1, 3), "sequence": rng.randrange(2)}
        entry |= {"index": rng.randrange(MAX_TOKENS)}
    header = _header(rng.choice(names), rng.randint(1, 3), rng.randrange(2))
    try:
        body = codec.decode_body([b"", changed(msgspec.msgpack.encode(tree), rng)])
    except codec.MalformedMessage as error:
        return PeerLost(peer, str(error))
    return Delivered(peer, header, body)


KINDS = ("first_token", "token_batch", "need_decode", "failed", "status")


@settings(max_examples=examples(400), deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 60))
def test_hostile_messages_end_their_own_requests_alone(seed: int, num_messages: int) -> None:
    async def test() -> None:
        rng, scene = random.Random(seed), Scene()
        for _ in range(num_messages):
            scene.take(hostile_event(rng, rng.choice(scene.hostile)))
            if rng.random() < 0.2:
                scene.tell_good()
            if rng.random() < 0.3:
                await asyncio.sleep(0)
        while scene.num_good < MAX_TOKENS:
            scene.tell_good()
        assert scene.tokens[GOOD, 0] == TOKENS and scene.good.is_over and scene.good.error is None
        await scene.end(scene.others)

    asyncio.run(test())


@settings(max_examples=examples(200), deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 60))
def test_hostile_workers_of_a_request_give_it_no_more_than_it_asked_for(seed: int, num_messages: int) -> None:
    """Also the workers that compute it may be hostile: it may fail or get their tokens, and ends clean."""

    async def test() -> None:
        rng, scene = random.Random(seed), Scene()
        for _ in range(num_messages):
            scene.take(hostile_event(rng, rng.choice([*scene.peers, *scene.hostile])))
            await asyncio.sleep(0)
        await scene.end([scene.good, *scene.others])

    asyncio.run(test())


@pytest.mark.parametrize("sequence", [-1, -(2**63), 7])
def test_counters_of_a_sequence_that_there_is_not_cost_no_other_entry_of_their_batch(sequence: int) -> None:
    async def test() -> None:
        scene = Scene()
        scene.tell_good()
        strange = TokenEntry(
            request=OTHERS[0], attempt=1, sequence=sequence, index=0, token_ids=[], usage=SequenceUsage(prompt_blocks=1)
        )
        entry = TokenEntry(request=GOOD, attempt=1, sequence=0, index=1, token_ids=TOKENS[1:3])
        scene.take(Delivered(scene.decode, _header(GOOD, 1, 0), TokenBatch(entries=[strange, entry])))
        assert scene.tokens[GOOD, 0] == TOKENS[:3]
        await scene.dispatcher.close()

    asyncio.run(test())
