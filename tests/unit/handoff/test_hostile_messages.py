"""Messages whose fields keep to their limits and still make no sense, in any order and from anybody.

Nothing raises, and when the peers are gone nothing is held.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.handoff import sender as prefill
from kvrelay.handoff.quarantine import SETTLE_TICKS
from kvrelay.handoff.sender import SenderHandoff, SenderState
from kvrelay.handoff.transports.base import Landed, SenderDrained, TransferFailed
from kvrelay.kv.pool import BlockState
from kvrelay.protocol.messages import (
    Abort,
    AnyBody,
    Cancel,
    Committed,
    Drained,
    Generate,
    Granted,
    Handoff,
    PeerRef,
    Prompt,
    Reassign,
    Refused,
    Released,
    Reserve,
    pack_tokens,
)
from kvrelay.protocol.sampling import Sampling
from tests.thoroughness import examples
from tests.unit.handoff.test_decode_role import OTHER, PREFILL, ROUTER, DecodeWorker
from tests.unit.protocol.message_strategies import values

NUM_BLOCKS = 16
KINDS: tuple[type[AnyBody], ...] = (Reserve, Generate, Handoff, Abort, Drained, Cancel)
PROMPT = Prompt(tokens=pack_tokens([5] * 12), sampling=Sampling(max_tokens=3))


def near(good: msgspec.Struct) -> st.SearchStrategy[Any]:
    """The message, or one with another value in one of its fields."""
    fields = msgspec.structs.fields(type(good))
    changes = [st.fixed_dictionaries({field.name: values(field.type)}) for field in fields]
    return st.one_of([st.just({}), *changes]).map(lambda change: _replaced(good, change))


def _replaced(good: msgspec.Struct, change: dict[str, Any]) -> msgspec.Struct:
    try:
        return msgspec.structs.replace(good, **change)
    except ValueError:  # the decoder would refuse it
        return good


def sensible(worker: DecodeWorker, kind: type[AnyBody]) -> AnyBody:
    """As a correct peer sends it."""
    grants = [body for _, body in worker.sent if isinstance(body, Granted)]
    reservation = grants[-1].reservation if grants else "none"
    num_blocks = len(grants[-1].slots) if grants else 3
    bodies: dict[type[Any], AnyBody] = {
        Reserve: Reserve(prompt=PROMPT, router=ROUTER, transports=["silent"]),
        Generate: Generate(prompt=PROMPT),
        Handoff: Handoff(reservation=reservation, index=0, token_id=7, num_tokens=12, num_blocks=num_blocks),
        Abort: Abort(reservation=reservation, reason="cancelled"),
        Drained: Drained(reservation=reservation),
        Cancel: Cancel(reason="the client left"),
    }
    return bodies[kind]


@settings(max_examples=examples(300), deadline=None)
@given(st.data(), st.booleans())
def test_a_decode_worker_holds_nothing_once_its_peers_are_gone(data: st.DataObject, one_sided: bool) -> None:
    worker = DecodeWorker(NUM_BLOCKS, one_sided=one_sided)
    if data.draw(st.booleans()):  # a handoff whose blocks have come
        worker.deliver(PREFILL, sensible(worker, Reserve), "a")
        worker.receiver.report(Landed(worker.granted().reservation, (0, 1, 2)))
        worker.deliver(PREFILL, data.draw(near(sensible(worker, Handoff))), "a")
    for _ in range(data.draw(st.integers(1, 12))):
        request, peer = data.draw(st.sampled_from("aab")), data.draw(st.sampled_from([PREFILL, ROUTER, OTHER]))
        kind = data.draw(st.sampled_from(KINDS))
        match data.draw(st.sampled_from(["near", "near", "any", "landed"])):
            case "near":
                worker.deliver(peer, data.draw(near(sensible(worker, kind))), request)
            case "any":
                worker.deliver(peer, data.draw(values(kind)), request)
            case _:
                grants = [body for _, body in worker.sent if isinstance(body, Granted)]
                if grants:
                    grant = data.draw(st.sampled_from(grants))
                    blocks = range(grant.first_block, grant.first_block + len(grant.slots))
                    worker.receiver.report(Landed(grant.reservation, tuple(blocks)))
    routers = {each.sequence.origin.router for each in worker.role._requests.values()}
    for peer in (PREFILL, OTHER, ROUTER, *sorted(routers, key=repr)):
        worker.role.on_peer_lost(peer, "gone", replaced=True)
    for _ in range(SETTLE_TICKS + 1):
        worker.role.on_tick(time.monotonic())
    assert not worker.role.num_open and not worker.scheduler.waiting and not worker.scheduler.running
    counts = worker.bench.pool.counts()
    assert counts[BlockState.FREE] + counts[BlockState.CACHED] == NUM_BLOCKS
    worker.bench.pool.check_integrity()


# -- the sender -------------------------------------------------------------------------------------------------------

D1, D2 = PeerRef("d1", "1", "tcp://d1"), PeerRef("d2", "1", "tcp://d2")
BLOCKS = (10, 11, 12)
names = st.sampled_from(["r1", "r2", ""])
decodes = st.sampled_from([D1, D2])
granted = st.builds(
    Granted,
    reservation=names,
    first_block=st.one_of(st.integers(0, 3), st.just(2**31 - 1)),
    slots=st.lists(st.integers(0, 2**31 - 1), max_size=4, unique=True),
    transport=st.just("zmq"),
    endpoints=st.just([{}]),
)
HOSTILE_EVENTS: st.SearchStrategy[Any] = st.one_of(
    st.builds(
        prefill.FromDecode,
        decodes,
        st.one_of(
            granted,
            st.just(Refused(reason="no")),
            st.builds(Released, reservation=names, reason=st.just("no")),
            st.builds(Committed, reservation=names),
        ),
    ),
    st.builds(Reassign, decode=st.one_of(st.none(), decodes)),
    st.builds(prefill.DecodeLost, decodes, st.just("silent")),
)
OWN_EVENTS: tuple[Callable[[], Any], ...] = (
    lambda: prefill.PrefillScheduled(BLOCKS),
    lambda: prefill.BlocksComputed(2),
    lambda: prefill.PrefillFinished(Handoff(reservation="", index=0, token_id=1, num_tokens=1, num_blocks=0)),
)


@settings(max_examples=examples(600), deadline=None)
@given(st.data())
def test_a_sender_pushes_only_its_own_blocks_and_releases_them_once(data: st.DataObject) -> None:
    machine, own, in_flight, num_released = SenderHandoff(ROUTER, D1), list(OWN_EVENTS), dict[str, int](), 0
    aborted: set[str] = set()

    def feed(event: Any) -> None:
        nonlocal num_released
        for instruction in machine.handle(event):
            match instruction:
                case prefill.PushBlocks(granted, copies):
                    assert not num_released
                    assert all(copy.source == BLOCKS[copy.index] for copy in copies)
                    in_flight[granted.reservation] = in_flight.get(granted.reservation, 0) + len(copies)
                case prefill.SendTo(_, Handoff(reservation=reservation, num_blocks=num_blocks)):
                    assert in_flight.get(reservation, 0) >= num_blocks, "decode would wait for blocks that never come"
                case prefill.StopPushing(reservation):
                    aborted.add(reservation)
                case prefill.ReleaseBlocks():
                    num_released += 1

    for _ in range(data.draw(st.integers(1, 20))):
        match data.draw(st.sampled_from(["hostile", "hostile", "own", "transport"])):
            case "own" if own and machine.state in (SenderState.QUEUED, SenderState.COMPUTING):
                feed(own.pop(0)())
            case "transport" if machine.state is not SenderState.QUEUED:
                feed(TransferFailed("r1", "broken"))
            case _:
                feed(data.draw(HOSTILE_EVENTS))
    feed(Cancel(reason="over"))
    while aborted:
        feed(SenderDrained(aborted.pop()))
    assert machine.state is SenderState.RELEASED and num_released == 1


# -- one message that no correct peer sends ----------------------------------------------------------------------------


WRONG: list[dict[str, object]] = [
    {"index": 1},
    {"num_tokens": 11},
    {"num_tokens": 2**31 - 1},
    {"num_blocks": 2},
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_a_handoff_that_does_not_fit_its_sequence_is_released(wrong: dict[str, object]) -> None:
    worker = DecodeWorker(one_sided=False)
    worker.reserve("a", [5] * 12)
    reservation = worker.granted().reservation
    good = Handoff(reservation=reservation, index=0, token_id=7, num_tokens=12, num_blocks=3)
    worker.deliver(PREFILL, msgspec.structs.replace(good, **wrong), "a")
    assert isinstance(worker.sent[-1][1], Released)
    assert not worker.role.num_open
    worker.bench.pool.check_integrity()
    worker.reserve("a", [5] * 12)
    worker.receiver.report(Landed(worker.granted().reservation, (0, 1, 2)))
    worker.hand_over("a", worker.granted().reservation, 12)
    assert worker.scheduler.schedule().has_work


@pytest.mark.parametrize("kind", [Reserve, Generate])
def test_what_was_cancelled_before_it_came_does_not_run(kind: type[AnyBody]) -> None:
    worker = DecodeWorker()
    worker.deliver(ROUTER, Cancel(reason="the client left"), "a")
    if kind is Reserve:
        worker.reserve("a", [5] * 12)
        assert isinstance(worker.sent[-1][1], Refused)
    else:
        worker.generate("a", [5] * 12)
    assert not worker.role.num_open and not worker.scheduler.waiting
    worker.bench.pool.check_integrity()


def test_only_its_own_router_and_prefill_worker_end_a_request() -> None:
    worker = DecodeWorker(one_sided=False)
    worker.reserve("a", [5] * 12)
    reservation = worker.granted().reservation
    worker.deliver(OTHER, Abort(reservation=reservation, reason="forged"), "a")
    worker.deliver(OTHER, Cancel(reason="forged"), "a")
    assert worker.role.num_open == 1
    worker.deliver(ROUTER, Cancel(reason="the client left"), "a")
    assert not worker.role.num_open
