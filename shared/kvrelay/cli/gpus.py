"""`kvrelay up --gpus`: the GPUs of this machine, which workers get which, and what share of their memory.

GPUs are listed with `nvidia-smi -L`, without a CUDA context or torch, and identified by UUID, as in
CUDA_VISIBLE_DEVICES: nvidia-smi and CUDA number them differently (by PCI bus, and by speed unless configured), and MIG
instances have no number. A worker gets its GPU through CUDA_VISIBLE_DEVICES and sees it as its only one, `cuda`. So its
process cannot take memory of another GPU by mistake, MIG instances are named like GPUs, and MPS numbers the same GPUs.
The ranks of a worker see the GPUs of all of them; each takes the one of its number. UCX can still open the memory of a
peer's GPU that is not visible, because it uses UUIDs (openucx/ucx pull 4137).

GPU: if each role has its own list, its workers use the list in turn; a worker of several ranks takes as many
neighbours. One list for both roles is divided so that the fullest GPU has as few workers as possible, with enough
GPUs for one worker of each role; ties give decode more GPUs. Prefill gets the first ones. All workers share GPUs that
are too few for that. GPUs beyond the number of workers, and those that are left over, are unused.

Share: a role may state the share of each of its workers. The rest of a GPU's total is divided equally among its other
workers, so the shares on a GPU add up to the total. A worker of several GPUs has the smallest of its shares on all.
"""

from __future__ import annotations

import math
import re
import subprocess
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvrelay.config.loader import ConfigError
from kvrelay.config.up_config import UpConfig
from kvrelay.config.worker import Role, WorkerConfig

VISIBLE = "CUDA_VISIBLE_DEVICES"
TIMEOUT_S = 30.0
DEFAULT_UTILIZATION = 0.9
"""Default share of a GPU's memory. The rest is for the driver and other processes."""
ROLES: tuple[Role, ...] = ("prefill", "decode")
_ONE_RANK: Mapping[Role, int] = {"prefill": 1, "decode": 1}
_STEPS = 1_000_000  # resolution of a share, so that a flag can represent it exactly
_GPU = re.compile(r"^GPU (\d+): (.+) \(UUID: (GPU-[0-9a-fA-F-]+)\)\s*$")
_PART = re.compile(r"^\s+MIG (\S+)\s+Device\s+\d+: \(UUID: (MIG-[0-9a-zA-Z/-]+)\)\s*$")


class GpuError(ValueError):
    """The GPUs cannot be listed, or workers cannot be assigned to them. The message has the reason."""


# -- the GPUs of this machine -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU or a MIG instance."""

    uuid: str
    name: str
    number: int | None = None  # None: a MIG instance, named by UUID
    is_split: bool = False  # divided by MIG, so it cannot be used as a whole

    def __str__(self) -> str:
        """A name for messages, as in `GPU 0 (NVIDIA H100 80GB HBM3)`."""
        return f"{self.uuid if self.number is None else f'GPU {self.number}'} ({self.name})"


def list_gpus(environ: Mapping[str, str]) -> list[Gpu]:
    """GPUs visible to a process with this environment. Raises GpuError."""
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except FileNotFoundError:
        raise GpuError("nvidia-smi not found: there is no NVIDIA GPU, or no driver for it") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise GpuError(f"nvidia-smi -L failed: {error}") from None
    if done.returncode != 0:
        words = " ".join((done.stderr or done.stdout).split())
        raise GpuError(f"nvidia-smi -L ended with status {done.returncode}: {words[:300]}")
    return visible(read_listing(done.stdout), environ.get(VISIBLE))


def read_listing(text: str) -> list[Gpu]:
    """Parses `nvidia-smi -L`, which lists a GPU before its MIG instances."""
    found: list[Gpu] = []
    whole = 0
    for line in text.splitlines():
        if match := _GPU.match(line):
            whole = len(found)
            found.append(Gpu(match[3], match[2], int(match[1])))
        elif (match := _PART.match(line)) and found:
            found[whole] = replace(found[whole], is_split=True)
            found.append(Gpu(match[2], f"MIG {match[1]} of {found[whole].name}"))
    return found


def visible(gpus: Sequence[Gpu], wanted: str | None) -> list[Gpu]:
    """Applies CUDA_VISIBLE_DEVICES: the visible GPUs in its order, numbered from 0.

    As in CUDA, entries are numbers or UUID prefixes, and the first unknown entry ends the list.
    """
    if wanted is None:
        return list(gpus)
    left: list[Gpu] = []
    for entry in (each.strip() for each in wanted.split(",")):
        if entry.isdecimal():
            found = [gpu for gpu in gpus if gpu.number == int(entry)]
        else:
            found = [gpu for gpu in gpus if entry.startswith(("GPU-", "MIG-")) and gpu.uuid.startswith(entry)]
        if len(found) != 1:
            break
        number = None if found[0].number is None else len(left)
        left.append(replace(found[0], number=number))
    return left


