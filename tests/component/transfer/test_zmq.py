"""What holds for the ZMQ transport beyond the conformance suite: bad input, back-pressure, books."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest
import zmq

from kvrelay.handoff.transports.base import BlockPush, Corrupted, Landed
from kvrelay.handoff.transports.pool_memory import checksums_of
from kvrelay.handoff.transports.receiver_thread import DropCause
from kvrelay.handoff.transports.wire import Bytes, encode_header
from kvrelay.handoff.transports.zmq_receiver import MIN_MESSAGE_LIMIT_BYTES, ZmqReceiver
from kvrelay.handoff.transports.zmq_sender import SenderSettings, ZmqSender
from kvrelay.messaging.zmq_context import tcp_address
from kvrelay.process import HeldPort
from tests.component.transfer.rig import Plan, Rig, SendingEnd, check_both_count, push_each_alone, scattered
from tests.component.transfer.transports import TRANSPORTS, source_pool, target_pool
from tests.fakes.raw_zmtp import until_closed_after_announcing
from tests.fakes.waiting import PATIENCE_S, until

pytestmark = [pytest.mark.component]

BLOCK_BYTES = 16 * 1024
WINDOW = 8


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig(TRANSPORTS["zmq-tcp"])
    yield made
    made.close()


@pytest.fixture
def stranger() -> Iterator[zmq.Socket[bytes]]:
    """A socket that says what it likes."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as made:
        made.linger = 0
        yield made


@pytest.fixture
def held() -> Iterator[HeldPort]:
    """A port where nobody listens."""
    with HeldPort() as held:
        yield held


CURVE_GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"CURVE".ljust(20, b"\x00") + bytes(32)
"""ZMTP 3.0, section 3.2: signature, version, mechanism, as-server and filler. A peer without a key refuses it."""

HEADER = encode_header("r", BLOCK_BYTES, np.array([5, 6]), np.array([1, 3]))
DATA = bytes(2 * BLOCK_BYTES)


@pytest.mark.parametrize(
    ("cause", "frames"),
    [
        ("malformed", [b"junk", DATA]),
        ("malformed", [HEADER]),
        ("malformed", [HEADER, DATA, DATA]),
        ("malformed", [HEADER.replace(b"kvblocks", b"kvblock5"), DATA]),
        ("size", [HEADER, DATA[:-1]]),
        ("size", [HEADER, b""]),
        ("unknown_reservation", [encode_header("s", BLOCK_BYTES, np.array([5, 6]), np.array([1, 3])), DATA]),
        ("block_bytes", [encode_header("r", 2 * BLOCK_BYTES, np.array([5]), np.array([1])), DATA]),
        ("index", [encode_header("r", BLOCK_BYTES, np.array([4, 5]), np.array([1, 3])), DATA]),
        ("index", [encode_header("r", BLOCK_BYTES, np.array([6, 7]), np.array([1, 3])), DATA]),
        ("slot", [encode_header("r", BLOCK_BYTES, np.array([5, 6]), np.array([1, 2])), DATA]),
        ("repeated_index", [encode_header("r", BLOCK_BYTES, np.array([5, 5]), np.array([1, 1])), DATA]),
        (
            "checksum",
            [encode_header("r", BLOCK_BYTES, np.array([5, 6]), np.array([1, 3]), np.array([1, 2], np.uint32)), DATA],
        ),
    ],
)
async def test_bad_messages_are_dropped_counted_and_do_no_harm(
    rig: Rig, stranger: zmq.Socket[bytes], cause: DropCause, frames: list[bytes]
) -> None:
    target = rig.receiver(target_pool(8, BLOCK_BYTES))
    assert isinstance(target.receiver, ZmqReceiver)
    target.receiver.admit("r", 5, [1, 3])
    stranger.connect(target.endpoint["address"])
    stranger.send_multipart(frames)
    stranger.send_multipart([encode_header("r", BLOCK_BYTES, np.array([5]), np.array([1])), DATA[:BLOCK_BYTES]])
    await target.until_landed("r", [5])
    assert target.receiver.counters.dropped == {cause: 1}
    assert target.receiver.counters.num_blocks == 1
    target.assert_untouched(set(range(8)) - {1})


