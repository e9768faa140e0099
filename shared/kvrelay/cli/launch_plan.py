"""The flags of `kvrelay up`, and the services that it starts with the configuration of each."""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvrelay.cli.gpus import ROLES, VISIBLE, AssignedGpus, Gpu, list_gpus, place_workers
from kvrelay.config.common import CommonConfig, is_wildcard
from kvrelay.config.loader import (
    ConfigError,
    add_config_flag,
    add_flags,
    check_up_file,
    config_path,
    flag_name,
    resolve,
)
from kvrelay.config.router import RouterConfig
from kvrelay.config.up_config import UpConfig
from kvrelay.config.without_effect import ADVICE, DECIDED
from kvrelay.config.worker import WorkerConfig
from kvrelay.flag_parser import FlagParser

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """The services to start, checked before any starts. `workers`: one configuration per worker process. `placed`: GPUs
    by worker id."""

    up: UpConfig
    router: RouterConfig
    workers: Sequence[WorkerConfig]
    router_flags: Sequence[str]
    worker_flags: Sequence[str]
    placed: Mapping[str, AssignedGpus]
    lending: tuple[str, ...] = ()  # ids of the workers that lend each other cores

    @property
    def url(self) -> str:
        """Base URL for clients on this machine."""
        host = LOOPBACK if is_wildcard(self.up.host) else self.up.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.up.port}"

    def flags_of(self, worker: WorkerConfig) -> list[str]:
        """Flags that give the worker's process this configuration."""
        argv = [*self.worker_flags, f"--worker-id={worker.worker_id}", f"--threads={worker.threads}"]
        argv += [f"--num-workers={worker.num_workers}", f"--tensor-parallel-size={worker.tensor_parallel_size}"]
        argv.append(f"--pipeline-parallel-size={worker.pipeline_parallel_size}")
        argv.append(f"--data-parallel-size={worker.data_parallel_size}")
        if worker.memory_utilization is not None:
            argv.append(f"--memory-utilization={worker.memory_utilization:.6f}")
        if worker.worker_id in self.placed:
            argv.append(f"--device={worker.device}")
        return argv

    def environ_of(self, worker: WorkerConfig) -> dict[str, str]:
        """Additional environment of the worker's process."""
        environ = {"OMP_NUM_THREADS": str(worker.threads)}
        if (placed := self.placed.get(worker.worker_id)) is not None:
            environ[VISIBLE] = placed.visible
        return environ


def make_plan(
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
    find_gpus: Callable[[Mapping[str, str]], Sequence[Gpu]] = list_gpus,
) -> LaunchPlan:
    """Resolves every process's configuration exactly as the process will. Raises ConfigError.

    Calls `find_gpus` with the environment only if workers are assigned to GPUs.
    """
    own = resolve(UpConfig, flags, environ)
    if (path := config_path(flags, environ)) is not None:
        check_up_file(path)
    # Two instances on one Redis must not have equal worker ids.
    suffix = f"-{secrets.token_hex(2)}" if own.redis_url else ""
    passed = {name: value for name, value in flags.items() if name not in UpConfig.model_fields}
    decided = {"host": LOOPBACK, "advertise_host": LOOPBACK}
    if own.redis_url:
        decided["redis_url"] = own.redis_url
    shared: dict[str, Any] = {**passed, **decided, "port": 0, "transfer_port": 0, "rank_host": LOOPBACK, "rank_port": 0}
    workers = []
    sizes = (own.prefill, own.prefill_tensor_parallel_size), (own.decode, own.decode_tensor_parallel_size)
    for role, (num_workers, size) in zip(ROLES, sizes, strict=True):
        if not num_workers:
            continue
        values = shared if size is None else {**shared, "tensor_parallel_size": size}
        # Its `num_workers` is the most workers of a process.
        each = resolve(WorkerConfig, {**values, "worker_id": role}, environ, role=role)
        for number, num_here in enumerate(_shared_out(num_workers, each.num_workers)):
            own_fields = {"worker_id": f"{role}-{number}{suffix}", "num_workers": num_here}
            workers.append(resolve(WorkerConfig, {**values, **own_fields}, environ, role=role))
    lending = tuple(each.worker_id for each in workers if _computes_here(each))
    workers = _with_threads(workers)
    placed: dict[str, AssignedGpus] = {}
    if own.places_workers:
        workers, placed = place_workers(own, workers, lambda: find_gpus(environ))
        lending = ()
    else:
        workers = [_with_part_of_memory(worker, len(workers)) for worker in workers]
    router_values = {**passed, **decided, "host": own.host, "port": own.port, "router_id": f"router{suffix}"}
    router_values |= {"message_host": LOOPBACK, "message_port": 0}
    if own.metrics_port is not None:
        router_values["metrics_port"] = own.metrics_port
    router = resolve(RouterConfig, router_values, environ)
    _check_services(own, router, workers)
    argvs = to_argv(router_values, RouterConfig), to_argv(shared, WorkerConfig)
    return LaunchPlan(own, router, workers, *argvs, placed, lending if len(lending) > 1 else ())


