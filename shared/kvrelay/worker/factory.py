"""Builds the parts of a worker from its configuration. The shell connects them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from kvrelay.config.worker import WorkerConfig
from kvrelay.engine.run.graph_sizes import default_sizes, largest_size
from kvrelay.fleet.index import IndexPublisher
from kvrelay.fleet.worker_record import WorkerRecord
from kvrelay.fleet.worker_registry import Registry
from kvrelay.kv.cache import Cache, NullCache
from kvrelay.kv.pool import BlockPool
from kvrelay.kv.prefix_cache import PrefixCache
from kvrelay.process_identity import own_identity
from kvrelay.protocol.messages import PROTOCOL_VERSION, PeerRef
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
from kvrelay.telemetry.metrics_file import MetricsFile
from kvrelay.worker.membership import Membership, NoMembership

MAX_DELAY_S = 1.0
"""Seconds for which the prefill delayer may hold a prompt back, whatever the other ranks have."""


def make_cache(config: WorkerConfig, pool: BlockPool) -> Cache:
    """The prefix cache, or one that caches nothing."""
    if not config.prefix_cache:
        return NullCache()
    return PrefixCache(pool, record_events=config.publishes_prefixes)


def scheduler_settings(config: WorkerConfig) -> SchedulerSettings:
    """The settings of the configuration, without what depends on the machine."""
    return SchedulerSettings(
        queue_order=config.queue_order,
        chunking=config.chunking,
        preemption=config.preemption,
        jump_forward=config.jump_forward,
        num_stages=config.num_stages,
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
    config: WorkerConfig, spec: ModelSpec, pool: BlockPool, cache: Cache, *, samples_behind: bool = False
) -> Scheduler:
    """The scheduler, with the model's limits and the number of swap slots that fit this machine. `samples_behind`: see
    `SchedulerSettings`."""
    limits = SchedulerLimits(config.token_budget, config.max_running, spec.max_model_len, frozenset(spec.eos_token_ids))
    settings = replace(
        scheduler_settings(config),
        num_swap_slots=spec.num_swap_slots,
        swap_block_s=spec.swap_block_s,
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
        device=spec.device,
        kv_dtype=spec.kv_dtype,
        group=config.rank_worker_ids[0] if config.data_parallel_size > 1 else "",
        tokenizer=spec.tokenizer,
        process=own_identity(),
    )


def make_membership(
    config: WorkerConfig, record: WorkerRecord, digest: Callable[[], dict[str, float]]
) -> Membership | NoMembership:
    """The worker's registration, renewed with the load that `digest` returns."""
    if not config.uses_redis:
        return NoMembership()
    return Membership(
        open_registry(config), record, digest, ttl_s=config.lease_ttl_s, interval_s=config.lease_interval_s
    )


def open_registry(config: WorkerConfig) -> Registry:
    """The registry of the fleet's workers in Redis."""
    return Registry(config.redis_url, config.redis_prefix)


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
