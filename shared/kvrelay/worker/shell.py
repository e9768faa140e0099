"""The lifecycle of a worker around its role: start, serve, drain, leave. Prefill and decode workers share it."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import math
import os
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack
from contextvars import Context, copy_context
from http import HTTPStatus
from typing import Any, NoReturn

import msgspec
import zmq

from kvrelay.config.worker import WorkerConfig
from kvrelay.fleet.worker_registry import RECORD_PAGE, record_as_json
from kvrelay.logs import LimitedLog, log_with
from kvrelay.process import (
    StartFailed,
    TooFewOpenFiles,
    allow_open_files,
    allow_peers,
    event_loop_factory,
    leave_at_once,
)
from kvrelay.protocol.link import Delivered, LinkEvent, PeerLost
from kvrelay.protocol.messages import Generate, Prefill, StatusQuery, WakeRank
from kvrelay.ranks.local_ranks import PARENT_VARIABLE
from kvrelay.ranks.lockstep_group import LocalGroup
from kvrelay.ranks.ranked_runner import LockstepRunner
from kvrelay.telemetry.metrics import (
    Instruments,
    MetricSample,
    MetricSamples,
    merged,
    metrics_page,
    process_samples,
    samples_by,
)
from kvrelay.telemetry.otlp import Export, open_export
from kvrelay.telemetry.pages import Page, Pages
from kvrelay.worker.rank_loops import LockstepLoop
from kvrelay.worker.reports import status_samples
from kvrelay.worker.startup import RoleFactory, RunnerFactory, StartedWorker, WorkerStartup

log = logging.getLogger(__name__)

TICK_S = 0.1
LOSS_INTERVAL_S = 60.0
"""Between two equal lines about a peer: each message to one with another key says so again."""
QUIET_BEFORE_CHECK_S = 2.0
"""Time without a request after which the pool is checked, once per quiet period, because the check takes a moment."""
DRAIN_POLL_S = 0.05
LEAST_TOGETHER_S = 1.0
"""A rank with data-parallel attention waits at least this long for the others, however little of the drain is left."""


class WorkerShell:
    """One worker. Call `startup`, `main_loop`, `leave` and `close` in this order; the last two also after a failure."""

    def __init__(self, config: WorkerConfig, make_role: RoleFactory, make_runner: RunnerFactory) -> None:
        self.config = config
        self._losses = LimitedLog(log, LOSS_INTERVAL_S)
        self._make_role = make_role
        self._make_runner = make_runner
        self._started: StartedWorker | None = None
        self._closing = ExitStack()  # used only if the start fails
        self._drain_deadline = math.inf
        self._quiet_since = 0.0  # 0: no request since the last check of the pool
        self._stop = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._instruments = Instruments()
        self._export = Export()
        self._pages = Pages(
            {
                "/health": lambda: Page(b"ok\n"),
                "/ready": self._readiness,
                RECORD_PAGE: self._record_page,
                "/metrics": lambda: metrics_page(self._metric_samples()),
            }
        )

    @property
    def started(self) -> StartedWorker:
        """Raises RuntimeError before `startup` has returned."""
        if self._started is None:
            raise RuntimeError("the worker has not started")
        return self._started

    async def startup(self) -> None:
        """Loads the model, opens sockets and starts to receive. The worker joins the fleet in `main_loop`."""
        config = self.config
        if config.http_port is not None:
            await self._pages.start(config.host, config.http_port)
            log.info("health at http://%s:%d/health", config.host, self._pages.port)
        self._export = open_export(config.role, config.worker_id)
        startup = WorkerStartup(
            config=config,
            make_role=self._make_role,
            make_runner=self._make_runner,
            on_event=self._on_event,
            instruments=self._instruments,
            tracer=self._export.tracer,
            closing=self._closing,
        )
        started = await startup.run()
        started.role.start()
        started.context.messenger.start()
        self._export.start(self._metric_samples)
        self._started = started

    async def main_loop(self) -> None:
        """Runs steps, ticks and renewals until a signal arrives, then drains. Raises the error of a failed task."""
        started = self.started
        self._tasks = [
            asyncio.create_task(started.context.steps.run(started.role.callbacks()), name="steps"),
            asyncio.create_task(self._tick(started), name="tick"),
            asyncio.create_task(started.reports.run(), name="news"),
            asyncio.create_task(started.membership.run(), name="membership"),
        ]
        if started.cache_events is not None:
            publishing = started.cache_events.run(started.membership.joined)
            self._tasks.append(asyncio.create_task(publishing, name="cache-events"))
        if started.ranks is not None:
            self._tasks.append(asyncio.create_task(started.ranks.watch(), name="ranks"))
        if started.lockstep is not None:
            self._tasks.append(asyncio.create_task(started.lockstep.group.watch(), name="ranks"))
        stop = asyncio.create_task(self._stop.wait(), name="stop")
        loop = asyncio.get_running_loop()
        crash: asyncio.Future[None] = loop.create_future()
        loop.set_exception_handler(lambda loop, context: _report_crash(loop, context, crash))
        ends: list[asyncio.Future[Any]] = [*self._tasks, stop, crash]
        done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if stop not in done:
            stop.cancel()
            for ended in done:
                await ended  # raises the error that ended it
        await self._drain(started)

    async def leave(self) -> None:
        """Stops the tasks and leaves the registry and the prefix index."""
        await self._pages.close()
        if self._started is not None:
            await self._leave(self._started)
        await self._export.close()

    async def _leave(self, started: StartedWorker) -> None:
        started.context.steps.stop()
        started.membership.stop()
        for task in self._tasks:
            if task.get_name() in ("tick", "news", "cache-events", "ranks"):
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if started.cache_events is not None:
            await started.cache_events.close()
        await started.membership.leave()

    def close(self, linger_s: float = 0.2) -> None:
        """Stops transports and closes sockets. Blocks the event loop for up to `linger_s`."""
        started = self._started
        if started is None:
            self._closing.close()
            return
        started.role.close()
        if started.ranks is not None:
            started.ranks.close()
        if started.lockstep is not None:
            started.lockstep.group.close()
        started.context.messenger.close(linger_s)
        if started.context.events is not None:
            started.context.events.close()

    def _readiness(self) -> Page:
        """Ready from the first joining until the drain: a worker that loses Redis later still serves."""
        started = self._started
        if started is None or not started.membership.joined.is_set():
            return Page(b"starting\n", HTTPStatus.SERVICE_UNAVAILABLE)
        if started.reports.draining:
            return Page(b"draining\n", HTTPStatus.SERVICE_UNAVAILABLE)
        return Page(b"ready\n")

    def _record_page(self) -> Page:
        """The registry's record of this worker, for routers that ask the worker itself. It has no load."""
        started = self._started
        if started is None:
            return Page(b"starting\n", HTTPStatus.SERVICE_UNAVAILABLE)
        record = msgspec.structs.replace(started.record, draining=started.reports.draining)
        return Page(record_as_json(record), content_type="application/json")

    def _metric_samples(self) -> MetricSamples:
        """All metrics of the worker; during the start only those of the process."""
        started, config = self._started, self.config
        process = process_samples(config.role, config.worker_id, config.model_name)
        if started is None:
            return process
        steps = started.context.steps.totals
        return merged(
            [
                process,
                self._instruments.samples(),
                status_samples(started.reports.status()),
                {"kvrelay.messages.dropped": samples_by("cause", started.context.messenger.num_dropped)},
                {
                    "kvrelay.step.duration": [MetricSample((), steps.durations.report())],
                    "kvrelay.step.size": [MetricSample((), steps.sizes.report())],
                },
            ]
        )

    def on_signal(self) -> None:
        """Starts the drain. The second call ends it at once."""
        if self._stop.is_set():
            log.warning("second signal: leaving without waiting for running requests")
            self._drain_deadline = time.monotonic()
        self._stop.set()

    async def _drain(self, started: StartedWorker) -> None:
        """Accepts no new requests and waits up to `drain_timeout_s` for the running ones."""
        # A second signal may have set an earlier deadline before this task saw the first one.
        self._drain_deadline = min(self._drain_deadline, time.monotonic() + self.config.drain_timeout_s)
        role = started.role
        if started.lockstep is not None:
            started.lockstep.group.begin_drain()
        role.begin_drain()
        started.reports.draining = True
        started.reports.broadcast_status()  # routers that do not know yet send requests that would be refused
        await started.membership.announce(draining=True)
        log.info("draining: %d requests are open", role.num_open)
        while role.num_unfinished and time.monotonic() < self._drain_deadline:
            await asyncio.sleep(DRAIN_POLL_S)
        if role.num_unfinished:
            log.warning("%d requests did not finish in time and go back to their routers", role.num_unfinished)
            role.abandon("the worker shut down")
        await self._await_other_ranks(started)

    async def _await_other_ranks(self, started: StartedWorker) -> None:
        """Keeps a rank with data-parallel attention in the common steps until all ranks have drained."""
        steps = started.context.steps
        if not isinstance(steps, LockstepLoop):
            return
        loop, running = asyncio.get_running_loop(), self._tasks[0]
        all_leave: asyncio.Future[None] = loop.create_future()
        steps.on_all_leaving = lambda: None if all_leave.done() else all_leave.set_result(None)
        steps.leave_together()
        timeout_s = max(LEAST_TOGETHER_S, self._drain_deadline - time.monotonic())
        ends: list[asyncio.Future[None]] = [all_leave, running]
        await asyncio.wait(ends, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)

    async def _tick(self, started: StartedWorker) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            started.role.on_tick(now)
            if hanging := started.context.steps.hanging_step(now):
                _end_at_once(hanging)
            self._check_when_quiet(started, now)

    def _check_when_quiet(self, started: StartedWorker, now: float) -> None:
        if started.role.num_open or started.context.scheduler.has_work:
            self._quiet_since = now
        elif self._quiet_since and now - self._quiet_since > QUIET_BEFORE_CHECK_S:
            self._quiet_since = 0.0
            started.context.pool.check_integrity()

    def _on_event(self, event: LinkEvent) -> None:
        started = self.started
        if not isinstance(event, Delivered):
            line = f"{event.peer.peer_id}: {event.reason}"
            self._losses.warning(line, "%s", line)
            started.reports.forget(event.peer)
            if started.lockstep is not None:
                started.lockstep.group.peer_lost(event.peer, event.reason)
            was_replaced = isinstance(event, PeerLost) and event.replaced
            started.role.on_peer_lost(event.peer, event.reason, replaced=was_replaced)
        elif isinstance(event.body, WakeRank):
            if isinstance(started.context.steps, LockstepLoop):
                started.context.steps.woken(event.body.num_passes)
        elif isinstance(event.body, StatusQuery):
            started.reports.answer(event, event.body)
        else:
            started.role.on_message(event)
            if isinstance(event.body, Prefill | Generate):
                started.reports.took_request(event.peer)


