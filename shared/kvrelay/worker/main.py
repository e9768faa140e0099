"""The entry of a worker process: configuration, logging, model, shell."""

from __future__ import annotations

import logging
import os
import sys

from kvrelay.config import ConfigError, WorkerConfig, load_config
from kvrelay.config.worker import Role as RoleName
from kvrelay.engine.batch import ModelRunner
from kvrelay.scheduling.registry import WHOLE_PROMPTS
from kvrelay.telemetry.logs import setup_logging
from kvrelay.worker.shell import RoleFactory, StartFailed, run_worker

log = logging.getLogger(__name__)

DEFAULT_KV_MEMORY_BYTES = 1 << 30


def worker_main(role: RoleName, make_role: RoleFactory) -> int:
    """Runs a worker until it is told to stop; returns the exit status."""
    # OpenMP's threads spin at the end of each parallel region by default. Where cores are shared, as two workers on a
    # laptop share them, spinning takes the core from the thread that is waited for: steps then take 5 to 50 times as
    # long. Read by libgomp when torch loads it.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        config = load_config(WorkerConfig, prog=f"kvrelay {role}", description=f"One {role} worker.", role=role)
    except ConfigError as error:
        print(f"kvrelay {role}: {error}", file=sys.stderr)
        return 2
    setup_logging(config.log_level, config.log_format, worker_id=config.worker_id)
    config.log_values(log)
    try:
        run_worker(config, make_role, load_runner)
    except StartFailed as error:
        log.error("the %s worker cannot start: %s", role, error, exc_info=log.isEnabledFor(logging.DEBUG))
        return 1
    except Exception:
        log.exception("the %s worker ends", role)
        return 1
    return 0


def load_runner(config: WorkerConfig) -> ModelRunner:
    """The model, loaded, with its pool. Imports torch, which takes seconds, only here."""
    from kvrelay.engine.runner import PoolSizing, make_runner

    if config.device not in ("auto", "cpu"):
        raise ValueError(f"device {config.device}: this version computes on the CPU only")
    sizing = None
    if config.memory_utilization is not None and config.kv_memory_bytes is None:
        whole_prompts = config.scheduler in WHOLE_PROMPTS
        sizing = PoolSizing(config.memory_utilization, config.token_budget, config.max_running, whole_prompts)
    return make_runner(
        config.model,
        dtype=config.dtype,
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        memory_bytes=config.kv_memory_bytes or DEFAULT_KV_MEMORY_BYTES,
        size_pool=sizing,
        max_model_len=config.max_model_len,
        num_threads=config.threads,
    )
