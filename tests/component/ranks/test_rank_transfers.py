"""Transports of other ranks: calls in order, early blocks, and errors. `test_sharded.py` has whole handoffs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
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


def sender_of(stack: ExitStack) -> tuple[ChannelSender, Log]:
    sender, log = ChannelSender(ZmqSender(BLOCKS)), Log()
    stack.callback(sender.close)
    sender.start(log.add)
    return sender, log


async def test_a_block_that_comes_before_its_admission_lands_when_that_comes(stack: ExitStack) -> None:
    pool = np.zeros((8, 64), np.uint8)
    transport, log = ZmqReceiver(pool, admission_wait_s=PATIENCE_S), Log()
    receiver = ChannelReceiver(transport)
    stack.callback(receiver.close)
    receiver.start(log.add)
    sender, _ = sender_of(stack)
    sender.push("r", receiver.endpoint, [BlockPush(0, 3, 5)])
    await until(lambda: transport.counters.num_messages == 1)
    receiver.admit("r", 0, [5])
    await log.until(lambda: Landed("r", (0,)) in log.events)
    assert np.array_equal(pool[5], BLOCKS[3])
    assert not transport.counters.dropped


async def test_a_block_of_a_released_reservation_does_not_hold_up_others(stack: ExitStack) -> None:
    pool = np.zeros((8, 64), np.uint8)
    transport, log = ZmqReceiver(pool, admission_wait_s=PATIENCE_S), Log()
    receiver = ChannelReceiver(transport)
    stack.callback(receiver.close)
    receiver.start(log.add)
    receiver.admit("old", 0, [5])
    receiver.release("old")
    receiver.admit("new", 0, [5])
    receiver.channel.await_calls()
    sender, _ = sender_of(stack)
    sender.push("old", receiver.endpoint, [BlockPush(0, 3, 5)])
    sender.push("new", receiver.endpoint, [BlockPush(0, 4, 5)])
    async with asyncio.timeout(PATIENCE_S / 2):
        await log.until(lambda: Landed("new", (0,)) in log.events)
    assert np.array_equal(pool[5], BLOCKS[4])
    assert transport.counters.dropped == {"unknown_reservation": 1}


async def test_a_block_whose_admission_never_comes_is_dropped(stack: ExitStack) -> None:
    pool = np.zeros((8, 64), np.uint8)
    transport, log = ZmqReceiver(pool, admission_wait_s=0.05), Log()
    receiver = ChannelReceiver(transport)
    stack.callback(receiver.close)
    receiver.start(log.add)
    sender, _ = sender_of(stack)
    for _ in range(2):
        sender.push("never", receiver.endpoint, [BlockPush(0, 3, 5)])
    await until(lambda: transport.counters.dropped == {"unknown_reservation": 2})
    assert not pool.any()


async def test_an_abort_drains_and_the_counters_of_the_rank_arrive(stack: ExitStack) -> None:
    pool = np.zeros((8, 64), np.uint8)
    receiver = ChannelReceiver(ZmqReceiver(pool))
    stack.callback(receiver.close)
    receiver.start(Log().add)
    receiver.admit("r", 0, [0, 1])
    receiver.channel.await_calls()
    sender, log = sender_of(stack)
    sender.push("r", receiver.endpoint, [BlockPush(0, 0, 0), BlockPush(1, 1, 1)])
    await log.until(lambda: sum(len(each.blocks) for each in log.events if isinstance(each, Pushed)) == 2)
    sender.abort("r")
    await log.until(lambda: SenderDrained("r") in log.events)
    assert (sender.counters.num_blocks, sender.counters.num_bytes) == (2, 128)


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
    sender, _ = sender_of(stack)
    sender.push("r", remotes["other"].endpoint, [BlockPush(0, 3, 5)])
    await logs["other"].until(lambda: Landed("r", (0,)) in logs["other"].events)
    remotes["other"].release("r")
    sender.push("r", remotes["one"].endpoint, [BlockPush(0, 4, 5)])
    await logs["one"].until(lambda: Landed("r", (0,)) in logs["one"].events)
    assert [np.array_equal(pools[name][5], BLOCKS[source]) for name, source in (("one", 4), ("other", 3))] == [True] * 2
    assert len(logs["one"].events) == len(logs["other"].events) == 1


class TestOneSided:
    """NIXL writes into the slots of a rank whatever has been admitted there; only what is reported differs."""

    pytestmark = pytest.mark.skipif(bool(NO_NIXL), reason=NO_NIXL)

    @staticmethod
    def ends(stack: ExitStack, wait_s: float) -> tuple[ChannelSender, ChannelReceiver, NixlReceiver, Log, Log]:
        pool = np.zeros((8, 64), np.uint8)
        transport, sender = NixlReceiver(pool, admission_wait_s=wait_s), ChannelSender(NixlSender(BLOCKS))
        receiver, logs = ChannelReceiver(transport), (Log(), Log())
        for end, log in ((receiver, logs[0]), (sender, logs[1])):
            stack.callback(end.close)
            end.start(log.add)
        assert receiver.is_one_sided and receiver.name == sender.name == "nixl"
        return sender, receiver, transport, *logs

    async def test_a_notification_that_comes_before_the_admission_lands_its_block(self, stack: ExitStack) -> None:
        sender, receiver, transport, log, _ = self.ends(stack, PATIENCE_S)
        sender.push("r", receiver.endpoint, [BlockPush(0, 3, 5)])
        await until(lambda: transport.counters.num_messages == 1)
        receiver.admit("r", 0, [5])
        await log.until(lambda: Landed("r", (0,)) in log.events)
        assert not transport.counters.dropped

    async def test_a_notification_of_a_released_reservation_does_not_hold_up_others(self, stack: ExitStack) -> None:
        sender, receiver, transport, log, _ = self.ends(stack, PATIENCE_S)
        receiver.admit("old", 0, [5])
        receiver.release("old")
        receiver.admit("new", 0, [6])
        receiver.channel.await_calls()
        sender.push("old", receiver.endpoint, [BlockPush(0, 3, 5)])
        sender.push("new", receiver.endpoint, [BlockPush(0, 4, 6)])
        async with asyncio.timeout(PATIENCE_S / 2):
            await log.until(lambda: Landed("new", (0,)) in log.events)
        assert transport.counters.dropped == {"unknown_reservation": 1}

    async def test_a_rank_ends_while_a_notification_waits_for_its_admission(self, stack: ExitStack) -> None:
        sender, receiver, transport, _, _ = self.ends(stack, PATIENCE_S)
        sender.push("r", receiver.endpoint, [BlockPush(0, 3, 5)])
        await until(lambda: transport.counters.num_messages == 1)
        receiver.close()
        assert transport._thread is not None and not transport._thread.is_alive()

    async def test_an_abort_drains_when_the_writes_have_ended(self, stack: ExitStack) -> None:
        sender, receiver, _, _, log = self.ends(stack, 0.0)
        receiver.admit("r", 0, [0, 1])
        receiver.channel.await_calls()
        sender.push("r", receiver.endpoint, [BlockPush(0, 0, 0), BlockPush(1, 1, 1)])
        sender.abort("r")
        await log.until(lambda: SenderDrained("r") in log.events)
        assert log.events[-1] == SenderDrained("r")
