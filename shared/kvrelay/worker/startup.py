"""Starts a worker: loads the model, builds the scheduler and the step loop, opens the sockets and makes the role."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from kvrelay.config.worker import WorkerConfig
from kvrelay.core_leases import CoreLeases
from kvrelay.engine.model_runner import ModelRunner
from kvrelay.fleet.worker_record import WorkerRecord
from kvrelay.kv.pool import BlockPool
from kvrelay.messaging.messenger import Messenger
from kvrelay.protocol.link import LinkEvent, LinkSettings
from kvrelay.ranks.lockstep_group import LockstepRunner
from kvrelay.ranks.ranked_runner import RankedRunner
from kvrelay.scheduling.queue.prefill_delay import PrefillDelayer
from kvrelay.scheduling.scheduler import Scheduler
from kvrelay.step.batch import ModelSpec
from kvrelay.telemetry.event_log import open_event_log
from kvrelay.telemetry.metrics import Instruments
from kvrelay.telemetry.step_observer import StepObserver
from kvrelay.telemetry.tracer import RecentStages, Tracer
from kvrelay.worker import factory
from kvrelay.worker.calibrate import calibrate
from kvrelay.worker.context import Role, WorkerContext
from kvrelay.worker.launchers import (
    LockstepTimedLauncher,
    MakeLauncher,
    PipelinedTimedLauncher,
    TimedLauncher,
    choose_launcher,
    overlaps_steps,
)
from kvrelay.worker.lockstep_loop import LockstepLoop
from kvrelay.worker.membership import CacheEvents, Membership, NoMembership
from kvrelay.worker.pipelined_loop import PipelinedStepLoop
from kvrelay.worker.reports import Reports
from kvrelay.worker.step_loop import StepLoop

log = logging.getLogger(__name__)

ROUTER_TIMEOUT_S = 30.0
"""Seconds of silence after which a router counts as dead although its process has not ended: no client waits for a
worker's judgement, and a router that stood still goes on with its streams."""