async def test_a_true_checksum_is_accepted(rig: Rig, stranger: zmq.Socket[bytes]) -> None:
    target = rig.receiver(target_pool(8, BLOCK_BYTES))
    target.receiver.admit("r", 5, [1, 3])
    stranger.connect(target.endpoint["address"])
    sums = checksums_of([np.zeros(BLOCK_BYTES, np.uint8)] * 2)
    stranger.send_multipart([encode_header("r", BLOCK_BYTES, np.array([5, 6]), np.array([1, 3]), sums), DATA])
    await target.until_landed("r", [5, 6])


async def test_of_a_frame_only_the_blocks_that_are_as_they_were_sent_land(
    rig: Rig, stranger: zmq.Socket[bytes]
) -> None:
    target = rig.receiver(target_pool(8, BLOCK_BYTES))
    target.receiver.admit("r", 5, [1, 3])
    stranger.connect(target.endpoint["address"])
    sums = checksums_of([np.zeros(BLOCK_BYTES, np.uint8), np.ones(BLOCK_BYTES, np.uint8)])
    stranger.send_multipart([encode_header("r", BLOCK_BYTES, np.array([5, 6]), np.array([1, 3]), sums), DATA])
    await target.log.until(lambda: len(target.log.events) == 2)
    assert target.log.events == [Landed("r", (5,)), Corrupted("r", (6,))]
    target.assert_untouched([3])


async def test_a_landed_block_is_not_written_again_even_if_the_source_changed(rig: Rig) -> None:
    source, target = rig.sender(source_pool(4, BLOCK_BYTES)), rig.receiver(target_pool(4, BLOCK_BYTES))
    assert isinstance(target.receiver, ZmqReceiver)
    plan = Plan("r", 0, (0, 1), (2, 3))
    plan.admit(target)
    source.push("r", target.endpoint, plan.copies[:1])
    await target.until_landed("r", [0])
    before = target.pool[2].copy()
    source.pool[:] = 0
    source.push("r", target.endpoint, plan.copies)
    await target.until_landed("r", [0, 1])
    assert np.array_equal(target.pool[2], before)
    assert not target.pool[3].any()
    assert target.receiver.counters.num_duplicate_blocks == 1


async def test_frames_wait_for_a_receiver_that_comes_late(
    rig: Rig, random: np.random.Generator, held: HeldPort
) -> None:
    """Zero-copy blocks count as pushed only once they left, and gathered ones only as far as the window goes."""
    direct, staged = rig.sender(source_pool(64, 512 * 1024)), rig.sender(source_pool(4096, BLOCK_BYTES))
    endpoint = {"address": tcp_address("127.0.0.1", held.port)}
    run = Plan("run", 0, tuple(range(64)), tuple(range(64)))
    plan = scattered("scattered", 2048, 4096, random)
    direct.push("run", endpoint, run.copies)
    staged.push("scattered", endpoint, plan.copies)
    await staged.log.until(lambda: len(staged.log.events) == WINDOW)
    for end in (direct, staged):  # an answer to this says that the thread has done all it could
        await end.abort("nothing")
    assert direct.pushed("run") == []
    assert len(staged.pushed("scattered")) == WINDOW * (1 << 20) // BLOCK_BYTES

    receiver = ZmqReceiver(target_pool(4096, BLOCK_BYTES), port=held.port)
    try:
        receiver.admit("scattered", 0, plan.slots)
        receiver.start(lambda landed: None)
        await staged.until_pushed("scattered", plan.blocks)
        await direct.until_pushed("run", run.blocks)
    finally:
        receiver.close()


async def test_a_connection_that_breaks_fails_what_was_sent_over_it_and_has_not_ended(rig: Rig) -> None:
    """ZMQ has given the frames to the kernel, and would connect again without them."""
    source, target = rig.sender(source_pool(8, BLOCK_BYTES)), rig.receiver(target_pool(8, BLOCK_BYTES))
    other = rig.receiver(target_pool(8, BLOCK_BYTES))
    for name in ("open", "ended"):
        source.push(name, target.endpoint, [BlockPush(0, 1, 2)])
        await source.until_pushed(name, [0])
    await source.abort("ended")
    target.receiver.close()
    await source.log.until(lambda: bool(source.failures("open")))
    assert "the connection broke" in source.failures("open")[0]
    assert not source.failures("ended")
    await source.abort("open")
    plan = Plan("r", 0, (1, 2), (3, 4))
    plan.admit(other)
    source.push("r", other.endpoint, plan.copies)
    await other.until_landed("r", plan.blocks)


