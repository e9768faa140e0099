"""A messenger whose inbox a stranger fills with changed recorded messages, frames of any number and plain bytes: two
honest processes go on talking. With CURVE a stranger without the key reaches nobody."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import msgspec
import pytest
import zmq

from kvrelay.curve import OVERHEAD_BYTES, CurveKey, CurveKeys, location
from kvrelay.messaging.messenger import Messenger
from kvrelay.protocol.codec import MAX_FRAME_BYTES
from kvrelay.protocol.link import Delivered, LinkSettings
from kvrelay.protocol.messages import Cancel
from tests.component.messaging.test_curve import Party
from tests.fakes.raw_zmtp import until_closed_after_announcing
from tests.fakes.traffic import changed, recorded_traffic
from tests.fakes.waiting import until

NUM_MESSAGES = 100
NUM_HOSTILE = 400
KEY = CurveKeys(CurveKey.new())
LASTING = LinkSettings(alive_interval_s=0.1, peer_timeout_s=60.0)


@contextmanager
def stranger(target: Messenger, key: CurveKeys | None) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.linger = 0
        socket.set_hwm(0)
        if key is not None:
            key.own.guard_client(socket)
        socket.connect(location(target.me.address))
        yield socket


def shout(socket: zmq.Socket[bytes], target: Messenger, frames: list[bytes]) -> None:
    """Sends without ever waiting: libzmq gives a connection up whose handshake is refused, and a send that has none
    would wait for ever."""
    try:
        socket.send_multipart(frames, zmq.NOBLOCK)
    except zmq.Again:
        socket.connect(location(target.me.address))


def hostile_frames(rng: random.Random, target: Messenger) -> list[bytes]:
    each = rng.choice(recorded_traffic())
    match rng.random():
        case chance if chance < 0.1:
            return [rng.randbytes(rng.randrange(50)) for _ in range(rng.randint(1, 20))]
        case chance if chance < 0.2:
            return [each.header, each.body, each.body][: rng.choice([1, 3])]
    header = msgspec.msgpack.decode(each.header)
    header |= {"to_incarnation": target.me.incarnation, "to_link": 0, "sender": f"stranger-{rng.randrange(3)}"}
    return [changed(msgspec.msgpack.encode(header), rng), changed(each.body, rng)]


async def write_plain_bytes(target: Messenger, rng: random.Random) -> None:
    host, port = location(target.me.address).removeprefix("tcp://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    with suppress(ConnectionError):
        writer.write(rng.randbytes(2000))
        await writer.drain()
    writer.close()


@pytest.mark.parametrize(
    ("fleet_key", "key"), [(None, None), (KEY, KEY), (KEY, None)], ids=["plain", "curve", "without the key"]
)
async def test_honest_processes_go_on_talking(fleet_key: CurveKeys | None, key: CurveKeys | None) -> None:
    rng = random.Random(5)
    one, other = (Party(name, fleet_key, LASTING) for name in ("one", "other"))
    try:
        with stranger(other.messenger, key) as socket:
            for number in range(NUM_MESSAGES):
                one.messenger.send(other.messenger.me, Cancel(reason=str(number)))
                for _ in range(NUM_HOSTILE // NUM_MESSAGES):
                    shout(socket, other.messenger, hostile_frames(rng, other.messenger))
                if number % 10 == 0:
                    await write_plain_bytes(other.messenger, rng)
                await asyncio.sleep(0)

            def texts() -> list[str]:
                return [
                    event.body.reason
                    for event in other.events
                    if isinstance(event, Delivered)
                    and event.peer == one.messenger.me
                    and isinstance(event.body, Cancel)
                ]

            await until(lambda: len(texts()) == NUM_MESSAGES)
            assert texts() == [str(number) for number in range(NUM_MESSAGES)]
            if fleet_key == key:
                await until(lambda: other.messenger.num_dropped["malformed"])
            else:
                assert not any(other.messenger.num_dropped.values())
                assert {event.peer for event in other.events} == {one.messenger.me}
    finally:
        one.messenger.close()
        other.messenger.close()


async def test_a_frame_that_is_too_large_is_refused_before_its_bytes_come() -> None:
    party = Party("one", None, LASTING)
    try:
        for num_bytes in (MAX_FRAME_BYTES + OVERHEAD_BYTES + 1, 1 << 40, (1 << 63) - 1):
            await until_closed_after_announcing(party.messenger.me.address, num_bytes)
    finally:
        party.messenger.close()
