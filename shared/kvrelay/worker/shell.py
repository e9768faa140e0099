"""The worker around a role: model, pool, sockets, registry. Prefill and decode start, run and drain alike."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import msgspec

from kvrelay.config.worker import WorkerConfig
from kvrelay.engine.batch import ModelRunner, ModelSpec
from kvrelay.fleet.worker_record import RECORD_PAGE, record_as_json
from kvrelay.kv.cache import Cache
from kvrelay.kv.pool import BlockPool
from kvrelay.messaging.messenger import Messenger
from kvrelay.protocol.link import Delivered, LinkEvent, LinkSettings, PeerLost
from kvrelay.protocol.messages import (
    Generate,
    GroupLoad,
    Prefill,
    StatusQuery,
)
from kvrelay.telemetry.event_log import EventLog
from kvrelay.telemetry.instruments import Instruments
from kvrelay.telemetry.metric_samples import MetricSample, MetricSamples, merged
from kvrelay.telemetry.otlp import Export, open_export
from kvrelay.telemetry.pages import Page, Pages
from kvrelay.telemetry.process_samples import process_samples
from kvrelay.telemetry.prometheus import metrics_page
from kvrelay.telemetry.sequence_spans import SequenceSpans
from kvrelay.telemetry.stages import RecentStages
from kvrelay.worker import factory
from kvrelay.worker.cache_events import CacheEvents
from kvrelay.worker.calibrate import calibrate
from kvrelay.worker.context import Role, WorkerContext
from kvrelay.worker.delayer_group import DelayerGroup, GroupDiscovery
from kvrelay.worker.launch import TimedLauncher, choose_launcher
from kvrelay.worker.reports import Reports
from kvrelay.worker.step_loop import StepLoop
from kvrelay.worker.worker_samples import status_samples

log = logging.getLogger(__name__)

TICK_S = 0.1
QUIET_BEFORE_CHECK_S = 2.0
"""The pool's books are checked after that long without a request, once per quiet time: it takes a moment."""
DRAIN_POLL_S = 0.05
CLOSE_LINGER_S = 1.0
"""Time for the last messages of a drained worker to be acknowledged."""

RoleFactory = Callable[[WorkerContext, WorkerConfig], Role]
RunnerFactory = Callable[[WorkerConfig], ModelRunner]


