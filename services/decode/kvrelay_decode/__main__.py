"""`python -m kvrelay_decode`: one decode worker."""

from __future__ import annotations

from kvrelay.config.worker import WorkerConfig
from kvrelay.handoff.transports.select import make_receivers
from kvrelay.ranks.transfers import with_other_ranks_receivers
from kvrelay.worker.context import WorkerContext
from kvrelay.worker.worker_main import worker_main
from kvrelay_decode.service import DecodeRole


def make_role(context: WorkerContext, config: WorkerConfig) -> DecodeRole:
    """The decode role with its transports."""
    receivers = make_receivers(
        config.transfer_choice,
        context.pool_memory,
        host=config.host,
        port=config.transfer_port,
        advertise_host=config.reachable_host,
        curve=config.curve_keys(),
    )
    return DecodeRole(context, with_other_ranks_receivers(receivers, context.spec, context.ranks))


if __name__ == "__main__":
    raise SystemExit(worker_main("decode", make_role))
