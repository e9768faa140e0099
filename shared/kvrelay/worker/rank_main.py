"""A process of one rank: loads its part of the model and follows the worker's steps."""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import Mapping
from importlib import metadata

from kvrelay.config.ranks import RankConfig
from kvrelay.logs import setup_logging
from kvrelay.process import deferred_collection, end_with_parent, settle_garbage
from kvrelay.ranks.messages import RANK_PROTOCOL, RankSettings, Software
from kvrelay.ranks.rank_member import FollowingRunner, MemberOptions, RankEnds, RankMember, Report
from kvrelay.ranks.rank_process import PARENT_VARIABLE
from kvrelay.ranks.transfer_messages import TransferSettings
from kvrelay.transfer.base import PartReceiver, PartSender, TransferReceiver, TransferSender
from kvrelay.transfer.pool_memory import PoolLike
from kvrelay.transfer.select import make_receivers, make_senders

log = logging.getLogger(__name__)

ADMISSION_WAIT_S = 1.0
"""How long a rank's receiver waits for the call that admits blocks which have come before it."""


def own_software() -> Software:
    """The versions that must be equal on all ranks."""
    return Software(RANK_PROTOCOL, metadata.version("kvrelay"), metadata.version("torch"))


def run_rank(config: RankConfig) -> int:
    """Runs until the worker ends. Returns the exit status: 1 if the rank could not go on."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # see `worker_main`
    if parent := os.environ.get(PARENT_VARIABLE):
        end_with_parent(int(parent))
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal: the worker drains, and needs its ranks
    setup_logging(config.log_level, config.log_format, rank=str(config.rank))

    def load(settings: RankSettings, rank: int, report: Report) -> FollowingRunner:
        with deferred_collection():
            runner = load_part(config, settings, report)
        settle_garbage()
        return runner

    def open_transports(settings: TransferSettings, pool: PoolLike) -> Mapping[str, PartSender | PartReceiver]:
        return make_transports(config, settings, pool)

    options = MemberOptions(config.engine, config.rank, own_software(), config.rank_timeout_s, config.curve_key())
    try:
        RankMember(options, load, open_transports).run()
    except RankEnds as error:
        log.error("rank %d ends: %s", config.rank, error)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def make_transports(
    config: RankConfig, settings: TransferSettings, pool: PoolLike
) -> Mapping[str, PartSender | PartReceiver]:
    """This rank's ends of handoffs, by name. Raises TransportUnavailable as `make_senders` does."""
    if settings.role == "prefill":
        ends: Mapping[str, TransferSender | TransferReceiver] = make_senders(
            settings.choice,
            pool,
            host=host_of_senders(config),
            ucx_transports=settings.ucx_transports,
            checksums=settings.checksums,
            curve=config.curve_key(),
            max_peers=settings.max_peers,
        )
    else:
        ends = make_receivers(
            settings.choice,
            pool,
            host=config.host,
            port=0,
            advertise_host=config.reachable_host,
            ucx_transports=settings.ucx_transports,
            curve=config.curve_key(),
            admission_wait_s=ADMISSION_WAIT_S,
        )
    return {name: end for name, end in ends.items() if isinstance(end, PartSender | PartReceiver)}


def host_of_senders(config: RankConfig) -> str:
    """The address at which NIXL may listen on a prefill rank, which has no other use for `host`: if none was given,
    that by which this machine reaches the worker. Raises OSError."""
    if "host" in config.model_fields_set:
        return config.host
    host, _, port = config.engine.rpartition(":")
    family, kind, _, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # chooses the route and sends nothing
        own: str = probe.getsockname()[0]
    return own


def load_part(config: RankConfig, settings: RankSettings, report: Report) -> FollowingRunner:
    """Loads this rank's part of the model at the same time as the others. Imports torch only here, so that the rank
    joins at once."""
    from kvrelay.engine.parallel.group_coordinator import GroupCoordinator
    from kvrelay.engine.run.device import find_device
    from kvrelay.worker.divided_model import make_part

    device = find_device(config.device)
    group = GroupCoordinator.connect(
        config.rank, settings.size, settings.init_address, settings.timeout_s, device if device.type == "cuda" else None
    )
    report(f"loads its part of {config.model or settings.model} on {device}")
    return make_part(settings, group, device, config.threads, config.model)
