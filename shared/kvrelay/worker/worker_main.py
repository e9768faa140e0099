"""Starts a worker process: configuration, logging, model, shell."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from kvrelay.config import WorkerConfig, load_config
from kvrelay.config.loader import DESCRIPTIONS
from kvrelay.config.worker import Role as RoleName
from kvrelay.engine.model_runner import ModelRunner
from kvrelay.model_directory import cached_snapshot, wrong_file
from kvrelay.process import deferred_collection, service_main, settle_garbage
from kvrelay.ranks.local_ranks import end_with_starter
from kvrelay.simulated.simulated_runner import make_simulated_runner
from kvrelay.worker.shell import run_workers
from kvrelay.worker.startup import RoleFactory, graph_sizes


def worker_main(role: RoleName, make_role: RoleFactory) -> int:
    """Runs a worker until SIGTERM; returns the exit status."""
    # OpenMP threads spin at the end of each parallel region by default. If two workers share cores, as on a laptop, a
    # spinning thread takes the core from the thread that it waits for, and steps take 5 to 50 times as long. libgomp
    # reads this variable when torch loads it.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    end_with_starter()
    prog = f"kvrelay {role}"
    return service_main(
        prog,
        f"{role} worker",
        lambda: load_config(WorkerConfig, prog=prog, description=DESCRIPTIONS[role], role=role),
        lambda config: run_workers(config, make_role, _load_and_settle),
        lambda config: {"worker_id": config.worker_id},
    )


def _load_and_settle(config: WorkerConfig) -> ModelRunner:
    runner = load_runner(config)
    settle_garbage()
    return runner


def _cached(name: str) -> Path | None:
    with suppress(ValueError):  # what is no name of the hub is reported by what looks for it
        return cached_snapshot(name)
    return None


@deferred_collection()
def load_runner(config: WorkerConfig, *, hands_over: bool = True) -> ModelRunner:
    """Returns a runner: the loaded model with its pool, or a simulated device. Imports torch only here, because that
    takes seconds. Raises ValueError for a file that is not what its name says."""
    path, is_simulated = Path(config.model).expanduser(), config.backend == "simulated"
    needs_weights = not is_simulated and config.load_format != "dummy"
    directory = path if path.is_dir() else _cached(config.model)
    if directory is not None and (fault := wrong_file(directory, needs_weights=needs_weights)):
        raise ValueError(fault)
    if is_simulated:
        return make_simulated_runner(config)
    from kvrelay.engine.pool_size import turn_on
    from kvrelay.engine.run.device import find_device
    from kvrelay.engine.run.graphs import GraphSettings
    from kvrelay.ranks.launch import load_data_parallel, load_divided, make_part

    if config.data_parallel_size > 1:
        return load_data_parallel(config)
    if config.num_ranks > 1:
        return load_divided(config, hands_over=hands_over)
    device = find_device(config.device)
    sizes = graph_sizes(config)
    graphs = GraphSettings(sizes) if sizes and device.type == "cuda" else None
    with turn_on(device):
        return make_part(config, device, config.threads, graphs=graphs)
