"""`python -m kvrelay_prefill`: one prefill worker."""

from __future__ import annotations

from kvrelay.config.worker import WorkerConfig
from kvrelay.device_profiles import find_profile
from kvrelay.handoff.transports.select import make_senders
from kvrelay.ranks.transfers import with_other_ranks_senders
from kvrelay.simulated.timed_transport import paced
from kvrelay.worker.context import WorkerContext
from kvrelay.worker.worker_main import worker_main
from kvrelay_prefill.service import PrefillRole


def make_role(context: WorkerContext, config: WorkerConfig) -> PrefillRole:
    """The prefill role with its transports."""
    senders = make_senders(
        config.transfer_choice,
        context.pool_memory,
        host=config.host,
        advertise_host=config.reachable_host,
        checksums=config.transfer_checksums,
        curve=config.curve_keys(),
        max_peers=config.max_peers,
    )
    if config.backend == "simulated":
        senders = paced(senders, find_profile(config.profile), context.spec)
    return PrefillRole(context, with_other_ranks_senders(senders, context.spec, context.ranks))


if __name__ == "__main__":
    raise SystemExit(worker_main("prefill", make_role))