async def test_an_unreachable_peer_holds_up_nobody_else(rig: Rig, random: np.random.Generator, held: HeldPort) -> None:
    source, target = rig.sender(source_pool(2000, BLOCK_BYTES)), rig.receiver(target_pool(2000, BLOCK_BYTES))
    plan = scattered("r", 1000, 2000, random)
    plan.admit(target)
    nobody = {"address": tcp_address("127.0.0.1", held.port)}
    source.push("lost", nobody, [BlockPush(i, i, i) for i in range(2000)])
    source.push("r", target.endpoint, plan.copies)
    await target.until_landed("r", plan.blocks)
    plan.assert_arrived(source.pool, target.pool)


async def test_an_oversized_message_ends_the_connection_not_the_receiver(rig: Rig, stranger: zmq.Socket[bytes]) -> None:
    source, target = rig.sender(source_pool(8, BLOCK_BYTES)), rig.receiver(target_pool(8, BLOCK_BYTES))
    plan = Plan("r", 0, (1, 2), (3, 4))
    plan.admit(target)
    stranger.connect(target.endpoint["address"])
    stranger.send_multipart([HEADER, bytes(65 << 20)])
    source.push("r", target.endpoint, plan.copies)
    await target.until_landed("r", plan.blocks)


async def test_a_frame_that_is_too_large_is_refused_before_its_bytes_come(rig: Rig) -> None:
    target = rig.receiver(target_pool(4, BLOCK_BYTES))
    for num_bytes in (MIN_MESSAGE_LIMIT_BYTES + 1, 1 << 40, (1 << 63) - 1):
        await until_closed_after_announcing(target.endpoint["address"], num_bytes)


async def test_an_idle_connection_is_closed_and_opened_again() -> None:
    pool: Bytes = source_pool(8, BLOCK_BYTES)
    sender = ZmqSender(pool, settings=SenderSettings(idle_close_s=0.0))
    await push_each_alone(pool, sender, ZmqReceiver(target_pool(8, BLOCK_BYTES)), 8)


async def test_a_connection_that_was_reset_is_forgotten_when_idle(held: HeldPort) -> None:
    """Its socket is closed already; the sender goes on with the next push."""
    pool = source_pool(64, 512 * 1024)
    sender = ZmqSender(pool, settings=SenderSettings(drain_timeout_s=0.0, idle_close_s=0.0))
    end, target = SendingEnd(pool, sender), ZmqReceiver(target_pool(64, 512 * 1024))
    nobody = {"address": tcp_address("127.0.0.1", held.port)}
    try:
        target.start(lambda landed: None)
        target.admit("r", 0, range(64))
        end.sender.start(end.log.add)
        for _ in range(2):
            end.push("lost", nobody, [BlockPush(i, i, i) for i in range(64)])
            await end.until_begun()
            await end.abort("lost")
            end.log.events.clear()
        assert sender.counters.num_resets == 2
        end.push("r", target.endpoint, [BlockPush(i, i, i) for i in range(64)])
        await end.until_pushed("r", range(64))
    finally:
        end.sender.close()
        target.close()


async def test_a_receiver_for_which_there_is_no_socket_fails_alone(held: HeldPort) -> None:
    pool = source_pool(8, BLOCK_BYTES)
    sender = ZmqSender(pool, settings=SenderSettings(max_receivers=1))
    end, target = SendingEnd(pool, sender), ZmqReceiver(target_pool(8, BLOCK_BYTES))
    nobody = [{"address": tcp_address(f"127.0.1.{number}", held.port)} for number in range(100)]
    try:
        target.start(lambda landed: None)
        target.admit("r", 0, range(8))
        end.sender.start(end.log.add)
        end.push("r", target.endpoint, [BlockPush(0, 0, 0)])
        await end.until_pushed("r", [0])
        for number, endpoint in enumerate(nobody):
            end.push(f"lost-{number}", endpoint, [BlockPush(0, 0, 0)])
        await end.log.until(lambda: bool(end.failures("lost-99")))
        assert "cannot open a socket" in end.failures("lost-99")[0]
        assert not end.failures("lost-0")
        end.push("r", target.endpoint, [BlockPush(1, 1, 1)])
        await end.until_pushed("r", [0, 1])
    finally:
        end.sender.close()
        target.close()