class WorkerShell:
    """One worker: `startup`, `main_loop`, `leave`, `close`."""

    def __init__(self, config: WorkerConfig, make_role: RoleFactory, make_runner: RunnerFactory) -> None:
        self.config = config
        self._make_role = make_role
        self._make_runner = make_runner
        self._drain_deadline = math.inf
        self._cache_events: CacheEvents | None = None  # with an index to tell
        self._quiet_since = 0.0  # 0: nothing happened since the last check
        self._stop = asyncio.Event()
        self._closing = contextlib.ExitStack()  # after a failed start
        self._tasks: list[asyncio.Task[None]] = []
        self._events: EventLog | None = None
        self._group: DelayerGroup | None = None  # of the prefill delayer, where it has one
        self._discovery: GroupDiscovery | None = None
        self._instruments = Instruments()
        self._export = Export()
        self._recent = RecentStages()
        self._pages = Pages(
            {
                "/health": lambda: Page(b"ok\n"),
                "/ready": self._readiness,
                RECORD_PAGE: self._record_page,
                "/metrics": lambda: metrics_page(self._metric_samples()),
            }
        )

    async def startup(self) -> None:
        """Loads the model, opens sockets, joins the fleet."""
        config = self.config
        if config.http_port is not None:
            await self._pages.start(config.http_host, config.http_port)
            log.info("health at http://%s:%d/health", config.http_host, self._pages.port)
        self._export = open_export(config.role, config.worker_id)
        started = time.monotonic()
        runner = await asyncio.to_thread(self._make_runner, config)
        _log_model(runner.spec, time.monotonic() - started)
        self._events = config.open_event_log(config.worker_id)
        self.pool = BlockPool(runner.spec.num_blocks, runner.spec.block_size)
        cache = factory.make_cache(config, self.pool)
        await self._prepare_steps(runner, cache)
        context = self._open_messenger(runner)
        self.role = self._make_role(context, config)
        self._closing.callback(self.role.close)
        self.reports = Reports(context, self.role, self._spans, self._more_totals)
        self.role.start()
        self.messenger.start()
        self._record = record = factory.make_record(config, runner.spec, self.messenger.me)
        self.membership = factory.make_membership(config, record, self.reports.digest)
        if self._group is not None:
            self._discovery = GroupDiscovery(
                factory.open_registry(config), self._group, record, config.lease_interval_s
            )
        self._export.start(self._metric_samples)
        if config.publishes_prefixes:
            publisher = factory.open_index_publisher(config, self.messenger.me)
            self._cache_events = CacheEvents(cache, publisher, config.index_interval_s)

    async def _prepare_steps(self, runner: ModelRunner, cache: Cache) -> None:
        """The scheduler, with what it needs to know of this machine, and the loop that drives it."""
        config = self.config
        self.scheduler = factory.make_scheduler(config, runner.spec, self.pool, cache)
        if config.chunking == "dynamic":
            await asyncio.to_thread(calibrate, self.scheduler, runner, config.token_budget)
        self._metrics = factory.open_metrics_store(config)
        simulated = config.backend == "simulated"
        launcher = TimedLauncher if simulated else choose_launcher(runner, overlap=config.overlap)
        self._spans = SequenceSpans(config.role, self._recent, self._export.tracer)
        self.steps = StepLoop(
            runner, self.scheduler, self._metrics, overlap=config.overlap, make_launcher=launcher, spans=self._spans
        )
        # The messenger is opened when the scheduler that its role needs is there.
        self._group = factory.make_delayer_group(
            config, lambda peer, load: self.messenger.send(peer, load), self.steps.wake
        )
        self.delayer = factory.make_delayer(config, self._group)
        self.scheduler.prefill_gate = self.delayer

    def _open_messenger(self, runner: ModelRunner) -> WorkerContext:
        """The socket, and with it all that a role gets to work with."""
        config = self.config
        self.messenger = Messenger(
            config.worker_id,
            self._on_event,
            host=config.host,
            port=config.port,
            advertise_host=config.reachable_host,
            fingerprint=runner.spec.fingerprint,
            settings=LinkSettings(alive_interval_s=config.peer_interval_s, peer_timeout_s=config.peer_timeout_s),
            curve=config.curve_key(),
        )
        self._closing.callback(self.messenger.close, 0)
        self.messenger.open()  # the role needs the address
        return WorkerContext(
            spec=runner.spec,
            pool=self.pool,
            pool_memory=runner.pool_memory,
            blocks=self.scheduler.blocks,
            scheduler=self.scheduler,
            steps=self.steps,
            messenger=self.messenger,
            events=self._events,
            instruments=self._instruments,
            metrics=self._metrics,
            tracer=self._export.tracer,
            recent=self._recent,
        )

    async def main_loop(self) -> None:
        """Steps, ticks and renewals until a signal comes, then the drain."""
        self._tasks = [
            asyncio.create_task(self.steps.run(self.role.callbacks()), name="steps"),
            asyncio.create_task(self._tick(), name="tick"),
            asyncio.create_task(self.reports.run(), name="news"),
            asyncio.create_task(self.membership.run(), name="membership"),
        ]
        if self._cache_events is not None:
            self._tasks.append(asyncio.create_task(self._cache_events.run(), name="cache-events"))
        if self._discovery is not None:
            self._tasks.append(asyncio.create_task(self._discovery.run(), name="discovery"))
        stop = asyncio.create_task(self._stop.wait(), name="stop")
        loop = asyncio.get_running_loop()
        crash: asyncio.Future[None] = loop.create_future()
        loop.set_exception_handler(lambda loop, context: _take_exception(loop, context, crash))
        ends: list[asyncio.Future[Any]] = [*self._tasks, stop, crash]
        done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if stop not in done:
            stop.cancel()
            for ended in done:
                await ended  # raises what ended it
        await self._drain()

    async def leave(self) -> None:
        """Stops working, and takes itself out of registry and index. Safe after a failed start."""
        await self._pages.close()
        if hasattr(self, "membership"):
            await self._leave()
        await self._export.close()

    async def _leave(self) -> None:
        self.steps.stop()
        self.membership.stop()
        if self._discovery is not None:
            self._discovery.stop()
        for task in self._tasks:
            if task.get_name() in ("tick", "news", "cache-events"):
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._cache_events is not None:
            await self._cache_events.close()
        await self.membership.leave()

    def close(self, linger_s: float = 0.2) -> None:
        """Stops transports and closes sockets, for up to `linger_s` on the event loop. Safe after a failed start."""
        if not hasattr(self, "membership"):
            self._closing.close()
            return
        self.role.close()
        self.messenger.close(linger_s)
        if self._events is not None:
            self._events.close()

    def _readiness(self) -> Page:
        """Ready from the first joining on until the drain, also while Redis is away: it serves all the same."""
        if not hasattr(self, "membership") or not self.membership.joined.is_set():
            return Page(b"starting\n", HTTPStatus.SERVICE_UNAVAILABLE)
        if self.reports.draining:
            return Page(b"draining\n", HTTPStatus.SERVICE_UNAVAILABLE)
        return Page(b"ready\n")

    def _record_page(self) -> Page:
        """What the registry is told, for routers that ask the worker itself; without the load, which they hear."""
        if not hasattr(self, "membership"):
            return Page(b"starting\n", HTTPStatus.SERVICE_UNAVAILABLE)
        record = msgspec.structs.replace(self._record, draining=self.reports.draining)
        return Page(record_as_json(record), content_type="application/json")

    def _metric_samples(self) -> MetricSamples:
        """All metrics now; while it starts, those of the process alone."""
        if not hasattr(self, "membership"):
            return process_samples()
        steps = self.steps.totals
        return merged(
            [
                process_samples(),
                self._instruments.samples(),
                status_samples(self.reports.status()),
                {
                    "kvrelay.step.duration": [MetricSample((), steps.durations.report())],
                    "kvrelay.step.size": [MetricSample((), steps.sizes.report())],
                },
            ]
        )

    def on_signal(self) -> None:
        """The first time it drains, the second time it leaves."""
        if self._stop.is_set():
            log.warning("second signal: leaving without waiting for running requests")
            self._drain_deadline = time.monotonic()
        self._stop.set()

    async def _drain(self) -> None:
        """No new requests; the running ones finish, within the time allowed for it."""
        # Not later than a second signal has said, which may have come before the first was seen here.
        self._drain_deadline = min(self._drain_deadline, time.monotonic() + self.config.drain_timeout_s)
        self.role.begin_drain()
        self.reports.draining = True
        self.reports.tell_all()  # until they know, they send requests that would be refused
        await self.membership.announce(draining=True)
        log.info("draining: %d requests are open", self.role.num_open)
        while self.role.num_unfinished and time.monotonic() < self._drain_deadline:
            await asyncio.sleep(DRAIN_POLL_S)
        if self.role.num_unfinished:
            log.warning("%d requests did not finish in time and go back to their routers", self.role.num_unfinished)
            self.role.abandon("the worker shut down")
        last_words = time.monotonic() + CLOSE_LINGER_S
        while self.messenger.num_unacked and time.monotonic() < last_words:
            await asyncio.sleep(DRAIN_POLL_S)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            self.role.on_tick(now)
            if self._group is not None:
                self._group.tick()
            self._check_when_quiet(now)

    def _check_when_quiet(self, now: float) -> None:
        if self.role.num_open or self.scheduler.has_work:
            self._quiet_since = now
        elif self._quiet_since and now - self._quiet_since > QUIET_BEFORE_CHECK_S:
            self._quiet_since = 0.0
            self.pool.check_integrity()

    def _on_event(self, event: LinkEvent) -> None:
        if not isinstance(event, Delivered):
            log.warning("%s: %s", event.peer.peer_id, event.reason)
            self.reports.forget(event.peer)
            if self._group is not None:
                self._group.lost(event.peer)
            self.role.on_peer_lost(event.peer, event.reason, replaced=isinstance(event, PeerLost) and event.replaced)
        elif isinstance(event.body, GroupLoad):
            if self._group is not None:
                self._group.heard(event.peer, event.body)
        elif isinstance(event.body, StatusQuery):
            self.reports.answer(event, event.body)
        else:
            self.role.on_message(event)
            if isinstance(event.body, Prefill | Generate):
                self.reports.took_request(event.peer)

    def _more_totals(self) -> dict[str, float]:
        totals = dict(self.delayer.status()) if self.delayer is not None else {}
        if self._group is not None:
            totals["prefill_delayer_members"] = self._group.num_heard
        if self._cache_events is not None:
            totals |= self._cache_events.totals()
        return totals


def _log_model(spec: ModelSpec, took_s: float) -> None:
    log.info(
        "model %s loaded in %.1f s%s: %s, %d blocks of %d tokens (%.0f MiB), up to %d tokens a sequence",
        spec.name,
        took_s,
        f" on {spec.device}" if spec.device else "",
        spec.dtype if spec.kv_dtype in ("", spec.dtype) else f"{spec.dtype} with KV in {spec.kv_dtype}",
        spec.num_blocks,
        spec.block_size,
        spec.num_blocks * spec.block_bytes / 2**20,
        spec.max_model_len,
    )
    if spec.num_swap_slots:
        log.info(
            "swap space: %d blocks (%.0f MiB); copying one takes %.3f ms",
            spec.num_swap_slots,
            spec.num_swap_slots * spec.block_bytes / 2**20,
            1e3 * spec.swap_block_s,
        )


def _take_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any], crash: asyncio.Future[None]) -> None:
    """A worker without one of its threads would look ready and serve nobody: it ends, and is started again."""
    loop.default_exception_handler(context)
    if context.get("fatal") and not crash.done():
        crash.set_exception(context["exception"])
