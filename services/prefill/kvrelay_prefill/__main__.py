"""`python -m kvrelay_prefill`: one prefill worker."""

from __future__ import annotations

from kvrelay.config.worker import WorkerConfig
from kvrelay.transfer.zmq_transport import ZmqSender
from kvrelay.worker.context import WorkerContext
from kvrelay.worker.main import worker_main
from kvrelay_prefill.service import PrefillRole


def make_role(context: WorkerContext, config: WorkerConfig) -> PrefillRole:
    """The prefill role with its transports."""
    return PrefillRole(context, {"zmq": ZmqSender(context.pool_bytes)})


if __name__ == "__main__":
    raise SystemExit(worker_main("prefill", make_role))