# -- which worker gets which -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """The GPUs of worker `number` of a role, one for each rank."""

    role: Role
    number: int
    devices: tuple[str, ...]
    share: float | None = None  # share of the device's memory; None: the pool has an explicit size


@dataclass(frozen=True, slots=True)
class MemoryShares:
    """By role: the share of each worker (`stated`), or the `total` of a GPU from which the others get equal parts.

    A role in neither has pools with an explicit size and no shares.
    """

    total: Mapping[Role, float] = field(default_factory=dict)
    stated: Mapping[Role, float] = field(default_factory=dict)


def place(
    devices: Mapping[Role, Sequence[str]],
    counts: Mapping[Role, int],
    shares: MemoryShares,
    sizes: Mapping[Role, int] = _ONE_RANK,
) -> list[WorkerPlace]:
    """The place of each worker, prefill first. `devices`: from `divide`, or one list per role; `sizes`: ranks of each
    worker.

    Raises GpuError if GPUs are too few for a worker's ranks, or shares do not fit on one.
    """
    places = [
        WorkerPlace(role, number, groups[number % len(groups)])
        for role in ROLES
        if counts[role]
        for groups in [_groups(role, devices[role], sizes[role])]
        for number in range(counts[role])
    ]
    on: dict[str, Counter[Role]] = defaultdict(Counter)
    for each in places:
        for device in each.devices:
            on[device][each.role] += 1
    return [replace(each, share=_least_share(each, on, shares)) for each in places]


def _groups(role: Role, devices: Sequence[str], size: int) -> list[tuple[str, ...]]:
    """The GPUs of workers of `size` ranks. Raises GpuError if there are too few for one."""
    if len(devices) < size:
        raise GpuError(f"{role} workers have {size} ranks with a GPU each (named: {len(devices)})")
    return [tuple(devices[first : first + size]) for first in range(0, len(devices) - size + 1, size)]


def divide(
    devices: Sequence[str], counts: Mapping[Role, int], sizes: Mapping[Role, int] = _ONE_RANK
) -> dict[Role, Sequence[str]]:
    """Divides one list of at least one device between the roles, by the rule above. `sizes`: see `place`."""
    of_prefill, of_decode = sizes["prefill"], sizes["decode"]
    if len(devices) < of_prefill + of_decode or not counts["prefill"]:
        return {"prefill": devices, "decode": devices}

    def fullest(num_prefill: int) -> int:
        num_decode = len(devices) - num_prefill
        num_groups = (num_prefill // of_prefill, num_decode // of_decode)
        return max(math.ceil(counts["prefill"] / num_groups[0]), math.ceil(counts["decode"] / num_groups[1]))

    # min() returns the first of equals
    best = min(range(of_prefill, len(devices) - of_decode + 1, of_prefill), key=fullest)
    return {"prefill": devices[:best], "decode": devices[best:]}


def _least_share(worker: WorkerPlace, on: Mapping[str, Mapping[Role, int]], shares: MemoryShares) -> float | None:
    """The share of a worker on each of its GPUs. `on`: the workers of each role by GPU."""
    found = [_share(worker, device, on[device], shares) for device in worker.devices]
    return min((share for share in found if share is not None), default=None)


def _share(worker: WorkerPlace, device: str, neighbours: Mapping[Role, int], shares: MemoryShares) -> float | None:
    """The share of a worker on a device. `neighbours`: workers of each role there, including itself."""
    stated = _stated(device, neighbours, shares)
    if worker.role in shares.stated:
        return shares.stated[worker.role]
    if worker.role not in shares.total:
        return None
    for role in neighbours:
        if role not in shares.stated and role not in shares.total:
            raise GpuError(
                f"{worker.role}_memory_utilization is needed: on device {device} {role} workers have pools of "
                f"an explicit size (num_blocks, kv_memory_bytes), so the rest is unknown"
            )
    total = shares.total[worker.role]
    others = sum(count for role, count in neighbours.items() if role not in shares.stated)
    share = math.floor((total - stated) / others * _STEPS) / _STEPS
    if share <= 0:
        raise GpuError(
            f"memory_utilization = {total:g}: stated shares on device {device} take {stated:g}, which leaves "
            f"nothing for {worker.role}-{worker.number}"
        )
    return share


def _stated(device: str, neighbours: Mapping[Role, int], shares: MemoryShares) -> float:
    """The sum of stated shares on a device. Raises GpuError if it exceeds 1."""
    here = {role: count for role, count in neighbours.items() if role in shares.stated}
    stated = math.fsum(shares.stated[role] * count for role, count in here.items())
    if stated > 1 + 1e-9:
        terms = (f"{count} x {role}_memory_utilization = {shares.stated[role]:g}" for role, count in here.items())
        raise GpuError(f"{' and '.join(terms)} are {stated:g} of device {device} (allowed: at most 1)")
    return stated


# -- the workers' configurations ---------------------------------------------------------------------------------------


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
    except GpuError as error:
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
    except GpuError as error:
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
