"""What holds for the NIXL transport beyond the conformance suite: dead and stopped peers, endpoints, notifications."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Iterator
from ipaddress import ip_address
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest

from kvrelay.handoff.transports import nixl_sender
from kvrelay.handoff.transports.base import BlockPush, SenderDrained
from kvrelay.handoff.transports.nixl_agent import NixlEndpoint, TransportUnavailable, devices_for
from kvrelay.handoff.transports.nixl_receiver import NixlReceiver
from kvrelay.handoff.transports.nixl_sender import NixlSender, NixlSettings
from kvrelay.handoff.transports.wire import Bytes
from tests.component.transfer.rig import Plan, Rig, check_both_count, push_each_alone, scattered
from tests.component.transfer.test_processes import BLOCK_BYTES, NUM_BLOCKS, child
from tests.component.transfer.transports import NO_NIXL, TRANSPORTS, source_pool, target_pool, without_nixl
from tests.fakes.waiting import until

pytestmark = [
    pytest.mark.component,
    pytest.mark.skipif(bool(NO_NIXL), reason=NO_NIXL),
]

OVER = [pytest.param(TRANSPORTS[name], id=name) for name in ("nixl", "nixl-tcp")]
STOPPED_FOR_S = 0.5


@pytest.fixture(params=OVER)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """Over what UCX chooses, and over TCP, where the receiver's UCX copies."""
    made = Rig(request.param)
    yield made
    made.close()


@pytest.mark.parametrize("end", [signal.SIGCONT, signal.SIGKILL])
async def test_an_abort_drains_when_a_stopped_receiver_wakes_or_dies_and_not_before(
    rig: Rig, random: np.random.Generator, end: signal.Signals
) -> None:
    source, plan = rig.sender(source_pool(NUM_BLOCKS, BLOCK_BYTES)), scattered("r", 800, NUM_BLOCKS, random)
    async with child(rig.transport, "receive") as receiver:
        await receiver.order("admit", "r", 0, plan.slots)
        await receiver.hear("admitted")
        receiver.process.send_signal(signal.SIGSTOP)
        source.push("r", receiver.endpoint, plan.copies)
        await source.until_begun()
        source.sender.abort("r")
        await asyncio.sleep(STOPPED_FOR_S)
        assert SenderDrained("r") not in source.log.events
        receiver.process.send_signal(end)
        await source.log.until(lambda: SenderDrained("r") in source.log.events)


async def test_a_connection_that_never_comes_about_fails_its_pushes_and_drains(
    rig: Rig, random: np.random.Generator
) -> None:
    source, plan = rig.sender(source_pool(NUM_BLOCKS, BLOCK_BYTES)), scattered("r", 800, NUM_BLOCKS, random)
    async with child(rig.transport, "receive") as receiver:
        receiver.process.send_signal(signal.SIGSTOP)
        source.push("r", receiver.endpoint, plan.copies)
        await source.log.until(lambda: bool(source.failures("r")))
        await source.abort("r")
    assert source.pushed("r") == []


async def test_a_write_that_hangs_after_a_good_one_fails_its_connection_and_drains(
    rig: Rig, random: np.random.Generator
) -> None:
    """Its receiver is stopped, so the write has not drained; when the receiver dies, UCX ends the write."""
    source = rig.sender(source_pool(NUM_BLOCKS, BLOCK_BYTES))
    good, hung = scattered("good", 8, NUM_BLOCKS, random), scattered("hung", 800, NUM_BLOCKS, random)
    async with child(rig.transport, "receive") as receiver:
        await receiver.order("admit", "good", 0, good.slots)
        await receiver.hear("admitted")
        source.push("good", receiver.endpoint, good.copies)
        await source.until_pushed("good", good.blocks)
        receiver.process.send_signal(signal.SIGSTOP)
        source.push("hung", receiver.endpoint, hung.copies)
        await source.log.until(lambda: bool(source.failures("hung")))
        assert "no progress" in source.failures("hung")[0]
        source.push("next", receiver.endpoint, hung.copies)
        await source.log.until(lambda: bool(source.failures("next")))
        source.sender.abort("hung")
        await source.until_begun()
        assert SenderDrained("hung") not in source.log.events
        receiver.process.kill()
        await source.log.until(lambda: SenderDrained("hung") in source.log.events)
    assert len(source.pushed("hung")) < len(hung.blocks)  # a few may have left before the signal arrived


