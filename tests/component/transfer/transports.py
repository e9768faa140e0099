"""The implementations that the conformance suite runs over, and pools with known content."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvrelay.transfer.base import TransferReceiver, TransferSender
from kvrelay.transfer.wire import Bytes
from kvrelay.transfer.zmq_transport import SenderSettings, ZmqReceiver, ZmqSender

DRAIN_TIMEOUT_S = 0.2
EMPTY = 0xEE
"""What a target pool holds where nothing was written."""


@dataclass(frozen=True)
class Transport:
    """How to make both ends over a pool."""

    name: str
    make_sender: Callable[[Bytes], TransferSender]
    make_receiver: Callable[[Bytes], TransferReceiver]


def zmq_sender(pool: Bytes, *, checksum: bool = False) -> ZmqSender:
    """A sender whose aborts do not make a test wait."""
    return ZmqSender(pool, settings=SenderSettings(drain_timeout_s=DRAIN_TIMEOUT_S, checksum=checksum))


TRANSPORTS = {
    transport.name: transport
    for transport in (
        Transport("zmq-local", zmq_sender, ZmqReceiver),
        Transport("zmq-tcp", zmq_sender, lambda pool: ZmqReceiver(pool, local=False)),
        Transport("zmq-checksum", lambda pool: zmq_sender(pool, checksum=True), ZmqReceiver),
    )
}


def source_pool(num_blocks: int, block_bytes: int, seed: int = 0) -> Bytes:
    """A pool of random bytes, the same for the same arguments in every process."""
    return np.random.default_rng(seed).integers(0, 256, (num_blocks, block_bytes), np.uint8)


def target_pool(num_blocks: int, block_bytes: int) -> Bytes:
    """A pool into which nothing was written."""
    return np.full((num_blocks, block_bytes), EMPTY, np.uint8)