def _check_services(own: UpConfig, router: RouterConfig, workers: Sequence[WorkerConfig]) -> None:
    """Raises ConfigError for values of the services that could have no effect, or only for one of them."""
    if router.redis_password_file is not None and own.redis_url is None:
        raise ConfigError(
            "redis_password_file needs redis_url: without one, kvrelay up starts a Redis with a password of its own"
        )
    ports = [worker.http_port for worker in workers if worker.http_port]
    if ports and (own.metrics_port is not None or len(set(ports)) < len(ports)):
        raise ConfigError(
            f"http_port = {ports[0]}: each worker needs a port of its own; leave it out and set metrics_port "
            f"of kvrelay up, from which the services count their ports"
        )


def _computes_here(worker: WorkerConfig) -> bool:
    """Its steps run on cores of this machine, of which it is free to use any number."""
    return not worker.threads and worker.num_processes == 1 and worker.backend != "simulated"


def _with_part_of_memory(worker: WorkerConfig, num_processes: int) -> WorkerConfig:
    """Divides `memory_utilization`, since all workers share one machine, or the one GPU of `device`."""
    if worker.memory_utilization is None:
        return worker
    share = math.floor(worker.memory_utilization / num_processes * 1e6) / 1e6
    return worker.model_copy(update={"memory_utilization": share})


def _with_threads(workers: Sequence[WorkerConfig]) -> list[WorkerConfig]:
    """Divides the cores among all processes that compute: workers and their ranks. `threads` are of each."""
    num_cores = len(os.sched_getaffinity(0))
    num_ranks = sum(worker.num_processes for worker in workers)
    threads = max(1, num_cores // num_ranks)
    return [worker if worker.threads else worker.model_copy(update={"threads": threads}) for worker in workers]


def _shared_out(num_workers: int, per_process: int) -> list[int]:
    """Number of workers per process; all but the last are full."""
    return [min(per_process, num_workers - first) for first in range(0, num_workers, per_process)]


def to_argv(values: Mapping[str, Any], config_class: type[CommonConfig]) -> list[str]:
    """Flags for these values. The Redis URL is passed in the environment, since it contains a password."""
    argv = [f"--config={values['config']}"] if "config" in values else []
    for name, value in values.items():
        if name not in config_class.model_fields or name == "redis_url":
            continue
        flag = flag_name(name)
        if isinstance(value, bool):
            argv.append(flag if value else flag.replace("--", "--no-", 1))
        elif isinstance(value, list | tuple):
            argv += [f"{flag}={each}" for each in value]
        else:
            argv.append(f"{flag}={value}")
    return argv


_SOURCES = (UpConfig, CommonConfig, WorkerConfig, RouterConfig)
COMMON_GROUPS: dict[str, tuple[str, ...]] = {
    "model": ("model", "served_model_name", "dtype", "max_model_len"),
    "workers": ("prefill", "decode", "tensor_parallel_size", "gpus", "device"),
    "memory and batches": ("kv_memory_bytes", "memory_utilization", "token_budget", "max_running"),
    "endpoint": ("host", "port", "api_keys_file", "redis_url", "metrics_port"),
    "logs and configuration": ("detach", "state_dir", "log_level"),
}
"""Fields that `kvrelay up --help` shows."""
OWN_FIELDS = frozenset(
    {*DECIDED, "static_workers", "port", "host", "redis_url", "http_port", "local_ranks", "metrics_port"}
)
"""Fields of services that `up` sets itself, or that would be the same for all its services."""


def parse_up_flags(argv: Sequence[str] | None) -> dict[str, Any]:
    """The given values by field. Exits the process for `--help` and for invalid flags."""
    parser = up_parser()
    flags = vars(parser.parse(argv))
    model = flags.pop("MODEL", None)
    if model is not None and flags.setdefault("model", model) != model:
        parser.error(f"two models: {model} and --model {flags['model']}")
    return flags


def up_parser() -> FlagParser:
    parser = FlagParser(
        "kvrelay up",
        "Starts Redis, prefill and decode workers and the router on this machine, and stops them together.",
        usage="kvrelay up [MODEL] [flags]",
        advice=ADVICE,
        with_version=True,
    )
    parser.add_argument("MODEL", nargs="?", help="the same as --model")
    common: set[str] = set()
    for title, names in COMMON_GROUPS.items():
        group = parser.add_argument_group(title)
        for name in names:
            owner = next(each for each in _SOURCES if name in each.model_fields)
            add_flags(group, owner, frozenset(owner.model_fields) - {name})
        common |= set(names)
    add_config_flag(group)
    add_flags(parser.add_further_group("services"), UpConfig, frozenset(common))
    add_flags(parser.add_further_group("all services"), CommonConfig, OWN_FIELDS | common)
    common |= set(CommonConfig.model_fields)
    add_flags(parser.add_further_group("every worker"), WorkerConfig, OWN_FIELDS | common)
    skip = OWN_FIELDS | common | set(WorkerConfig.model_fields)
    add_flags(parser.add_further_group("the router"), RouterConfig, skip)
    return parser
