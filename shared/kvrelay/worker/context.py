"""The parts of a worker that a role (prefill or decode) uses, and the interface that the shell expects of a role."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from kvrelay.handoff.transports.pool_memory import PoolLike
from kvrelay.kv.pool import BlockPool
from kvrelay.messaging.messenger import Messenger
from kvrelay.protocol.link import Delivered
from kvrelay.protocol.messages import PeerRef
from kvrelay.ranks.rank_group import RankGroup
from kvrelay.scheduling.scheduler import Scheduler
from kvrelay.step.batch import ModelSpec
from kvrelay.telemetry.event_log import EventLog
from kvrelay.telemetry.metrics import Instruments
from kvrelay.telemetry.metrics_file import MetricsFile
from kvrelay.telemetry.tracer import RecentEvents, Tracer
from kvrelay.worker.step_loop import StepCallbacks, StepLoop


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """The parts of a worker, composed by the shell."""

    spec: ModelSpec
    pool: BlockPool
    pool_memory: PoolLike
    scheduler: Scheduler
    steps: StepLoop
    messenger: Messenger
    instruments: Instruments
    metrics: MetricsFile | None
    events: EventLog | None = None
    tracer: Tracer | None = None
    recent: RecentEvents = field(default_factory=RecentEvents)
    ranks: RankGroup | None = None  # None: the model is in this process


class Role(Protocol):
    """The role-specific part of a worker. All methods run on the event loop's thread."""

    name: str

    def start(self) -> None:
        """Starts the transports. The event loop runs already."""
        ...

    def callbacks(self) -> StepCallbacks:
        """The callbacks that the step loop calls around each step."""
        ...

    def on_message(self, event: Delivered) -> None:
        """Handles a message from a router or a worker."""
        ...

    def on_peer_lost(self, peer: PeerRef, reason: str, *, replaced: bool) -> None:
        """Called when a peer's process is silent, gone, or has changed its protocol. Only with `replaced` is the
        process known to be dead."""
        ...

    def on_tick(self, now: float) -> None:
        """Called several times a second, to check deadlines. `now` is in monotonic seconds."""
        ...

    def begin_drain(self) -> None:
        """Refuses new requests from now on."""
        ...

    def abandon(self, reason: str) -> None:
        """Called when the time to drain is over. Fails the remaining requests, so that the routers retry them
        elsewhere."""
        ...

    @property
    def num_open(self) -> int:
        """Requests that still hold anything here."""
        ...

    @property
    def num_unfinished(self) -> int:
        """The open requests that a drain waits for: those that are certain to end."""
        ...

    def queues(self) -> dict[str, int]:
        """The number of requests in each waiting state."""
        ...

    def totals(self) -> dict[str, float]:
        """Counters since the process started."""
        ...

    def close(self) -> None: ...