async def test_a_killed_receiver_fails_its_pushes_and_no_other(rig: Rig, random: np.random.Generator) -> None:
    source, target = (
        rig.sender(source_pool(NUM_BLOCKS, BLOCK_BYTES)),
        rig.receiver(target_pool(NUM_BLOCKS, BLOCK_BYTES)),
    )
    doomed, kept = scattered("doomed", 800, NUM_BLOCKS, random), scattered("kept", 800, NUM_BLOCKS, random)
    kept.admit(target)
    async with child(rig.transport, "receive") as receiver:
        await receiver.order("admit", "doomed", 0, doomed.slots)
        await receiver.hear("admitted")
        source.push("doomed", receiver.endpoint, doomed.copies[:400])
        await receiver.hear("Landed")
        receiver.process.kill()
        await receiver.process.wait()
        source.push("kept", target.endpoint, kept.copies)
        source.push("doomed", receiver.endpoint, doomed.copies[400:])
        await source.log.until(lambda: bool(source.failures("doomed")))
        await target.until_landed("kept", kept.blocks)
        await source.abort("doomed")
    kept.assert_arrived(source.pool, target.pool)


async def test_notifications_of_a_released_reservation_count_for_nothing(rig: Rig) -> None:
    source, target = rig.sender(source_pool(8, BLOCK_BYTES)), rig.receiver(target_pool(8, BLOCK_BYTES))
    assert isinstance(target.receiver, NixlReceiver)
    late, marker = Plan("late", 0, (0, 1), (2, 3)), Plan("marker", 0, (4,), (5,))
    late.admit(target)
    marker.admit(target)
    target.receiver.release("late")
    source.push("late", target.endpoint, late.copies)
    source.push("marker", target.endpoint, marker.copies)
    await target.until_landed("marker", [0])
    assert target.landed("late") == []
    assert target.receiver.counters.dropped == {"unknown_reservation": 1}
    assert target.receiver.counters.num_blocks == 1


async def test_a_slot_outside_the_pool_or_blocks_of_another_size_are_never_written(rig: Rig) -> None:
    """Nobody at the other end would notice."""
    source, target = rig.sender(source_pool(8, BLOCK_BYTES)), rig.receiver(target_pool(4, BLOCK_BYTES))
    other = rig.receiver(target_pool(8, 2 * BLOCK_BYTES))
    source.push("outside", target.endpoint, [BlockPush(0, 0, 4)])
    source.push("size", other.endpoint, [BlockPush(0, 0, 0)])
    await source.log.until(lambda: bool(source.failures("outside") and source.failures("size")))
    assert "slot 4" in source.failures("outside")[0]
    other.assert_untouched(range(8))


@pytest.mark.parametrize("change", [None, {"metadata": b"AAAA"}, {"agent": ""}])
async def test_a_bad_endpoint_fails_the_push_and_nothing_else(rig: Rig, change: dict[str, Any] | None) -> None:
    source, target = rig.sender(source_pool(4, BLOCK_BYTES)), rig.receiver(target_pool(4, BLOCK_BYTES))
    good = NixlEndpoint.decode(target.endpoint)
    bad = {"nixl": "%"} if change is None else msgspec.structs.replace(good, **change).encode()
    source.push("bad", bad, [BlockPush(0, 0, 0)])
    await source.log.until(lambda: len(source.failures("bad")) == 1)
    target.receiver.admit("good", 0, [1])
    source.push("good", target.endpoint, [BlockPush(0, 0, 1)])
    await target.until_landed("good", [0])


async def test_a_receiver_nobody_used_is_forgotten_and_found_again() -> None:
    pool: Bytes = source_pool(8, BLOCK_BYTES)
    sender = NixlSender(pool, settings=NixlSettings(idle_forget_s=0.0))
    await push_each_alone(pool, sender, NixlReceiver(target_pool(8, BLOCK_BYTES)), 8)


async def test_an_endpoint_is_small_and_another_one_after_each_start(rig: Rig) -> None:
    first, second = (rig.receiver(target_pool(4, BLOCK_BYTES)).endpoint for _ in range(2))
    assert NixlEndpoint.decode(first).agent != NixlEndpoint.decode(second).agent
    assert sum(map(len, first.values())) < 4096


