"""Messengers over real TCP sockets, in one process and against one that is stopped, killed and replaced."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import psutil
import pytest
import uvloop
import zmq

from kvrelay.messaging.messenger import Messenger, MessengerSockets
from kvrelay.protocol.link import Delivered, LinkEvent, LinkSettings, PeerLost, PeerRefused
from kvrelay.protocol.messages import Cancel, PeerRef
from tests.fakes.waiting import PATIENCE_S, until

FAST = LinkSettings(alive_interval_s=0.1, peer_timeout_s=1.0)
ECHO_PEER = Path(__file__).with_name("echo_peer.py")


class Party:
    """A messenger and what it was told."""

    def __init__(
        self,
        peer_id: str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        fingerprint: str = "",
        settings: LinkSettings = FAST,
    ) -> None:
        self.events: list[LinkEvent] = []
        self.on_event: Callable[[LinkEvent], None] = lambda event: None
        self._news = asyncio.Event()
        self.messenger = Messenger(
            peer_id, self._take, host=host, port=port, fingerprint=fingerprint, settings=settings
        )
        self.me = self.messenger.me

    def _take(self, event: LinkEvent) -> None:
        self.events.append(event)
        self._news.set()
        self.on_event(event)

    def send(self, peer: PeerRef, *texts: str) -> None:
        for text in texts:
            self.messenger.send(peer, Cancel(reason=text), request=text)

    @property
    def texts(self) -> list[str]:
        return [e.body.reason for e in self.events if isinstance(e, Delivered) and isinstance(e.body, Cancel)]

    @property
    def lost(self) -> list[PeerRef]:
        return [event.peer for event in self.events if isinstance(event, PeerLost)]

    @property
    def refused(self) -> list[PeerRef]:
        return [event.peer for event in self.events if isinstance(event, PeerRefused)]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self._news.clear()
                await self._news.wait()


@asynccontextmanager
async def parties(*peers: Party) -> AsyncIterator[None]:
    for party in peers:
        party.messenger.start()
    try:
        yield
    finally:
        for party in peers:
            party.messenger.close(linger_s=0)


@asynccontextmanager
async def echo_process(port: int = 0) -> AsyncIterator[tuple[asyncio.subprocess.Process, PeerRef]]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, ECHO_PEER, str(port), json.dumps(dataclasses.asdict(FAST)), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        yield process, msgspec.json.decode(await process.stdout.readline(), type=PeerRef)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def outboxes(party: Party) -> dict[str, zmq.Socket[bytes]]:
    assert party.messenger._sockets is not None
    return party.messenger._sockets._outboxes


def own_fds() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{name}")}


def own_threads() -> set[int]:
    return {thread.id for thread in psutil.Process().threads()}


def port_of(peer: PeerRef) -> int:
    return int(peer.address.rsplit(":", 1)[1])


async def test_ten_thousand_messages_each_way_arrive_in_order_and_once() -> None:
    a, b = Party("a", settings=LinkSettings()), Party("b", settings=LinkSettings())
    texts = [f"{i}" for i in range(10_000)]
    async with parties(a, b):
        for start in range(0, len(texts), 100):
            a.send(b.me, *texts[start : start + 100])
            b.send(a.me, *texts[start : start + 100])
            await asyncio.sleep(0)
        await a.until(lambda: len(a.events) >= len(texts))
        await b.until(lambda: len(b.events) >= len(texts))
        assert a.texts == b.texts == texts
        assert not a.lost and not b.lost


async def test_ipv6() -> None:
    a, b = Party("a", host="::1"), Party("b")
    async with parties(a, b):
        assert a.me.address.startswith("tcp://[::1]:")
        b.send(a.me, "over IPv6")
        a.send(b.me, "over IPv4")
        await a.until(lambda: a.texts == ["over IPv6"])
        await b.until(lambda: b.texts == ["over IPv4"])


async def test_messages_wait_for_a_peer_that_starts_later() -> None:
    a, b = Party("a"), Party("b")
    async with parties(a):
        a.send(b.me, "early")
        await asyncio.sleep(0.3)
        async with parties(b):
            await b.until(lambda: b.texts == ["early"])
            assert not a.lost


async def test_messages_sent_before_the_own_start_leave_at_the_start() -> None:
    a, b = Party("a"), Party("b")
    a.send(b.me, "before start")
    async with parties(a, b):
        await b.until(lambda: b.texts == ["before start"])


async def test_a_callback_may_answer_and_may_fail() -> None:
    a, b = Party("a"), Party("b")

    def answer_and_fail(event: LinkEvent) -> None:
        if isinstance(event, Delivered) and isinstance(event.body, Cancel):
            b.send(event.peer, "re " + event.body.reason)
            raise RuntimeError("a callback of this test failed")

    b.on_event = answer_and_fail
    async with parties(a, b):
        a.send(b.me, "1", "2")
        await a.until(lambda: a.texts == ["re 1", "re 2"])
        a.send(b.me, "3")
        await a.until(lambda: a.texts == ["re 1", "re 2", "re 3"])


async def test_a_callback_that_answers_every_loss_with_the_next_stops_nobody() -> None:
    a, b = Party("a"), Party("b")
    predecessor = PeerRef("b", "0", b.me.address)

    def send_to_predecessor(event: LinkEvent) -> None:
        if isinstance(event, PeerLost):
            a.send(predecessor, "again")

    a.on_event = send_to_predecessor
    async with parties(a, b):
        a.send(b.me, "hello")
        a.send(predecessor, "again")
        b.send(a.me, "hello")
        await a.until(lambda: len(a.lost) > 10 and a.texts == ["hello"])
        await b.until(lambda: b.texts == ["hello"])


async def test_a_callback_may_close_the_messenger() -> None:
    a, b = Party("a"), Party("b")
    b.on_event = lambda event: b.messenger.close(linger_s=0)
    async with parties(a, b):
        a.send(b.me, "1", "2")
        await b.until(lambda: b.texts == ["1"])
        b.send(a.me, "nothing comes of this")
        await a.until(lambda: a.lost == [b.me])
        assert b.texts == ["1"] and a.texts == []


async def test_a_stopped_peer_is_given_up_and_works_again_when_it_wakes() -> None:
    a = Party("a")
    async with parties(a), echo_process() as (process, echo):
        a.send(echo, "1")
        await a.until(lambda: a.texts == ["1"])
        process.send_signal(signal.SIGSTOP)
        a.send(echo, *(["x" * 100_000] * 200))
        await a.until(lambda: a.lost == [echo])
        await until(lambda: outboxes(a) == {})  # what is queued for it goes with its socket
        process.send_signal(signal.SIGCONT)
        await asyncio.sleep(4 * FAST.alive_interval_s)
        a.send(echo, "2")
        await a.until(lambda: a.texts[-1] == "2")


async def test_close_leaves_neither_socket_nor_thread() -> None:
    fds, threads = own_fds(), own_threads()
    a, b = Party("a"), Party("b")
    async with parties(a, b):
        a.send(b.me, "hello")
        await b.until(lambda: b.texts == ["hello"])
        assert own_fds() > fds
    a.messenger.close()
    assert own_fds() <= fds  # what earlier tests left may go meanwhile
    assert own_threads() <= threads


async def test_what_was_sent_before_close_still_leaves() -> None:
    a, b = Party("a"), Party("b")
    async with parties(b):
        async with parties(a):
            a.send(b.me, "hello")
            await b.until(lambda: b.texts == ["hello"])
            a.send(b.me, "goodbye")
            a.messenger.close()
        await b.until(lambda: b.texts == ["hello", "goodbye"])


async def test_close_does_not_wait_for_peers_that_are_dead_or_stopped() -> None:
    a = Party("a", settings=LinkSettings())
    nobody = PeerRef("nobody", "1", "tcp://127.0.0.1:1")
    async with parties(a), echo_process() as (process, echo):
        a.send(echo, "1")
        await a.until(lambda: a.texts == ["1"])
        process.send_signal(signal.SIGSTOP)
        for peer in (echo, nobody):
            a.send(peer, *(["x" * 100_000] * 100))
        await asyncio.sleep(0.1)
        started = time.monotonic()
        a.messenger.close(linger_s=0.2)
        assert time.monotonic() - started < PATIENCE_S  # they would take it for ever


async def test_a_port_in_use_is_an_error_that_leaves_nothing_behind() -> None:
    a = Party("a")
    async with parties(a):
        fds = own_fds()
        with pytest.raises(zmq.ZMQError, match="in use"):
            Party("b", port=port_of(a.me))
        assert own_fds() <= fds


async def test_a_start_is_refused_a_second_time_and_after_the_end() -> None:
    messenger = Messenger("a", lambda event: None)
    address = messenger.me.address
    messenger.start()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="started or closed"):
            messenger.start()
        messenger.close()
    assert messenger.me.address == address


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_messenger_can_be_closed_after_its_event_loop(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    fds = own_fds()
    messenger = Messenger("a", lambda event: None)

    async def start() -> None:
        messenger.start()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(start())
    messenger.close()
    messenger.close()
    assert own_fds() <= fds


async def test_a_socket_that_cannot_be_made_concerns_its_peer_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As at the limit of file descriptors or of sockets: the rest of the batch leaves, and the link of this one ends by
    the gap."""
    a, others = Party("a"), [Party(f"b{number}") for number in range(4)]
    async with parties(a, *others):
        sockets = a.messenger._sockets
        assert sockets is not None
        connect = sockets._connect

        def fail_for_one(address: str) -> zmq.Socket[bytes]:
            if address == others[1].me.address and sockets.num_unsent < 3:
                raise zmq.ZMQError(errno.EMFILE)
            return connect(address)

        monkeypatch.setattr(sockets, "_connect", fail_for_one)
        for other in others:  # before the loop turns: one batch
            a.messenger._links.send(other.me, Cancel(reason="hello"), time.monotonic())
        a.messenger._send_out()
        await a.until(lambda: a.lost == [others[1].me])
        a.send(others[1].me, "hello")
        for other in others:
            await other.until(lambda other=other: other.texts == ["hello"])  # type: ignore[misc]
        assert a.messenger.num_dropped["unsent"] == 3 and len(a.lost) == 1


@pytest.mark.parametrize(
    "address", ["inproc://zeromq.zap.01", "ipc:///tmp/x", "tcp://127.0.0.1", "tcp://*:5", "", "\ud800"]
)
def test_an_address_that_is_no_inbox_is_never_connected_to(address: str) -> None:
    sockets = MessengerSockets("127.0.0.1", 0, None, 10)
    try:
        sockets.send(address, [b"header", b"body"])
        assert sockets.num_unsent == 1 and not sockets._outboxes
    finally:
        sockets.close(0)
