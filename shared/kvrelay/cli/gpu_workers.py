"""`kvrelay up --gpus`: resolves device names to GPUs and writes them into the workers' configurations.

A worker gets its GPU through CUDA_VISIBLE_DEVICES by UUID and sees it as its only one, `cuda`. So its process cannot
take memory of another GPU by mistake, MIG instances are named like GPUs, and MPS numbers the same GPUs. The ranks of a
worker see the GPUs of all of them; each takes the one of its number. UCX can still
open the memory of a peer's GPU that is not visible, because it uses UUIDs (openucx/ucx pull 4137).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvrelay.cli.gpu_assignment import GpuAssignmentError, MemoryShares, Role, divide, place
from kvrelay.cli.gpus import Gpu, GpusUnknown
from kvrelay.config.loader import ConfigError
from kvrelay.config.up_config import UpConfig
from kvrelay.config.worker import WorkerConfig

DEFAULT_UTILIZATION = 0.9
"""Default share of a GPU's memory. The rest is for the driver and other processes."""


@dataclass(frozen=True, slots=True)
class AssignedGpus:
    """The GPUs of a worker, one for each rank, and its share of their memory (None: explicit pool size)."""

    gpus: tuple[Gpu, ...]
    share: float | None

    @property
    def visible(self) -> str:
        """The value of CUDA_VISIBLE_DEVICES for the worker."""
        return ",".join(gpu.uuid for gpu in self.gpus)

    def __str__(self) -> str:
        """For example `on GPU 0 (NVIDIA H100 80GB HBM3), 45% of its memory`."""
        whose = "its" if len(self.gpus) == 1 else "their"
        share = f", {100 * self.share:.4g}% of {whose} memory" if self.share is not None else ""
        return f"on {' and '.join(map(str, self.gpus))}{share}"


def place_workers(
    up: UpConfig, workers: Sequence[WorkerConfig], find_gpus: Callable[[], Sequence[Gpu]]
) -> tuple[list[WorkerConfig], dict[str, AssignedGpus]]:
    """Returns the configurations with device and share, and the GPUs by worker id. Raises ConfigError."""
    for worker in workers:
        _check_device(worker)
    try:
        gpus = find_gpus()
    except GpusUnknown as error:
        raise ConfigError(f"{_fields(up)}: {error}; without GPUs leave it out") from None
    counts: dict[Role, int] = {"prefill": up.prefill, "decode": up.decode}
    sizes: dict[Role, int] = {"prefill": 1, "decode": 1}
    sizes |= {worker.role: worker.num_processes for worker in workers}
    if up.gpus:
        devices = divide(_find("gpus", up.gpus, gpus), counts, sizes)
    else:
        devices = {
            "prefill": _find("prefill_gpus", up.prefill_gpus, gpus),
            "decode": _find("decode_gpus", up.decode_gpus, gpus),
        }
    try:
        places = place(devices, counts, _shares(up, workers), sizes)
    except GpuAssignmentError as error:
        raise ConfigError(f"{_fields(up)}: {error}") from None
    by_uuid = {gpu.uuid: gpu for gpu in gpus}
    placed = {
        worker.worker_id: AssignedGpus(tuple(by_uuid[device] for device in each.devices), each.share)
        for worker, each in zip(workers, places, strict=True)
    }
    return [_configured(worker, placed[worker.worker_id]) for worker in workers], placed


def _check_device(worker: WorkerConfig) -> None:
    if worker.backend == "simulated":
        raise ConfigError("gpus: backend = simulated uses no GPU: leave gpus out")
    if worker.device not in ("auto", "cuda"):
        raise ConfigError(
            f"device = {worker.device} beside gpus: a placed worker sees its GPU as cuda (allowed: auto, cuda)"
        )


def _find(field: str, names: Sequence[str], gpus: Sequence[Gpu]) -> list[str]:
    """Resolves names to UUIDs. Raises ConfigError for an unknown, repeated or MIG-divided GPU."""
    found: list[str] = []
    for name in names:
        gpu = next((each for each in gpus if name in (each.uuid, str(each.number))), None)
        if gpu is None:
            known = ", ".join(each.uuid if each.number is None else str(each.number) for each in gpus) or "none"
            raise ConfigError(f"{field}: there is no GPU {name} here (allowed: {known}, or their UUIDs)")
        if gpu.is_split:
            raise ConfigError(f"{field}: {gpu} is divided by MIG: name its parts, MIG-UUID as in `nvidia-smi -L`")
        if gpu.uuid in found:
            raise ConfigError(f"{field}: {name} names {gpu} twice")
        found.append(gpu.uuid)
    return found


def _shares(up: UpConfig, workers: Sequence[WorkerConfig]) -> MemoryShares:
    """Shares from the fields. Raises ConfigError if they exclude each other."""
    total: dict[Role, float] = {}
    stated: dict[Role, float] = {}
    own = {"prefill": up.prefill_memory_utilization, "decode": up.decode_memory_utilization}
    for worker in workers:
        sized = next((name for name in ("num_blocks", "kv_memory_bytes") if getattr(worker, name) is not None), None)
        share = own[worker.role]
        if share is not None and sized is not None:
            raise ConfigError(f"{worker.role}_memory_utilization excludes {sized}, which sets the pool's size")
        if share is not None:
            stated[worker.role] = share
        elif sized is None:
            total[worker.role] = worker.memory_utilization or DEFAULT_UTILIZATION
    if own["prefill"] is not None and not up.prefill:
        raise ConfigError("prefill_memory_utilization without prefill workers (prefill = 0)")
    return MemoryShares(total, stated)


def _configured(worker: WorkerConfig, placed: AssignedGpus) -> WorkerConfig:
    share = {} if placed.share is None else {"memory_utilization": placed.share}
    return worker.model_copy(update={"device": "cuda", **share})


def _fields(up: UpConfig) -> str:
    return "gpus" if up.gpus else "prefill_gpus, decode_gpus" if up.prefill else "decode_gpus"