async def test_both_ends_count_what_they_did(rig: Rig, random: np.random.Generator) -> None:
    source, target = rig.sender(source_pool(300, BLOCK_BYTES)), rig.receiver(target_pool(300, BLOCK_BYTES))
    assert isinstance(source.sender, NixlSender)
    assert isinstance(target.receiver, NixlReceiver)
    await check_both_count(source, target, target.receiver.counters, random, BLOCK_BYTES)
    assert source.sender.counters.post_s > 0


async def test_transports_that_ucx_does_not_have_make_it_unavailable() -> None:
    with pytest.raises(TransportUnavailable, match="no_such_transport"):
        NixlReceiver(target_pool(4, BLOCK_BYTES), ucx_transports="no_such_transport")


def listening() -> set[tuple[str, int]]:
    every = psutil.Process().net_connections("tcp")
    return {(each.laddr.ip, each.laddr.port) for each in every if each.status == psutil.CONN_LISTEN}


async def test_a_worker_at_a_loopback_address_listens_on_no_other_interface() -> None:
    before, devices = listening(), devices_for("127.0.0.1")
    receiver = NixlReceiver(target_pool(4, BLOCK_BYTES), ucx_devices=devices)
    sender = NixlSender(source_pool(4, BLOCK_BYTES), settings=NixlSettings(ucx_devices=devices))
    new = listening() - before
    sender.close()
    receiver.close()
    assert len(new) >= 2
    assert [place for place in new if not ip_address(place[0]).is_loopback] == []


async def test_a_pair_listens_only_in_the_range_of_ports_that_the_environment_sets(
    monkeypatch: pytest.MonkeyPatch, random: np.random.Generator
) -> None:
    """One port of each agent on each device; a firewall needs to open no others."""
    first = 20_000 + 16 * int(random.integers(600))  # below the ports that the kernel gives to others
    monkeypatch.setenv("UCX_TCP_PORT_RANGE", f"{first}-{first + 15}")
    before, rig = listening(), Rig(TRANSPORTS["nixl-tcp"])
    try:
        source, target = rig.sender(source_pool(8, BLOCK_BYTES)), rig.receiver(target_pool(8, BLOCK_BYTES))
        plan = scattered("r", 4, 8, random)
        plan.admit(target)
        source.push("r", target.endpoint, plan.copies)
        await target.until_landed("r", plan.blocks)
        new = listening() - before
    finally:
        rig.close()
    assert {port for _, port in new} <= set(range(first, first + 16))
    assert len(new) == 2 * len({address for address, _ in new}) > 0


async def test_a_range_of_ports_that_are_all_taken_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX alone would look for one without end."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("UCX_TCP_PORT_RANGE", f"{port}-{port}")
        with pytest.raises(TransportUnavailable, match=f"{port}-{port} are taken at 127.0.0.1"):
            NixlReceiver(target_pool(4, BLOCK_BYTES), ucx_devices=devices_for("127.0.0.1"))
    NixlReceiver(target_pool(4, BLOCK_BYTES), ucx_devices=devices_for("127.0.0.1")).close()


async def test_without_the_library_it_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    without_nixl(monkeypatch)
    with pytest.raises(TransportUnavailable, match="install the extra"):
        NixlSender(source_pool(4, BLOCK_BYTES))


@pytest.mark.parametrize("shape", [(4,), (4, 4, 4), (0, 4)])
async def test_a_pool_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    pool = np.zeros(shape, np.uint8)
    with pytest.raises(ValueError, match="pool"):
        NixlSender(pool)
    with pytest.raises(ValueError, match="pool"):
        NixlReceiver(pool)


async def test_connections_that_strangers_have_ended_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a sender that never sends, and at a receiver."""
    monkeypatch.setattr(nixl_sender, "PROGRESS_INTERVAL_S", 0.05)
    process, before = psutil.Process(), listening()
    settings = NixlSettings(ucx_devices=devices_for("127.0.0.1"))
    sender = NixlSender(source_pool(16, 4096), settings=settings)
    receiver = NixlReceiver(target_pool(16, 4096), ucx_devices=devices_for("127.0.0.1"))
    sender.start(lambda _: None)
    receiver.start(lambda _: None)
    try:
        places = listening() - before
        assert places
        for place in places:
            num_files = process.num_fds()
            for number in range(100):
                with socket.create_connection(place) as stranger:
                    stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" if number % 2 else b"")
            await until(lambda most=num_files: process.num_fds() <= most)  # type: ignore[misc]
    finally:
        sender.close()
        receiver.close()
