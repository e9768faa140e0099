"""Checks what the services of `kvrelay up` need before any of them starts. Each failure is one message, which names the
field, the numbers and what to do."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from kvrelay.cli.launch_plan import LaunchPlan
from kvrelay.cli.model_files import find_model
from kvrelay.config.loader import ConfigError
from kvrelay.config.router import RouterConfig
from kvrelay.config.worker import WorkerConfig
from kvrelay.handoff.transports.nixl_agent import PACKAGES
from kvrelay.machine_memory import available_memory_bytes
from kvrelay.ports import HeldPort
from kvrelay.ranks.model_division import why_not_divided
from kvrelay.scheduling.memory.swapping import SWAP_PART

DEFAULT_POOL_BYTES = 1 << 30


def find_models(plan: LaunchPlan, environ: Mapping[str, str]) -> dict[str, str]:
    """Looks for the models of the plan once, and returns the flags that give all services the directory of a model that
    was named as on the hub. Raises ConfigError."""
    needs_weights = any(worker.load_format != "dummy" for worker in _computing(plan))
    own = plan.router.model
    found = {}
    for fleet in plan.router.fleets():
        found[fleet.model] = find_model(fleet.model, environ, needs_weights=needs_weights and fleet.model == own)
    if found[own] == own or any(worker.model != own for worker in plan.workers):
        return {}
    return {"model": found[own], "served_model_name": plan.router.served_model_name}


def check_plan(plan: LaunchPlan) -> None:
    """Raises ConfigError if the services of the plan could not start."""
    computing = _computing(plan)
    check_sizes(computing)
    check_memory([worker for worker in computing if is_on_cpu(worker, plan)], available_memory_bytes())
    check_transfer(plan.workers)
    check_page_ports(plan.router, plan.workers, plan.up.metrics_port)


def check_sizes(workers: Sequence[WorkerConfig]) -> None:
    """Raises ConfigError if the heads or layers of a worker's model do not divide among its ranks."""
    for worker in workers:
        if why := why_not_divided(worker.model, worker.tensor_parallel_size, worker.pipeline_parallel_size):
            raise ConfigError(f"{worker.worker_id}: {Path(worker.model).name} with {why}")


def _computing(plan: LaunchPlan) -> list[WorkerConfig]:
    return [worker for worker in plan.workers if worker.backend != "simulated"]


# -- memory -----------------------------------------------------------------------------------------------------------


def is_on_cpu(worker: WorkerConfig, plan: LaunchPlan) -> bool:
    return worker.worker_id not in plan.placed and not worker.device.startswith("cuda")


def check_memory(workers: Sequence[WorkerConfig], available: int) -> None:
    """Raises ConfigError if the sizes that were set for pools and swap spaces exceed the memory that is free.

    Default sizes are not checked: a pool takes no page in advance that would leave little free, and small models never
    fill theirs.
    """
    if not any(worker.kv_memory_bytes or worker.swap_space for worker in workers):
        return
    pools = swaps = 0
    for worker in workers:
        if worker.num_blocks is not None or worker.pool_sizing is not None:
            continue  # sized by the model, which is not known yet
        pool = int(worker.kv_memory_bytes or DEFAULT_POOL_BYTES)
        swap = worker.swap_bytes
        pools += pool * worker.num_processes
        swaps += (pool // SWAP_PART if swap is None else swap) * worker.num_processes
    if pools + swaps > available:
        raise ConfigError(
            f"--kv-memory-bytes and --swap-space: the pools of {len(workers)} workers take {_size(pools)} and their "
            f"swap spaces {_size(swaps)}, together {_size(pools + swaps)}, and {_size(available)} are free; lower "
            f"--kv-memory-bytes or --swap-space, or start fewer workers"
        )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 1 << 30 else f"{num_bytes >> 20} MiB"


# -- transports and ports ---------------------------------------------------------------------------------------------


def check_transfer(workers: Sequence[WorkerConfig]) -> None:
    """Raises ConfigError if NIXL is asked for by name and not installed."""
    wanted = any(worker.transfer_choice == "nixl" for worker in workers)
    if wanted and not any(find_spec(name) for name in PACKAGES):
        raise ConfigError(
            "--transfer nixl: NIXL is not installed; install the extra `nixl`, or use --transfer auto, which takes zmq "
            "without it"
        )


def check_page_ports(router: RouterConfig, workers: Sequence[WorkerConfig], first: int | None) -> None:
    """Raises ConfigError if a port of the services' pages is in use. `first`: `metrics_port` of `kvrelay up`."""
    wanted: list[tuple[str, int, str]] = []
    if router.metrics_port and not router.has_metrics_on_api_port:
        wanted.append((router.pages_host, router.metrics_port, "the router"))
    if first is None:
        wanted += [(worker.host, worker.http_port, worker.worker_id) for worker in workers if worker.http_port]
    else:
        port = first + 1
        for worker in workers:
            if len(worker.each_worker()) == 1:
                wanted.append((worker.host, port, worker.worker_id))
            port += worker.data_parallel_size
    field = "metrics_port" if first is not None else "http_port or metrics_port"
    taken = [port for port, number in Counter(port for _, port, _ in wanted).items() if number > 1]
    if taken:
        raise ConfigError(f"{field}: port {taken[0]} is given to two services; leave room between them")
    for host, port, name in wanted:
        try:
            HeldPort(host, port).release()
        except OSError as error:
            what = f"{field}: /metrics of {name} cannot listen"
            raise ConfigError(f"{what} {listen_error(host, port, error, 'another')}") from None


def hold_port(host: str, port: int) -> HeldPort:
    """Reserves the router's port before it listens. Raises ConfigError if it cannot be bound."""
    try:
        return HeldPort(host, port)
    except OSError as error:
        raise ConfigError(f"cannot listen {listen_error(host, port, error, 'another with --port')}") from None


def listen_error(host: str, port: int, error: OSError, other: str) -> str:
    """The end of a message: the address, the cause and what to do. `other` names another port."""
    text = f"on {host} port {port}: {error.strerror or error}"
    if error.errno == errno.EADDRINUSE:
        return f"{text}; stop what listens there, or name {other}"
    if error.errno == errno.EACCES:
        return f"{text}; ports below 1024 need privileges: name {other}"
    return (
        f"{text}; {host} is not an address of this machine: use --host 127.0.0.1 (this machine alone) or "
        f"--host 0.0.0.0 (all its addresses)"
    )