def _end_at_once(hanging: str) -> NoReturn:
    """Ends the process, since a thread in a call that never returns cannot be stopped. Routers lose its link and run
    its requests elsewhere; whoever supervises it starts it again."""
    log.critical("%s, and will not end: this process does, so that another can take its place", hanging)
    faulthandler.dump_traceback(all_threads=True)
    logging.shutdown()
    leave_at_once(status=1)


def _report_crash(loop: asyncio.AbstractEventLoop, context: dict[str, Any], crash: asyncio.Future[None]) -> None:
    """Ends the worker if one of its threads has died. Otherwise it would report ready and serve no request."""
    loop.default_exception_handler(context)
    if context.get("fatal") and not crash.done():
        crash.set_exception(context["exception"])


log = logging.getLogger(__name__)

LINGER_S = 1.0
"""Seconds for the last messages of all workers to leave."""


def run_workers(config: WorkerConfig, make_role: RoleFactory, make_runner: RunnerFactory) -> None:
    """Runs a worker process from start to end. Raises StartFailed, and any error that ends a worker."""
    if config.backend == "simulated" and config.data_parallel_size > 1:
        make_runner = _in_lockstep(make_runner, config.data_parallel_size)
    shells = [WorkerShell(each, make_role, make_runner) for each in config.each_worker()]
    if len(shells) > 1:
        allow_open_files(None)  # each has sockets to many others, but hardly to `max_peers` of them
    else:
        _allow_peers(config.max_peers)
    with contextlib.suppress(KeyboardInterrupt), asyncio.Runner(loop_factory=event_loop_factory()) as runner:
        runner.run(_serve(shells))


