"""Which transports a worker has: what its configuration asks for, as far as this machine can do it.

The prefill worker offers what it has, best first, and decode takes the first that it has too. So a pair negotiates by
itself, and workers with and without NIXL work together.
"""

from __future__ import annotations

import logging
from typing import Literal

from kvrelay.curve import CurveKeys
from kvrelay.handoff.transports.base import TransferReceiver, TransferSender
from kvrelay.handoff.transports.nixl_agent import TransportUnavailable, devices_for
from kvrelay.handoff.transports.nixl_receiver import NixlReceiver
from kvrelay.handoff.transports.nixl_sender import NixlSender, NixlSettings
from kvrelay.handoff.transports.pool_memory import PoolChecksums, PoolLike
from kvrelay.handoff.transports.zmq_receiver import ZmqReceiver
from kvrelay.handoff.transports.zmq_sender import MAX_RECEIVERS, SenderSettings, ZmqSender

log = logging.getLogger(__name__)

TransferChoice = Literal["auto", "nixl", "zmq"]


def make_senders(
    choice: TransferChoice,
    pool: PoolLike,
    *,
    host: str | None = None,
    advertise_host: str | None = None,
    ucx_transports: str = "",
    checksums: bool = False,
    curve: CurveKeys | None = None,
    max_peers: int = MAX_RECEIVERS,
) -> dict[str, TransferSender]:
    """By name, best first; with `checksums`, each block goes with its own. With `curve`, zmq encrypts with it; nixl
    cannot, and is taken only where it is asked for by name. nixl listens at `host`, if that is a wildcard at
    `advertise_host` (see `devices_for`). zmq connects to up to `max_peers` receivers at a time.

    Raises TransportUnavailable where NIXL is asked for by name and does not work.
    """
    senders: dict[str, TransferSender] = {}
    sums = PoolChecksums(pool) if checksums else None
    if _may_be_nixl(choice, curve):
        try:
            settings = NixlSettings(ucx_transports=ucx_transports, ucx_devices=devices_for(host, advertise_host))
            senders["nixl"] = NixlSender(pool, settings=settings, checksums=sums)
        except TransportUnavailable as error:
            _explain(choice, error)
    if choice != "nixl":
        senders["zmq"] = ZmqSender(pool, settings=SenderSettings(max_receivers=max_peers), checksums=sums, curve=curve)
    return senders


def make_receivers(
    choice: TransferChoice,
    pool: PoolLike,
    *,
    host: str,
    port: int,
    advertise_host: str | None,
    ucx_transports: str = "",
    curve: CurveKeys | None = None,
    admission_wait_s: float = 0.0,
) -> dict[str, TransferReceiver]:
    """By name. `host`, `curve` and TransportUnavailable: as for `make_senders`. NIXL chooses its own ports.
    `admission_wait_s`: see `ReceiverThread`."""
    receivers: dict[str, TransferReceiver] = {}
    if _may_be_nixl(choice, curve):
        try:
            receivers["nixl"] = NixlReceiver(
                pool,
                ucx_transports=ucx_transports,
                ucx_devices=devices_for(host, advertise_host),
                admission_wait_s=admission_wait_s,
            )
        except TransportUnavailable as error:
            _explain(choice, error)
    if choice != "nixl":
        try:
            receivers["zmq"] = ZmqReceiver(
                pool,
                host=host,
                port=port,
                advertise_host=advertise_host,
                curve=curve,
                admission_wait_s=admission_wait_s,
            )
        except BaseException:
            for receiver in receivers.values():
                receiver.close()
            raise
    return receivers


def _may_be_nixl(choice: TransferChoice, curve: CurveKeys | None) -> bool:
    if choice == "auto" and curve is not None:
        log.warning(
            "KV blocks go by zmq, encrypted with the CURVE key, at 0.3 to 0.7 GB/s. On a private network --transfer "
            "nixl sends them unencrypted at its full rate; --transfer zmq keeps them encrypted without this warning"
        )
        return False
    return choice != "zmq"


def _explain(choice: TransferChoice, error: TransportUnavailable) -> None:
    if choice == "nixl":
        raise error
    log.info("KV blocks travel by zmq: %s", error)
