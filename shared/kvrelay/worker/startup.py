"""Starts a worker: loads the model, builds the scheduler and the step loop, opens the sockets and makes the role."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from kvrelay.config.worker import WorkerConfig
from kvrelay.core_leases import CoreLeases
from kvrelay.engine.model_runner import ModelRunner
from kvrelay.engine.run.graph_sizes import default_sizes, largest_size
from kvrelay.fleet.index import IndexPublisher
from kvrelay.fleet.worker_registry import Registry, WorkerRecord
from kvrelay.kv.ablations import NullCache, TableCache
from kvrelay.kv.pool import BlockPool
from kvrelay.kv.prefix_cache import PrefixCache
from kvrelay.messaging.messenger import Messenger
from kvrelay.process_identity import own_identity
from kvrelay.protocol.link import LinkEvent, LinkSettings
from kvrelay.protocol.messages import PROTOCOL_VERSION, PeerRef
from kvrelay.ranks.ranked_runner import LockstepRunner, RankedRunner
from kvrelay.scheduling import scheduler as scheduling
from kvrelay.scheduling.queue.prefill_delay import DelayerSettings, PrefillDelayer
from kvrelay.scheduling.scheduler import Scheduler
from kvrelay.scheduling.scheduler_settings import (
    NUM_SPECULATIVE_TOKENS,
    SchedulerLimits,
    SchedulerSettings,
    SpeculationSettings,
)
from kvrelay.step.batch import ModelSpec
from kvrelay.telemetry.event_log import open_event_log
from kvrelay.telemetry.metrics import Instruments
from kvrelay.telemetry.metrics_file import MetricsFile
from kvrelay.telemetry.step_observer import StepObserver
from kvrelay.telemetry.tracer import RecentEvents, Tracer
from kvrelay.worker.context import Role, WorkerContext
from kvrelay.worker.launchers import (
    LockstepTimedLauncher,
    MakeLauncher,
    PipelinedTimedLauncher,
    TimedLauncher,
    choose_launcher,
    overlaps_steps,
)
from kvrelay.worker.membership import CacheEvents, Membership
from kvrelay.worker.rank_loops import LockstepLoop, PipelinedStepLoop
from kvrelay.worker.reports import Reports
from kvrelay.worker.speeds import calibrate
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
    membership: Membership
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
        cache = make_cache(config, pool)
        scheduler = make_scheduler(config, runner.spec, pool, cache, samples_behind=runner.launches_ahead)
        if config.chunking == "dynamic" or (config.role == "decode" and config.speculation != "off"):
            await asyncio.to_thread(calibrate, scheduler, runner, config.token_budget)
        recent = RecentEvents()
        observer = StepObserver(config.role, recent, self.tracer, open_metrics_file(config))
        context = self._make_context(runner, scheduler, observer, recent)
        delayer = scheduler.admission.prefill_gate = make_delayer(config)
        if isinstance(context.steps, LockstepLoop):
            context.steps.delayer = delayer
            messenger = context.messenger
            await asyncio.to_thread(context.steps.group.join, messenger.me, messenger.send, context.steps.woken)
        role = self.make_role(context, config)
        self.closing.callback(role.close)
        record = make_record(config, runner.spec, context.messenger.me)
        cache_events = None
        if config.publishes_prefixes:
            publisher = open_index_publisher(config, context.messenger.me)
            cache_events = CacheEvents(cache, publisher)
        reports = Reports(context, role, observer, lambda: _more_totals(delayer, cache_events))
        return StartedWorker(
            context=context,
            role=role,
            reports=reports,
            record=record,
            membership=make_membership(config, record, reports.digest),
            cache_events=cache_events,
            ranks=runner if isinstance(runner, RankedRunner) else None,
            lockstep=runner if isinstance(runner, LockstepRunner) else None,
        )

    def _make_context(
        self, runner: ModelRunner, scheduler: Scheduler, observer: StepObserver, recent: RecentEvents
    ) -> WorkerContext:
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
            curve=config.curve_keys(),
        )
        self.closing.callback(messenger.close, 0)
        return WorkerContext(
            spec=runner.spec,
            pool=scheduler.blocks.pool,
            pool_memory=runner.pool_memory,
            scheduler=scheduler,
            steps=steps,
            messenger=messenger,
            events=event_log,
            instruments=self.instruments,
            metrics=observer.file,
            tracer=self.tracer,
            recent=recent,
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
        pipeline_depth = self.config.pipeline_depth
        make_loop = PipelinedStepLoop if overlap and pipeline_depth > 1 else StepLoop
        if is_simulated:
            launcher = (
                partial(PipelinedTimedLauncher, pipeline_depth=pipeline_depth) if pipeline_depth > 1 else TimedLauncher
            )
        else:
            launcher = choose_launcher(runner, overlap=overlap, cores=cores)
        steps = make_loop(runner, scheduler, observer, overlap=overlap, make_launcher=launcher)
        if isinstance(steps, PipelinedStepLoop):
            steps.max_in_flight = pipeline_depth + 1
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
    if spec.num_host_slots:
        log.info(
            "host memory for preempted sequences: %d blocks (%.0f MiB); copying one takes %.3f ms",
            spec.num_host_slots,
            spec.num_host_slots * spec.block_bytes / 2**20,
            1e3 * spec.host_block_s,
        )


MAX_DELAY_S = 1.0
"""Seconds for which the prefill delayer may hold a prompt back, whatever the other ranks have."""


def make_cache(config: WorkerConfig, pool: BlockPool) -> PrefixCache:
    """The prefix cache, or what the configuration compares it with."""
    if not config.prefix_cache:
        return NullCache(pool)
    if config.prefix_lookup == "table":
        return TableCache(pool)
    return PrefixCache(pool, record_events=config.publishes_prefixes)


def scheduler_settings(config: WorkerConfig) -> SchedulerSettings:
    """The settings of the configuration, without what depends on the machine."""
    return SchedulerSettings(
        queue_order=config.queue_order,
        chunking=config.chunking,
        new_token_ratio=config.new_token_ratio,
        retraction=config.retraction,
        preemption=config.preemption,
        jump_forward=config.jump_forward,
        pipeline_depth=config.pipeline_depth,
        speculation=SpeculationSettings(config.speculation),
    )


def graph_sizes(config: WorkerConfig) -> tuple[int, ...]:
    """Numbers of tokens for which CUDA graphs are captured, ascending; empty on prefill workers."""
    if not config.cuda_graphs or config.role == "prefill":
        return ()
    has_runs = config.jump_forward or config.speculation != "off"
    row_tokens = 1 + NUM_SPECULATIVE_TOKENS if has_runs else 1
    largest = largest_size(config.max_running, row_tokens, config.token_budget)
    return default_sizes(largest)


def make_scheduler(
    config: WorkerConfig, spec: ModelSpec, pool: BlockPool, cache: PrefixCache, *, samples_behind: bool = False
) -> Scheduler:
    """The scheduler, with the model's limits and the number of host slots that fit this machine. `samples_behind`: see
    `SchedulerSettings`."""
    limits = SchedulerLimits(config.token_budget, config.max_running, spec.max_model_len, frozenset(spec.eos_token_ids))
    settings = replace(
        scheduler_settings(config),
        num_host_slots=spec.num_host_slots,
        host_block_s=spec.host_block_s,
        samples_behind=samples_behind,
    )
    return scheduling.make_scheduler(config.scheduler, limits, pool, cache, settings)


def make_delayer(config: WorkerConfig) -> PrefillDelayer | None:
    """The prefill delayer, or None if it is off."""
    if not config.prefill_delayer:
        return None
    return PrefillDelayer(DelayerSettings(config.max_running, max_wait_s=MAX_DELAY_S))


def make_record(config: WorkerConfig, spec: ModelSpec, me: PeerRef) -> WorkerRecord:
    """The record of this worker for the registry and for routers that ask the worker directly."""
    return WorkerRecord(
        worker_id=me.peer_id,
        role=config.role,
        incarnation=me.incarnation,
        address=me.address,
        model=config.model_name,
        fingerprint=spec.pairing_fingerprint,
        protocol_version=PROTOCOL_VERSION,
        block_size=spec.block_size,
        num_blocks=spec.num_blocks,
        max_model_len=spec.max_model_len,
        vocab_size=spec.vocab_size,
        max_running=config.max_running,
        jump_forward=config.jump_forward,
        block_bytes=spec.total_block_bytes,
        token_budget=config.token_budget,
        numerics=spec.numerics,
        device=spec.device,
        kv_dtype=spec.kv_dtype,
        group=config.rank_worker_ids[0] if config.data_parallel_size > 1 else "",
        tokenizer=spec.tokenizer,
        process=own_identity(),
    )


def make_membership(config: WorkerConfig, record: WorkerRecord, digest: Callable[[], dict[str, float]]) -> Membership:
    """The worker's registration, renewed with the load that `digest` returns."""
    registry = Registry(config.redis_url, config.redis_prefix) if config.uses_redis else None
    return Membership(registry, record, digest, ttl_s=config.lease_ttl_s, interval_s=config.lease_interval_s)


def open_index_publisher(config: WorkerConfig, me: PeerRef) -> IndexPublisher:
    """The publisher of this incarnation's cached prefixes."""
    return IndexPublisher(
        config.redis_url,
        config.redis_prefix,
        config.model_name,
        me.peer_id,
        me.incarnation,
        ttl_s=config.lease_ttl_s,
        renew_interval_s=config.lease_interval_s,
    )


def open_metrics_file(config: WorkerConfig) -> MetricsFile | None:
    """The file of step and handoff figures, or None if the configuration names no file."""
    path = config.metrics_file
    return None if path is None else MetricsFile(Path(str(path).replace("{worker_id}", config.worker_id)))