@pytest.mark.parametrize("frame", [b"\x97\xa8\xff\xfe\xff\xff\xff\xff\xff\xff", b"\x97" + b"\x91" * 100_000])
async def test_bytes_that_are_no_text_and_deep_nesting_do_not_end_the_receiver(
    rig: Rig, stranger: zmq.Socket[bytes], frame: bytes
) -> None:
    source, target = rig.sender(source_pool(8, BLOCK_BYTES)), rig.receiver(target_pool(8, BLOCK_BYTES))
    plan = Plan("r", 0, (1, 2), (3, 4))
    plan.admit(target)
    stranger.connect(target.endpoint["address"])
    stranger.send_multipart([frame, DATA])
    assert isinstance(target.receiver, ZmqReceiver)
    dropped = target.receiver.counters.dropped
    await until(lambda: dropped["malformed"] == 1)
    source.push("r", target.endpoint, plan.copies)
    await target.until_landed("r", plan.blocks)


async def test_a_receiver_that_refuses_the_handshake_fails_its_pushes_alone(rig: Rig) -> None:
    """libzmq ends the queue to it, so a send that waited would hold the thread, and its close, for ever."""

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer):
            writer.write(CURVE_GREETING)
            await reader.read()

    pool, target = source_pool(8, BLOCK_BYTES), rig.receiver(target_pool(8, BLOCK_BYTES))
    # libzmq ends the queue in several steps, each within a call of the sender: no window may keep it from calling.
    sender = ZmqSender(pool, settings=SenderSettings(window=1 << 30))
    source = SendingEnd(pool, sender)
    plan = Plan("r", 0, (1, 2), (3, 4))
    plan.admit(target)
    try:
        sender.start(source.log.add)
        async with await asyncio.start_server(greet, "127.0.0.1", 0) as server, asyncio.timeout(PATIENCE_S):
            refusing = {"address": tcp_address("127.0.0.1", server.sockets[0].getsockname()[1])}
            while not source.failures("refused"):
                source.push("refused", refusing, [BlockPush(0, 0, 0)])
                await source.until_begun()
        # Whichever is noticed first: that libzmq has ended the queue, or its report of the end.
        (cause, *_) = source.failures("refused")
        assert "refuses the connection" in cause or "the connection broke" in cause
        await source.abort("refused")
        source.push("r", target.endpoint, plan.copies)
        await target.until_landed("r", plan.blocks)
        plan.assert_arrived(source.pool, target.pool)
    finally:
        sender.close()
    assert sender.has_ended


async def test_both_ends_count_what_they_did(rig: Rig, random: np.random.Generator) -> None:
    source, target = rig.sender(source_pool(300, BLOCK_BYTES)), rig.receiver(target_pool(300, BLOCK_BYTES))
    assert isinstance(target.receiver, ZmqReceiver)
    await check_both_count(source, target, target.receiver.counters, random, BLOCK_BYTES)


async def test_a_wildcard_host_needs_an_address_to_tell() -> None:
    pool = target_pool(1, BLOCK_BYTES)
    with pytest.raises(ValueError, match="advertise_host"):
        ZmqReceiver(pool, host="0.0.0.0")
    receiver = ZmqReceiver(pool, host="0.0.0.0", advertise_host="decode-1.example")
    assert receiver.endpoint["address"].startswith("tcp://decode-1.example:")
    receiver.close()


async def test_a_taken_port_is_an_error_that_names_it() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=str(port)):
            ZmqReceiver(target_pool(1, BLOCK_BYTES), port=port)


@pytest.mark.parametrize("shape", [(4,), (4, 4, 4)])
async def test_a_pool_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    pool = np.zeros(shape, np.uint8)
    with pytest.raises(ValueError, match="pool"):
        ZmqSender(pool)
    with pytest.raises(ValueError, match="pool"):
        ZmqReceiver(pool)
