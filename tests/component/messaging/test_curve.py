"""A fleet's key: who has it is understood, who has another or none is refused; messages and KV blocks alike."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zmq

from kvrelay.config import ConfigError, RouterConfig, load_config
from kvrelay.curve import BadKeyFile, CurveKey
from kvrelay.handoff.transports.base import BlockPush, Landed
from kvrelay.handoff.transports.select import make_receivers, make_senders
from kvrelay.handoff.transports.zmq_receiver import ZmqReceiver
from kvrelay.messaging.messenger import Messenger
from kvrelay.protocol.link import Delivered, LinkEvent, LinkSettings, PeerLost
from kvrelay.protocol.messages import Cancel
from tests.component.transfer.rig import Log
from tests.component.transfer.transports import EMPTY, zmq_sender
from tests.fakes.command import command
from tests.fakes.waiting import PATIENCE_S

keys = command("keys")

OURS, THEIRS = CurveKey.new(), CurveKey.new()
FAST = LinkSettings(alive_interval_s=0.1, peer_timeout_s=1.0)
BLOCK_BYTES = 4096


class Party:
    def __init__(self, name: str, curve: CurveKey | None, settings: LinkSettings = FAST) -> None:
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


async def test_parties_with_the_same_key_understand_each_other() -> None:
    one, other = (Party(name, OURS, LinkSettings(0.1, 60.0)) for name in ("one", "other"))
    one.messenger.send(other.messenger.me, Cancel(reason="x" * 100_000))
    await other.until(lambda: other.has(Delivered))
    other.messenger.send(one.messenger.me, Cancel(reason="x"))
    await one.until(lambda: one.has(Delivered))
    one.messenger.close()
    other.messenger.close()


@pytest.mark.parametrize(
    ("mine", "yours"), [(OURS, THEIRS), (None, OURS), (OURS, None)], ids=["another key", "no key", "only mine"]
)
async def test_others_are_not_heard(mine: CurveKey | None, yours: CurveKey | None) -> None:
    one, other = Party("one", mine), Party("other", yours)
    one.messenger.send(other.messenger.me, Cancel(reason="x"))
    await one.until(lambda: one.has(PeerLost))
    assert not other.events
    one.messenger.close()
    other.messenger.close()


async def test_who_knows_the_public_key_alone_is_refused() -> None:
    """The public key is enough to be understood, so the gate must ask for the secret one."""
    other = Party("other", OURS)
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.linger = 0
        socket.curve_serverkey = OURS.public
        socket.curve_publickey, socket.curve_secretkey = THEIRS.public, THEIRS.secret
        with socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_SUCCEEDED) as monitor:
            socket.connect(other.messenger.me.address)
            assert await asyncio.to_thread(monitor.poll, 30_000)
            event = int.from_bytes(monitor.recv_multipart()[0][:2], "little")
            assert event == zmq.EVENT_HANDSHAKE_FAILED_AUTH
            socket.disable_monitor()
    other.messenger.close()


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
    strangers = [zmq_sender(source, curve=THEIRS), zmq_sender(source)]
    for stranger in strangers:
        stranger.start(lambda event: None)
        stranger.push("r", receiver.endpoint, [BlockPush(0, 0, 0)])
    friend = zmq_sender(source, curve=OURS)
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


# -- key files --------------------------------------------------------------------------------------------------------


def test_a_key_is_made_once_for_its_owner_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "key"
    assert keys([str(path)]) == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    made = CurveKey.read(path)
    assert made.secret.decode() not in capsys.readouterr().out + repr(made)
    assert keys([str(path)]) == 1 and "File exists" in capsys.readouterr().err
    assert CurveKey.read(path) == made
    assert keys(["-"]) == 0
    path.write_text(capsys.readouterr().out)
    assert CurveKey.read(path) != made
    config = load_config(RouterConfig, ["--curve-key-file", str(path)], environ={"KVRELAY_MODEL": "org/model"})
    key = config.curve_key()
    assert key is not None and key.secret.decode() not in str(config.printable())


@pytest.mark.parametrize("content", ["", "# only a comment\n", "too short\n", f"{'0' * 40}\n{'0' * 40}\n", "é" * 40])
def test_a_file_without_a_key_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "key"
    path.write_text(content)
    with pytest.raises(BadKeyFile):
        CurveKey.read(path)
    with pytest.raises(ConfigError, match=r"--curve-key-file = .*key"):
        load_config(RouterConfig, ["--curve-key-file", str(path)], environ={"KVRELAY_MODEL": "org/model"})
