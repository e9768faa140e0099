"""The router process: text service, messenger, fleet, HTTP endpoint and signals. It has the life cycle of workers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from http import HTTPStatus

import zmq

from kvrelay.config.router import RouterConfig
from kvrelay.fleet.key_limits import OwnLimits, SharedLimits
from kvrelay.fleet.shared_responses import SharedResponses, StoreBounds
from kvrelay.process import (
    StartFailed,
    TooFewOpenFiles,
    allow_peers,
    event_loop_factory,
    files_for_peers,
    settle_garbage,
)
from kvrelay.telemetry.event_log import open_event_log
from kvrelay.telemetry.metrics import Instruments, MetricSamples, merged, metrics_page, process_samples
from kvrelay.telemetry.otlp import open_export
from kvrelay.telemetry.pages import Page, Pages
from kvrelay.text.chat_template import ChatTemplateError
from kvrelay.text.tokenizer_files import TokenizerNotFound
from kvrelay_router.access.key_ring import follow_key_files
from kvrelay_router.asgi.app import create_app
from kvrelay_router.fleet_samples import fleet_samples
from kvrelay_router.http.body import PendingMemory
from kvrelay_router.http.http_server import ConnectionLimits, HttpServer, allowed_connections, bind, serve
from kvrelay_router.openai.api_service import ApiSettings, FurtherModel
from kvrelay_router.openai.request_metrics import RequestMetrics
from kvrelay_router.responses.response_store import OwnResponses, ResponseStore
from kvrelay_router.served_fleet import ServedFleet, start_fleet

log = logging.getLogger(__name__)

HTTP_GRACE_S = 5.0
"""Maximum time to write the last answers after the drain."""


class RouterServer:
    """One router: `startup`, `main_loop`, `shutdown`."""

    def __init__(self, config: RouterConfig) -> None:
        self.config = config
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._fleets: list[ServedFleet] = []
        self._http: HttpServer | None = None
        self._instruments = Instruments()
        self._memory = PendingMemory(int(config.max_pending_bytes))
        self.pages: Pages | None = None
        self._closing = contextlib.AsyncExitStack()

    async def serve(self) -> None:
        """Runs until SIGTERM or SIGINT, then drains. A second signal ends the drain at once."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        try:
            try:
                await self.startup()
            except (OSError, ValueError, zmq.ZMQError, TokenizerNotFound, ChatTemplateError) as error:
                raise StartFailed(str(error)) from error
            settle_garbage()
            await self.main_loop()
        finally:
            await self.shutdown()

    async def startup(self) -> None:
        """Loads the tokenizer, connects to the fleet and opens the HTTP endpoint."""
        config = self.config
        events = open_event_log(config.event_log, config.router_id)
        if events is not None:
            self._closing.callback(events.close)
        export = open_export("router", config.router_id)
        self._closing.push_async_callback(export.close)
        api = ApiSettings.from_config(config)
        models = frozenset(each.model_name for each in config.fleets())
        for each in config.fleets():
            other_models = models - {each.model_name}
            fleet = await start_fleet(each, api, self._closing, events, export.tracer, other_models=other_models)
            self._fleets.append(fleet)
        limits = _limits(config)
        self._closing.push_async_callback(limits.close)
        metrics = RequestMetrics(config.model_name, self._instruments, export.tracer, logs_access=config.access_log)
        first, *others = self._fleets
        app = create_app(
            api,
            first.dispatcher,
            first.text,
            limits,
            metrics,
            self._memory,
            self._metrics_page,
            [FurtherModel(each.config.model_names, each.dispatcher, each.text) for each in others],
            self._open_store(),
        )
        if config.key_files:
            following = asyncio.create_task(follow_key_files(config, api.keys), name="key-files")
            self._closing.callback(following.cancel)
        export.start(self._metric_samples)
        await self._open_pages()
        await self._meet_workers()
        listener = bind(config.host, config.port, reuse_port=config.reuse_port)
        connections = ConnectionLimits(
            max_connections=allowed_connections(
                config.max_connections, files_for_peers(config.max_peers, transfers_blocks=False)
            ),
        )
        grace_s = config.drain_timeout_s + HTTP_GRACE_S
        self._http = await serve(app, listener, graceful_timeout_s=grace_s, limits=connections)
        self._closing.push_async_callback(self._http.stop)
        for fleet in self._fleets:  # closed first: the HTTP server waits for the answers
            self._closing.push_async_callback(fleet.dispatcher.close)
        names = ", ".join(fleet.config.model_name for fleet in self._fleets)
        log.info("serving %s at http://%s:%d", names, config.reachable_host, self._http.port)

    def _open_store(self) -> ResponseStore | None:
        config = self.config
        if not config.response_store_bytes:
            return None
        bounds = StoreBounds(int(config.response_store_bytes))
        if not config.uses_redis:
            return OwnResponses(bounds)
        shared = SharedResponses(config.redis_url, config.redis_prefix, bounds)
        self._closing.push_async_callback(shared.close)
        return shared

    async def _meet_workers(self) -> None:
        """Waits for workers before the port opens: the first clients would get "no worker is ready"."""
        met = asyncio.create_task(self._all_met(), name="meet-workers")
        stop = asyncio.create_task(self._stop.wait(), name="stop")
        await asyncio.wait([met, stop], timeout=self.config.peer_timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for task in (met, stop):
            task.cancel()
        await asyncio.gather(met, stop, return_exceptions=True)

    async def _all_met(self) -> None:
        await asyncio.gather(*(fleet.dispatcher.watch.met() for fleet in self._fleets))

    async def _open_pages(self) -> None:
        config = self.config
        if config.pages_port is None:
            return
        self.pages = pages = Pages(
            {
                "/health": lambda: Page(b"ok\n"),
                "/ready": self._readiness,
                "/metrics": self._metrics_page,
            }
        )
        self._closing.push_async_callback(pages.close)
        await pages.start(config.pages_host, config.pages_port)
        log.info("metrics at http://%s:%d/metrics", config.pages_host, pages.port)

    def _metrics_page(self) -> Page:
        return metrics_page(self._metric_samples())

    def _readiness(self) -> Page:
        if any(fleet.dispatcher.ready() for fleet in self._fleets):
            return Page(b"ready\n")
        return Page(b"no worker is ready\n", HTTPStatus.SERVICE_UNAVAILABLE)

    def _metric_samples(self) -> MetricSamples:
        figures = fleet_samples(self._fleets)
        process = process_samples("router", self.config.router_id, self.config.model_name)
        return merged([process, self._instruments.samples(), figures, self._memory.samples()])

    async def main_loop(self) -> None:
        """Serves until a signal arrives, then drains: running requests finish within the drain timeout."""
        assert self._http is not None
        stop = asyncio.create_task(self._stop.wait(), name="stop")
        http = asyncio.create_task(self._http.wait(), name="http")
        await asyncio.wait([stop, http], return_when=asyncio.FIRST_COMPLETED)
        if http.done():
            stop.cancel()
            await http  # raises the error that ended it
            return
        http.cancel()
        await self._drain(self._http)

    async def shutdown(self) -> None:
        """Closes everything in reverse order. An error in one does not keep the others open."""
        await self._closing.aclose()

    async def _drain(self, http: HttpServer) -> None:
        log.info("draining: %d requests are running", self._num_running)
        for fleet in self._fleets:
            fleet.dispatcher.begin_drain()
        hurry = asyncio.create_task(self._hurry.wait(), name="hurry")
        closing = asyncio.create_task(http.stop(), name="http-stop")
        timeout_s = self.config.drain_timeout_s
        await asyncio.wait([closing, hurry], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        if self._num_running:
            log.warning("%d requests did not finish in time and are cancelled", self._num_running)
        await asyncio.gather(*(fleet.dispatcher.close() for fleet in self._fleets))
        await closing

    @property
    def _num_running(self) -> int:
        return sum(fleet.dispatcher.num_running for fleet in self._fleets)

    def _on_signal(self) -> None:
        if self._stop.is_set():
            log.warning("second signal: exiting without waiting for running requests")
            self._hurry.set()
        self._stop.set()


def run_router(config: RouterConfig) -> None:
    """Runs a router process until it has drained. Raises StartFailed."""
    try:
        allow_peers(config.max_peers, transfers_blocks=False)
    except TooFewOpenFiles as error:
        raise StartFailed(str(error)) from error
    with contextlib.suppress(KeyboardInterrupt), asyncio.Runner(loop_factory=event_loop_factory()) as runner:
        runner.run(_serve(config))


async def _serve(config: RouterConfig) -> None:
    await RouterServer(config).serve()


def _limits(config: RouterConfig) -> SharedLimits | OwnLimits:
    if not config.uses_redis:
        return OwnLimits()
    # Routers that list the same models in another order count together.
    models = sorted(each.model_name for each in config.fleets())
    return SharedLimits(config.redis_url, config.redis_prefix, ",".join(models))
