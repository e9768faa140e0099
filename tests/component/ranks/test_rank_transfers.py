"""Transports of other ranks: calls in order, early blocks, and errors. `test_sharded.py` has whole handoffs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from kvrelay.handoff.transports.base import BlockPush, Landed, Pushed, SenderDrained
from kvrelay.handoff.transports.nixl_receiver import NixlReceiver
from kvrelay.handoff.transports.nixl_sender import NixlSender
from kvrelay.handoff.transports.zmq_receiver import ZmqReceiver
from kvrelay.handoff.transports.zmq_sender import ZmqSender
from kvrelay.ranks.transfers import RemoteReceiver
from tests.component.ranks.remote_ends import RANK, Channel, ChannelReceiver, ChannelSender
from tests.component.transfer.rig import Log
from tests.component.transfer.transports import NO_NIXL
from tests.fakes.waiting import PATIENCE_S, until

pytestmark = pytest.mark.component
BLOCKS = np.random.default_rng(1).integers(0, 256, (8, 64), np.uint8)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


class Ends:
    """Both ends of one transport, each of another rank."""

    def __init__(self, name: str, admission_wait_s: float) -> None:
        self.pool = np.zeros((8, 64), np.uint8)
        make = NixlReceiver if name == "nixl" else ZmqReceiver
        self.transport: NixlReceiver | ZmqReceiver = make(self.pool, admission_wait_s=admission_wait_s)
        self.receiver = ChannelReceiver(self.transport)
        self.sender = ChannelSender(NixlSender(BLOCKS) if name == "nixl" else ZmqSender(BLOCKS))
        self.received, self.sent = Log(), Log()
        self.receiver.start(self.received.add)
        self.sender.start(self.sent.add)
        assert self.receiver.name == self.sender.name == name
        assert self.receiver.is_one_sided is (name == "nixl")

    def push(self, reservation: str, *copies: BlockPush) -> None:
        self.sender.push(reservation, self.receiver.endpoint, copies)

    async def until_landed(self, reservation: str) -> None:
        async with asyncio.timeout(PATIENCE_S / 2):
            await self.received.until(lambda: Landed(reservation, (0,)) in self.received.events)


NIXL = pytest.param("nixl", marks=pytest.mark.skipif(bool(NO_NIXL), reason=NO_NIXL))


@pytest.fixture(params=["zmq", NIXL])
def make_ends(request: pytest.FixtureRequest, stack: ExitStack) -> Callable[[float], Ends]:
    """NIXL writes into the slots of a rank whatever has been admitted there; only what is reported differs."""

    def make(admission_wait_s: float) -> Ends:
        ends = Ends(request.param, admission_wait_s)
        stack.callback(ends.sender.close)
        stack.callback(ends.receiver.close)
        return ends

    return make


async def test_a_block_that_comes_before_its_admission_lands_when_that_comes(
    make_ends: Callable[[float], Ends],
) -> None:
    ends = make_ends(PATIENCE_S)
    ends.push("r", BlockPush(0, 3, 5))
    await until(lambda: ends.transport.counters.num_messages == 1)
    ends.receiver.admit("r", 0, [5])
    await ends.until_landed("r")
    assert np.array_equal(ends.pool[5], BLOCKS[3])
    assert not ends.transport.counters.dropped


async def test_a_block_of_a_released_reservation_does_not_hold_up_others(make_ends: Callable[[float], Ends]) -> None:
    ends = make_ends(PATIENCE_S)
    slot = 6 if ends.receiver.is_one_sided else 5
    ends.receiver.admit("old", 0, [5])
    ends.receiver.release("old")
    ends.receiver.admit("new", 0, [slot])
    ends.receiver.channel.await_calls()
    ends.push("old", BlockPush(0, 3, 5))
    ends.push("new", BlockPush(0, 4, slot))
    await ends.until_landed("new")
    assert np.array_equal(ends.pool[slot], BLOCKS[4])
    assert ends.transport.counters.dropped == {"unknown_reservation": 1}


async def test_a_block_whose_admission_never_comes_is_dropped(make_ends: Callable[[float], Ends]) -> None:
    ends = make_ends(0.05)
    for _ in range(2):
        ends.push("never", BlockPush(0, 3, 5))
    await until(lambda: ends.transport.counters.dropped == {"unknown_reservation": 2})
    assert ends.receiver.is_one_sided or not ends.pool.any()


async def test_a_rank_ends_while_a_block_waits_for_its_admission(make_ends: Callable[[float], Ends]) -> None:
    ends = make_ends(PATIENCE_S)
    ends.push("r", BlockPush(0, 3, 5))
    await until(lambda: ends.transport.counters.num_messages == 1)
    ends.receiver.close()
    assert ends.transport._thread is not None and not ends.transport._thread.is_alive()


@pytest.mark.parametrize("when_pushed", [True, False])
async def test_an_abort_drains_and_the_counters_of_the_rank_arrive(
    make_ends: Callable[[float], Ends], when_pushed: bool
) -> None:
    ends = make_ends(0.0)
    ends.receiver.admit("r", 0, [0, 1])
    ends.receiver.channel.await_calls()
    ends.push("r", BlockPush(0, 0, 0), BlockPush(1, 1, 1))
    events = ends.sent.events
    if when_pushed:
        await ends.sent.until(lambda: sum(len(each.blocks) for each in events if isinstance(each, Pushed)) == 2)
    ends.sender.abort("r")
    await ends.sent.until(lambda: SenderDrained("r") in events)
    assert events[-1] == SenderDrained("r")
    if when_pushed:
        assert (ends.sender.counters.num_blocks, ends.sender.counters.num_bytes) == (2, 128)


async def test_a_rank_keeps_its_transports_apart(stack: ExitStack) -> None:
    """Both have a reservation of the same name."""
    pools = {name: np.zeros((8, 64), np.uint8) for name in ("one", "other")}
    transports = {name: ZmqReceiver(pool) for name, pool in pools.items()}
    channel = Channel(transports)
    stack.callback(channel.close)
    logs = {name: Log() for name in pools}
    remotes = {name: RemoteReceiver(RANK, channel.group, name, is_one_sided=False) for name in pools}
    for name, remote in remotes.items():
        assert remote.endpoint == transports[name].endpoint
        remote.start(logs[name].add)
        remote.admit("r", 0, [5])
    channel.await_calls()
    sender = ChannelSender(ZmqSender(BLOCKS))
    stack.callback(sender.close)
    sender.start(Log().add)
    sender.push("r", remotes["other"].endpoint, [BlockPush(0, 3, 5)])
    await logs["other"].until(lambda: Landed("r", (0,)) in logs["other"].events)
    remotes["other"].release("r")
    sender.push("r", remotes["one"].endpoint, [BlockPush(0, 4, 5)])
    await logs["one"].until(lambda: Landed("r", (0,)) in logs["one"].events)
    assert [np.array_equal(pools[name][5], BLOCKS[source]) for name, source in (("one", 4), ("other", 3))] == [True] * 2
    assert len(logs["one"].events) == len(logs["other"].events) == 1
