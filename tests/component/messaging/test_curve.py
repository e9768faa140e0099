"""A fleet's keys: processes with one in common understand each other, a process without is named; messages and KV
blocks alike."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zmq

from kvrelay.curve import CurveKey, CurveKeys, location
from kvrelay.handoff.transports.base import BlockPush, Landed, TransferFailed
from kvrelay.handoff.transports.select import make_receivers, make_senders
from kvrelay.handoff.transports.zmq_receiver import ZmqReceiver
from kvrelay.messaging.messenger import Messenger
from kvrelay.protocol.link import Delivered, LinkEvent, LinkSettings, PeerLost
from kvrelay.protocol.messages import Cancel
from tests.component.transfer.rig import Log
from tests.component.transfer.transports import EMPTY, zmq_sender
from tests.fakes.waiting import PATIENCE_S

OLD, NEW = CurveKey.new(), CurveKey.new()
OURS, THEIRS = CurveKeys(OLD), CurveKeys(NEW)
FAST = LinkSettings(alive_interval_s=0.1, peer_timeout_s=1.0)
BLOCK_BYTES = 4096


class Party:
    def __init__(self, name: str, curve: CurveKeys | None, settings: LinkSettings = FAST) -> None:
        self.events: list[LinkEvent] = []
        self.news = asyncio.Event()
        self.messenger = Messenger(name, self._take, settings=settings, curve=curve)
        self.messenger.start()

    def _take(self, event: LinkEvent) -> None:
        self.events.append(event)
        self.news.set()

    def has(self, kind: type[LinkEvent]) -> bool:
        return any(isinstance(event, kind) for event in self.events)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self.news.clear()
                await self.news.wait()


@pytest.mark.parametrize(
    ("mine", "yours"),
    [(OURS, OURS), (CurveKeys(OLD, NEW), OURS), (CurveKeys(OLD, NEW), CurveKeys(NEW, OLD))],
    ids=["one key", "before the rotation", "during the rotation"],
)
async def test_parties_with_a_key_in_common_understand_each_other(mine: CurveKeys, yours: CurveKeys) -> None:
    one, other = (Party(name, curve, LinkSettings(0.1, 60.0)) for name, curve in (("one", mine), ("other", yours)))
    one.messenger.send(other.messenger.me, Cancel(reason="x" * 100_000))
    await other.until(lambda: other.has(Delivered))
    other.messenger.send(one.messenger.me, Cancel(reason="x"))
    await one.until(lambda: one.has(Delivered))
    one.messenger.close()
    other.messenger.close()


HOLDS = f"has {OLD.fingerprint}"


@pytest.mark.parametrize(
    ("mine", "yours", "reason"),
    [
        (OURS, THEIRS, f"it encrypts with key {NEW.fingerprint}, this process {HOLDS}"),
        (None, OURS, f"it encrypts with key {OLD.fingerprint}, this process has no curve_key_file"),
        (OURS, None, f"it does not encrypt, this process {HOLDS}"),
    ],
    ids=["another key", "no key", "only mine"],
)
async def test_a_party_with_other_keys_is_lost_at_once_by_name(
    mine: CurveKeys | None, yours: CurveKeys | None, reason: str
) -> None:
    one, other = Party("one", mine, LinkSettings(0.1, 60.0)), Party("other", yours)
    one.messenger.send(other.messenger.me, Cancel(reason="x"))
    await one.until(lambda: one.has(PeerLost))
    assert one.events == [PeerLost(other.messenger.me, f"{reason}: both need a key in common, see curve_key_file")]
    assert not other.events
    one.messenger.close()
    other.messenger.close()


async def test_a_party_that_cannot_be_answered_is_named() -> None:
    one, other = Party("one", CurveKeys(NEW, OLD)), Party("other", OURS)
    one.messenger.send(other.messenger.me, Cancel(reason="x"))
    await other.until(lambda: other.has(PeerLost))
    lost = other.events[0]
    assert isinstance(lost, PeerLost) and lost.peer == one.messenger.me
    assert lost.reason.startswith(f"it encrypts with key {NEW.fingerprint}, this process {HOLDS}")
    one.messenger.close()
    other.messenger.close()


async def test_a_key_that_is_added_to_the_file_is_used_without_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(OLD.text())
    one, other = Party("one", CurveKeys.read(path)), Party("other", CurveKeys(NEW, OLD), LinkSettings(0.1, 60.0))
    one.messenger.send(other.messenger.me, Cancel(reason="x"))
    await one.until(lambda: one.has(PeerLost))
    path.write_text(OLD.text() + NEW.text())
    one.messenger.send(other.messenger.me, Cancel(reason="x"))
    await other.until(lambda: other.has(Delivered))
    one.messenger.close()
    other.messenger.close()


async def test_who_knows_the_public_key_alone_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    """The public key is enough to be understood, so the gate must ask for the secret one. One line says so."""
    other = Party("other", OURS)
    caplog.set_level(logging.WARNING)
    for _ in range(2):
        with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
            socket.linger = 0
            socket.curve_serverkey = OLD.public
            socket.curve_publickey, socket.curve_secretkey = NEW.public, NEW.secret
            with socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_SUCCEEDED) as monitor:
                socket.connect(location(other.messenger.me.address))
                assert await asyncio.to_thread(monitor.poll, 30_000)
                event = int.from_bytes(monitor.recv_multipart()[0][:2], "little")
                assert event == zmq.EVENT_HANDSHAKE_FAILED_AUTH
                socket.disable_monitor()
    other.messenger.close()
    assert caplog.messages == ["refused connections from [b'127.0.0.1']: they prove another key"]


def test_a_port_that_is_taken_leaves_nothing_behind() -> None:
    with zmq.Context() as context, context.socket(zmq.PULL) as holder:
        port = holder.bind_to_random_port("tcp://127.0.0.1")
        with pytest.raises(zmq.ZMQError):
            Messenger("one", lambda event: None, port=port, curve=OURS)
        with pytest.raises(OSError, match="cannot listen"):
            ZmqReceiver(np.zeros((2, 64), np.uint8), port=port, curve=OURS)


@pytest.mark.parametrize("local", [True, False])
async def test_blocks_of_another_key_do_not_land(local: bool) -> None:
    source = np.full((4, BLOCK_BYTES), 7, np.uint8)
    target = np.full((4, BLOCK_BYTES), EMPTY, np.uint8)
    receiver = ZmqReceiver(target, local=local, curve=OURS)
    landed = Log()
    receiver.start(landed.add)
    receiver.admit("r", 0, [0, 1])
    strangers, refused = [zmq_sender(source, curve=THEIRS), zmq_sender(source)], Log()
    for stranger in strangers:
        stranger.start(refused.add)
        stranger.push("r", receiver.endpoint, [BlockPush(0, 0, 0)])
    await refused.until(lambda: len(refused.events) == len(strangers))
    for event in refused.events:
        assert isinstance(event, TransferFailed) and f"it encrypts with key {OLD.fingerprint}" in event.cause
    friend = zmq_sender(source, curve=CurveKeys(NEW, OLD))
    friend.start(lambda event: None)
    friend.push("r", receiver.endpoint, [BlockPush(1, 1, 1)])
    await landed.until(lambda: any(isinstance(event, Landed) for event in landed.events))
    for sender in (*strangers, friend):
        sender.close()
    receiver.close()
    assert [event.blocks for event in landed.events if isinstance(event, Landed)] == [(1,)]
    assert (target[0] == EMPTY).all() and (target[1] == 7).all()


def test_with_a_key_blocks_go_by_the_transport_that_encrypts(caplog: pytest.LogCaptureFixture) -> None:
    pool = np.zeros((2, 64), np.uint8)
    assert list(make_senders("zmq", pool, curve=OURS)) == ["zmq"] and not caplog.text
    assert list(make_senders("auto", pool, curve=OURS)) == ["zmq"]
    assert "0.3 to 0.7 GB/s" in caplog.text and "--transfer nixl" in caplog.text
    receivers = make_receivers("auto", pool, host="127.0.0.1", port=0, advertise_host=None, curve=OURS)
    assert list(receivers) == ["zmq"]
    for receiver in receivers.values():
        receiver.close()
