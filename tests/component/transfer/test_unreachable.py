"""NIXL's sender and receivers whose machine no longer answers: one of them must not hold up the others."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest

from kvrelay.handoff.transports import nixl_agent
from kvrelay.handoff.transports.base import BlockPush
from kvrelay.handoff.transports.nixl_agent import NixlAgent, NixlEndpoint, Region, devices_for
from kvrelay.handoff.transports.nixl_receiver import NixlReceiver
from kvrelay.handoff.transports.nixl_sender import NixlSender, NixlSettings
from tests.component.transfer.rig import ReceivingEnd, SendingEnd
from tests.component.transfer.transports import NO_NIXL, source_pool, target_pool

pytestmark = pytest.mark.component

HOST, NUM_BLOCKS, BLOCK_BYTES = "127.0.0.1", 8, 4096


@contextmanager
def silent_port() -> Iterator[int]:
    """A port that answers no SYN, like a machine without power: its accept queue is full."""
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        listener.listen(0)
        address = listener.getsockname()
        waiting = [socket.socket() for _ in range(4)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(address)
        try:
            yield address[1]
        finally:
            for each in waiting:
                each.close()


def listening_ports() -> set[int]:
    every = psutil.Process().net_connections("inet")
    return {each.laddr.port for each in every if each.status == psutil.CONN_LISTEN}


def receiver_with_its_port() -> tuple[NixlReceiver, bytes, bytes]:
    """A receiver, its metadata, and its port as the metadata has it, once."""
    while True:
        before = listening_ports()
        receiver = NixlReceiver(target_pool(NUM_BLOCKS, BLOCK_BYTES), ucx_devices=devices_for(HOST))
        (port,) = listening_ports() - before
        metadata, packed = NixlEndpoint.decode(receiver.endpoint).metadata, struct.pack("!H", port)
        if metadata.count(packed) == 1:
            return receiver, metadata, packed
        receiver.close()


@pytest.mark.skipif(bool(NO_NIXL), reason=NO_NIXL)
async def test_a_receiver_that_does_not_answer_fails_alone_while_others_get_their_blocks() -> None:
    pool, taken = source_pool(NUM_BLOCKS, BLOCK_BYTES), target_pool(NUM_BLOCKS, BLOCK_BYTES)
    silent, metadata, port = receiver_with_its_port()
    source = SendingEnd(pool, NixlSender(pool, settings=NixlSettings(ucx_devices=devices_for(HOST))))
    target = ReceivingEnd(taken, NixlReceiver(taken, ucx_devices=devices_for(HOST)))
    with silent_port() as unanswered, closing(silent), closing(target.receiver), closing(source.sender):
        source.sender.start(source.log.add)
        target.receiver.start(target.log.add)
        moved = metadata.replace(port, struct.pack("!H", unanswered))
        lost = msgspec.structs.replace(NixlEndpoint.decode(silent.endpoint), metadata=moved)
        source.push("lost", lost.encode(), [BlockPush(0, 0, 0)])
        target.receiver.admit("good", 0, [1])
        source.push("good", target.endpoint, [BlockPush(0, 0, 1)])
        await target.until_landed("good", [0])  # before UCX has given the first connection up, after 127 s
        assert np.array_equal(taken[1], pool[0])
        await source.log.until(lambda: bool(source.failures("lost")))
        await source.abort("lost")
        assert source.pushed("lost") == []


@pytest.mark.parametrize("chosen", ["", "n"])
def test_ucx_connects_without_blocking_unless_the_environment_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, chosen: str
) -> None:
    seen: list[str] = []

    class Api:
        nixl_agent_config = staticmethod(lambda **_: None)

        class nixl_agent:  # noqa: N801
            def __init__(self, *_: object) -> None:
                pass

            def create_backend(self, _: str) -> None:
                seen.append(os.environ["UCX_TCP_CONN_NB"])

            def register_memory(self, *_: object) -> Any:
                return None

    monkeypatch.delenv("UCX_TCP_CONN_NB", raising=False)
    if chosen:
        monkeypatch.setenv("UCX_TCP_CONN_NB", chosen)
    monkeypatch.setattr(nixl_agent, "import_api", lambda: Api)
    NixlAgent(Region.of(target_pool(NUM_BLOCKS, BLOCK_BYTES)))
    assert seen == [chosen or "y"]
    assert os.environ.get("UCX_TCP_CONN_NB", "") == chosen