def _in_lockstep(make_runner: RunnerFactory, size: int) -> RunnerFactory:
    """Makes runners whose workers, all of this process, are the `size` ranks of one group."""
    ranks = LocalGroup(size).ranks
    return lambda config: LockstepRunner(make_runner(config), ranks[config.data_parallel_rank])


async def _serve(shells: Sequence[WorkerShell]) -> None:
    """Runs until SIGTERM or SIGINT, then drains. A second signal exits at once, as does one during the start: nothing
    knows of the worker yet, and threads that load a model or compile kernels cannot be stopped."""
    loop = asyncio.get_running_loop()
    is_starting = True

    def on_signal() -> None:
        if is_starting:
            log.info("stopped before the start was complete")
            leave_at_once()
        for shell in shells:
            shell.on_signal()

    # Ctrl-C in a terminal reaches all processes of a group with data-parallel attention: rank 0 has the others drain.
    is_child = PARENT_VARIABLE in os.environ
    for number in (signal.SIGTERM,) if is_child else (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    contexts = [_named(shell.config.worker_id) for shell in shells]
    try:
        for shell, context in zip(shells, contexts, strict=True):
            await asyncio.create_task(shell.startup(), context=context)
        is_starting = False
    except BaseException as error:
        for shell in shells:
            await shell.leave()
            shell.close(LINGER_S / len(shells))
        if isinstance(error, OSError | ValueError | zmq.ZMQError):
            raise StartFailed(str(error)) from error
        raise
    lives = [
        asyncio.create_task(_live(shell), context=context) for shell, context in zip(shells, contexts, strict=True)
    ]
    await asyncio.wait(lives, return_when=asyncio.FIRST_EXCEPTION)
    for life in lives:
        life.cancel()
    ends = await asyncio.gather(*lives, return_exceptions=True)
    for shell in shells:  # only now: closing blocks the loop, which the other shells need to leave
        shell.close(LINGER_S / len(shells))
    for ended in ends:
        if isinstance(ended, Exception):
            raise ended


async def _live(shell: WorkerShell) -> None:
    try:
        await shell.main_loop()
    finally:
        await shell.leave()


def _named(worker_id: str) -> Context:
    """Makes log lines name the worker instead of the process."""
    context = copy_context()
    context.run(log_with, worker_id=worker_id)
    return context


def _allow_peers(max_peers: int) -> None:
    try:
        allow_peers(max_peers, transfers_blocks=True)
    except TooFewOpenFiles as error:
        raise StartFailed(str(error)) from error
