"""A real worker whose transports go wrong: `python -m tests.fakes.faulty_worker prefill|decode FLAGS`.

The schedule stands in KVRELAY_TEST_FAULTS, as `fault_schedule.parse_schedule` reads it. The product has no such switch.
"""

from __future__ import annotations

import os
import sys

from kvrelay.config.worker import WorkerConfig
from kvrelay.handoff.transports.base import TransferReceiver, TransferSender
from kvrelay.handoff.transports.nixl_agent import devices_for
from kvrelay.handoff.transports.nixl_sender import NixlSender, NixlSettings
from kvrelay.handoff.transports.pool_memory import PoolChecksums
from kvrelay.handoff.transports.select import make_receivers
from kvrelay.handoff.transports.wire import Bytes
from kvrelay.handoff.transports.zmq_sender import ZmqSender
from kvrelay.worker.context import Role, WorkerContext
from kvrelay.worker.worker_main import worker_main
from kvrelay_decode.service import DecodeRole
from kvrelay_prefill.service import PrefillRole
from tests.fakes.fault_schedule import Faults, parse_schedule
from tests.fakes.faulty_transport import FaultyReceiver, FaultySender


def faults() -> Faults:
    return Faults(parse_schedule(os.environ["KVRELAY_TEST_FAULTS"]))


def prefill_role(context: WorkerContext, config: WorkerConfig) -> Role:
    """With the senders that the configuration asks for, each wrapped."""

    def nixl(pool: Bytes, checksums: PoolChecksums | None) -> TransferSender:
        settings = NixlSettings(ucx_devices=devices_for(config.host))
        return NixlSender(pool, settings=settings, checksums=checksums)

    def zmq(pool: Bytes, checksums: PoolChecksums | None) -> TransferSender:
        return ZmqSender(pool, checksums=checksums)

    chosen = {"zmq": [zmq], "nixl": [nixl], "auto": [nixl, zmq]}[config.transfer]
    pool, checksums = context.pool_memory, config.transfer_checksums
    wrapped = [FaultySender(pool, each, faults(), checksums=checksums) for each in chosen]
    return PrefillRole(context, {sender.name: sender for sender in wrapped})


def decode_role(context: WorkerContext, config: WorkerConfig) -> Role:
    """With the receivers that the configuration asks for, each wrapped."""
    receivers = make_receivers(
        config.transfer,
        context.pool_memory,
        host=config.host,
        port=config.transfer_port,
        advertise_host=config.reachable_host,
    )
    wrapped: dict[str, TransferReceiver] = {name: FaultyReceiver(each, faults()) for name, each in receivers.items()}
    return DecodeRole(context, wrapped)


if __name__ == "__main__":
    name = sys.argv.pop(1)
    raise SystemExit(worker_main("prefill", prefill_role) if name == "prefill" else worker_main("decode", decode_role))
