"""What a role (prefill or decode) gets to work with, and what the shell asks of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from kvrelay.engine.batch import ModelSpec
from kvrelay.kv.pool import BlockPool
from kvrelay.messaging.messenger import Messenger
from kvrelay.protocol.link import Delivered
from kvrelay.protocol.messages import PeerRef
from kvrelay.scheduling.memory.block_manager import BlockManager
from kvrelay.scheduling.scheduler_protocol import Scheduler
from kvrelay.telemetry.event_log import EventLog
from kvrelay.telemetry.instruments import Instruments
from kvrelay.telemetry.metrics_store import MetricsStore
from kvrelay.telemetry.stages import RecentStages
from kvrelay.telemetry.tracer import Tracer
from kvrelay.transfer.pool_memory import PoolLike
from kvrelay.worker.step_loop import StepCallbacks, StepLoop


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """The parts of a worker, composed by the shell."""

    spec: ModelSpec
    pool: BlockPool
    pool_memory: PoolLike
    blocks: BlockManager
    scheduler: Scheduler
    steps: StepLoop
    messenger: Messenger
    instruments: Instruments
    metrics: MetricsStore | None
    events: EventLog | None = None
    tracer: Tracer | None = None
    recent: RecentStages = field(default_factory=RecentStages)


class Role(Protocol):
    """A prefill or decode service's own part. All methods run on the event loop's thread."""

    name: str

    def start(self) -> None:
        """The event loop runs: transports may start."""
        ...

    def callbacks(self) -> StepCallbacks:
        """What to do around a step."""
        ...

    def on_message(self, event: Delivered) -> None:
        """A message from a router or a worker."""
        ...

    def on_peer_lost(self, peer: PeerRef, reason: str, *, replaced: bool) -> None:
        """A peer's process is silent, of another kind, or gone; the last is sure only where it was `replaced`."""
        ...

    def on_tick(self, now: float) -> None:
        """Several times a second: deadlines. `now` is monotonic."""
        ...

    def begin_drain(self) -> None:
        """No new requests from now on."""
        ...

    def abandon(self, reason: str) -> None:
        """The time to drain is over: what is left is given back to the routers."""
        ...

    @property
    def num_open(self) -> int:
        """Requests that still hold anything here."""
        ...

    @property
    def num_unfinished(self) -> int:
        """Those of them that a drain waits for: some end is to be expected."""
        ...

    def queues(self) -> dict[str, int]:
        """Requests by waiting state."""
        ...

    def totals(self) -> dict[str, float]:
        """Sums since the start."""
        ...

    def close(self) -> None:
        """Stops transports."""
        ...