RoleFactory = Callable[[WorkerContext, WorkerConfig], Role]
RunnerFactory = Callable[[WorkerConfig], ModelRunner]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedWorker:
    """The parts of a worker that exist once its model is loaded and its sockets are open."""

    context: WorkerContext
    role: Role
    reports: Reports
    record: WorkerRecord
    membership: Membership | NoMembership
    delayer: PrefillDelayer | None  # None: prompts are not delayed
    cache_events: CacheEvents | None  # None: there is no prefix index to publish to
    ranks: RankedRunner | None  # None: the model is in this process
    lockstep: LockstepRunner | None  # None: this worker is no rank of a group with data-parallel attention


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStartup:
    """What a worker is started with. Whatever `run` opens is closed by `closing` if the start fails."""

    config: WorkerConfig
    make_role: RoleFactory
    make_runner: RunnerFactory
    on_event: Callable[[LinkEvent], None]
    instruments: Instruments
    recent: RecentStages
    tracer: Tracer | None
    closing: ExitStack

    async def run(self) -> StartedWorker:
        """Loads the model and makes all parts. The role, the messenger and the membership are not started yet."""
        config = self.config
        began = time.monotonic()
        runner = await asyncio.to_thread(self.make_runner, config)
        if isinstance(runner, RankedRunner):
            self.closing.callback(runner.close)
        if isinstance(runner, LockstepRunner):
            self.closing.callback(runner.group.close)
        _log_model(runner.spec, time.monotonic() - began)
        pool = BlockPool(runner.spec.num_blocks, runner.spec.block_size)
        cache = factory.make_cache(config, pool)
        scheduler = factory.make_scheduler(config, runner.spec, pool, cache, samples_behind=runner.launches_ahead)
        if config.chunking == "dynamic" or (config.role == "decode" and config.speculation != "off"):
            await asyncio.to_thread(calibrate, scheduler, runner, config.token_budget)
        observer = StepObserver(config.role, self.recent, self.tracer, factory.open_metrics_file(config))
        context = self._make_context(runner, scheduler, observer)
        delayer = scheduler.admission.prefill_gate = factory.make_delayer(config)
        if isinstance(context.steps, LockstepLoop):
            context.steps.delayer = delayer
            messenger = context.messenger
            await asyncio.to_thread(context.steps.group.join, messenger.me, messenger.send, context.steps.woken)
        role = self.make_role(context, config)
        self.closing.callback(role.close)
        record = factory.make_record(config, runner.spec, context.messenger.me)
        cache_events = None
        if config.publishes_prefixes:
            publisher = factory.open_index_publisher(config, context.messenger.me)
            cache_events = CacheEvents(cache, publisher)
        reports = Reports(context, role, observer, lambda: _more_totals(delayer, cache_events))
        return StartedWorker(
            context=context,
            role=role,
            reports=reports,
            record=record,
            membership=factory.make_membership(config, record, reports.digest),
            delayer=delayer,
            cache_events=cache_events,
            ranks=runner if isinstance(runner, RankedRunner) else None,
            lockstep=runner if isinstance(runner, LockstepRunner) else None,
        )

    def _make_context(self, runner: ModelRunner, scheduler: Scheduler, observer: StepObserver) -> WorkerContext:
        """Makes the step loop and opens the event log and the messenger's socket."""
        config = self.config
        steps = self._make_loop(runner, scheduler, observer)
        event_log = open_event_log(config.event_log, config.worker_id)
        if event_log is not None:
            self.closing.callback(event_log.close)
        messenger = Messenger(
            config.worker_id,
            self.on_event,
            host=config.host,
            port=config.port,
            advertise_host=config.reachable_host,
            fingerprint=runner.spec.pairing_fingerprint,
            settings=LinkSettings(
                alive_interval_s=config.peer_interval_s,
                peer_timeout_s=config.peer_timeout_s,
                router_timeout_s=ROUTER_TIMEOUT_S,
                max_peers=config.max_peers,
            ),
            curve=config.curve_key(),
        )
        self.closing.callback(messenger.close, 0)
        return WorkerContext(
            spec=runner.spec,
            pool=scheduler.blocks.pool,
            pool_memory=runner.pool_memory,
            blocks=scheduler.blocks,
            scheduler=scheduler,
            steps=steps,
            messenger=messenger,
            events=event_log,
            instruments=self.instruments,
            metrics=observer.file,
            tracer=self.tracer,
            recent=self.recent,
            ranks=runner.group if isinstance(runner, RankedRunner) else None,
        )

    def _make_loop(self, runner: ModelRunner, scheduler: Scheduler, observer: StepObserver) -> StepLoop:
        is_simulated = self.config.backend == "simulated"
        launcher: MakeLauncher
        if isinstance(runner, LockstepRunner):
            timed = partial(LockstepTimedLauncher, group=runner.group)
            launcher = timed if is_simulated else choose_launcher(runner, overlap=False)
            return LockstepLoop(runner, scheduler, observer, group=runner.group, make_launcher=launcher)
        overlap = overlaps_steps(runner, self.config.overlap, is_simulated=is_simulated)
        cores = _lent_cores(runner)
        num_stages = self.config.num_stages
        make_loop = PipelinedStepLoop if overlap and num_stages > 1 else StepLoop
        if is_simulated:
            launcher = partial(PipelinedTimedLauncher, num_stages=num_stages) if num_stages > 1 else TimedLauncher
        else:
            launcher = choose_launcher(runner, overlap=overlap, cores=cores)
        steps = make_loop(runner, scheduler, observer, overlap=overlap, make_launcher=launcher)
        if isinstance(steps, PipelinedStepLoop):
            steps.max_in_flight = num_stages + 1
        return steps


def _lent_cores(runner: ModelRunner) -> CoreLeases | None:
    """None for a runner that does not compute on the CPU, or all cores are its own."""
    use_threads = getattr(runner, "use_threads", None)
    return None if use_threads is None else CoreLeases.inherited(os.environ, use_threads)


def _more_totals(delayer: PrefillDelayer | None, cache_events: CacheEvents | None) -> dict[str, float]:
    totals = dict(delayer.status()) if delayer is not None else {}
    return totals | (cache_events.totals() if cache_events is not None else {})


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
