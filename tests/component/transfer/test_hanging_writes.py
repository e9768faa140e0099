"""NIXL's sender when writes hang after a good one. NIXL itself is not needed: its agent is a fake."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from kvrelay.handoff.transports import nixl_sender
from kvrelay.handoff.transports.base import BlockPush, SenderDrained
from kvrelay.handoff.transports.nixl_receiver import NixlReceiver
from kvrelay.handoff.transports.nixl_sender import NixlSender, NixlSettings
from tests.component.transfer.rig import ReceivingEnd, SendingEnd
from tests.component.transfer.transports import EMPTY, source_pool, target_pool
from tests.fakes.hanging_agent import FakeNetwork, fake_network
from tests.fakes.waiting import until

pytestmark = pytest.mark.component

STALL_S = 0.2
SETTINGS = NixlSettings(stall_timeout_s=STALL_S, piece_blocks=2, close_timeout_s=0.1)


@contextmanager
def ends(settings: NixlSettings = SETTINGS) -> Iterator[tuple[SendingEnd, ReceivingEnd]]:
    sent, taken = source_pool(16, 4096), target_pool(16, 4096)
    source = SendingEnd(sent, NixlSender(sent, settings=settings))
    target = ReceivingEnd(taken, NixlReceiver(taken))
    source.sender.start(source.log.add)
    target.receiver.start(target.log.add)
    try:
        yield source, target
    finally:
        source.sender.close()
        target.receiver.close()


def push(source: SendingEnd, target: ReceivingEnd, reservation: str, slots: range) -> None:
    target.receiver.admit(reservation, 0, slots)
    source.push(reservation, target.endpoint, [BlockPush(index, slot, slot) for index, slot in enumerate(slots)])


async def hang_after_one_good_write(network: FakeNetwork, source: SendingEnd, target: ReceivingEnd) -> None:
    """Two writes of "hung" are in flight and one waits."""
    push(source, target, "good", range(2))
    await target.until_landed("good", range(2))
    network.num_good = 0
    push(source, target, "hung", range(2, 8))
    await source.log.until(lambda: network.num_hung == 2)


async def test_a_connection_on_which_nothing_was_ever_complete_fails_once_and_is_closed() -> None:
    with fake_network(num_good=0) as network, ends() as (source, target):
        began = time.monotonic()
        push(source, target, "hung", range(2, 8))
        await source.log.until(lambda: bool(source.failures("hung")))
        assert time.monotonic() - began >= STALL_S
        assert "no progress" in source.failures("hung")[0]
        await source.abort("hung")
        assert len(source.failures("hung")) == 1
        assert network.num_hung == network.num_removed == 2  # the piece that waited was never posted
        assert source.pushed("hung") == []


async def test_pushes_to_a_broken_connection_fail_at_once_and_other_receivers_are_served() -> None:
    with fake_network() as network, ends() as (source, target):
        await hang_after_one_good_write(network, source, target)
        await source.log.until(lambda: bool(source.failures("hung")))
        network.end("the peer has died")
        await source.abort("hung")
        network.num_good = None
        push(source, target, "next", range(8, 10))
        await source.log.until(lambda: bool(source.failures("next")))
        pool = target_pool(16, 4096)
        other = ReceivingEnd(pool, NixlReceiver(pool))
        other.receiver.start(other.log.add)
        try:
            push(source, other, "elsewhere", range(4))
            await other.until_landed("elsewhere", range(4))
        finally:
            other.receiver.close()


@pytest.mark.parametrize("lands", [True, False])
async def test_a_write_that_hangs_after_a_good_one_has_not_drained_until_it_ends(lands: bool) -> None:
    with fake_network() as network, ends() as (source, target):
        await hang_after_one_good_write(network, source, target)
        await source.log.until(lambda: bool(source.failures("hung")))
        source.sender.abort("hung")
        await source.until_begun()  # it has seen the abort
        assert SenderDrained("hung") not in source.log.events
        if lands:
            network.land_late()
        else:
            network.end("the peer has died")
        await source.log.until(lambda: SenderDrained("hung") in source.log.events)
        drained = [event for event in source.log.events if event == SenderDrained("hung")]
        assert len(drained) == 1
        assert network.num_removed == 0
        written = [slot for slot in range(2, 8) if not np.all(target.pool[slot] == EMPTY)]
        assert written == ([2, 3, 4, 5] if lands else [])


async def test_a_connection_whose_writes_were_only_slow_is_used_again_at_once() -> None:
    """As when the receiver's process was stopped and goes on."""
    with fake_network() as network, ends() as (source, target):
        await hang_after_one_good_write(network, source, target)
        await source.log.until(lambda: bool(source.failures("hung")))
        source.sender.abort("hung")
        push(source, target, "early", range(8, 10))
        await source.log.until(lambda: bool(source.failures("early")))
        network.land_late()
        await source.log.until(lambda: SenderDrained("hung") in source.log.events)
        network.num_good = None
        push(source, target, "again", range(10, 12))
        await target.until_landed("again", range(2))


@pytest.mark.parametrize("retry_after_s", [0.0, 0.3])
async def test_a_connection_is_tried_again_after_a_while(retry_after_s: float) -> None:
    settings = NixlSettings(stall_timeout_s=STALL_S, retry_after_s=retry_after_s, piece_blocks=2)
    with fake_network() as network, ends(settings) as (source, target):
        await hang_after_one_good_write(network, source, target)
        await source.log.until(lambda: bool(source.failures("hung")))
        broken_at = time.monotonic()
        network.end("the peer has died")
        await source.abort("hung")
        network.num_good = None
        while time.monotonic() <= broken_at + retry_after_s:  # the sender's thread sleeps meanwhile
            await asyncio.sleep(retry_after_s / 5)
        push(source, target, "again", range(8, 12))
        await target.until_landed("again", range(4))


@pytest.mark.parametrize("has_sent", [False, True])
async def test_an_idle_sender_goes_on_calling_ucx(monkeypatch: pytest.MonkeyPatch, has_sent: bool) -> None:
    """Else connections of strangers, such as a port scan's, would stay open."""
    monkeypatch.setattr(nixl_sender, "PROGRESS_INTERVAL_S", 0.01)
    with fake_network() as network, ends() as (source, target):
        if has_sent:
            push(source, target, "good", range(2))
            await target.until_landed("good", range(2))
        agent = next(iter(network.agents.values()))  # the sender's
        for _ in range(3):
            agent.inbox.append(b"waits until UCX is called")
            await until(lambda: not agent.inbox)
