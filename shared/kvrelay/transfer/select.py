"""Which transports a worker has: what its configuration asks for, as far as this machine can do it.

The prefill worker offers what it has, best first, and decode takes the first that it has too. So a pair negotiates by
itself, and workers with and without NIXL work together.
"""

from __future__ import annotations

import logging
from typing import Literal

from kvrelay.transfer.base import TransferReceiver, TransferSender
from kvrelay.transfer.checksums import PoolChecksums
from kvrelay.transfer.nixl_transport import NixlReceiver, NixlSender, NixlSettings, TransportUnavailable
from kvrelay.transfer.wire import Bytes
from kvrelay.transfer.zmq_transport import ZmqReceiver, ZmqSender

log = logging.getLogger(__name__)

TransferChoice = Literal["auto", "nixl", "zmq"]


def make_senders(
    choice: TransferChoice, pool: Bytes, *, ucx_transports: str = "", checksums: bool = False
) -> dict[str, TransferSender]:
    """By name, best first; with `checksums`, each block goes with its own.

    Raises TransportUnavailable where NIXL is asked for by name and does not work.
    """
    senders: dict[str, TransferSender] = {}
    sums = PoolChecksums(pool) if checksums else None
    if choice != "zmq":
        try:
            senders["nixl"] = NixlSender(pool, settings=NixlSettings(ucx_transports=ucx_transports), checksums=sums)
        except TransportUnavailable as error:
            _explain(choice, error)
    if choice != "nixl":
        senders["zmq"] = ZmqSender(pool, checksums=sums)
    return senders


def make_receivers(
    choice: TransferChoice, pool: Bytes, *, host: str, port: int, advertise_host: str | None, ucx_transports: str = ""
) -> dict[str, TransferReceiver]:
    """By name. Raises TransportUnavailable as `make_senders` does. NIXL chooses its own ports and interfaces."""
    receivers: dict[str, TransferReceiver] = {}
    if choice != "zmq":
        try:
            receivers["nixl"] = NixlReceiver(pool, ucx_transports=ucx_transports)
        except TransportUnavailable as error:
            _explain(choice, error)
    if choice != "nixl":
        receivers["zmq"] = ZmqReceiver(pool, host=host, port=port, advertise_host=advertise_host)
    return receivers


def _explain(choice: TransferChoice, error: TransportUnavailable) -> None:
    if choice == "nixl":
        raise error
    log.info("KV blocks travel by zmq: %s", error)
