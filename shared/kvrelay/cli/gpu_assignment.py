"""Assigns each worker of `kvrelay up` a GPU, or one for each of its ranks, and a share of their memory. Pure.

GPU: if each role has its own list, its workers use the list in turn; a worker of several ranks takes as many
neighbours. One list for both roles is divided so that the fullest GPU has as few workers as possible, with enough
GPUs for one worker of each role; ties give decode more GPUs. Prefill gets the first ones. All workers share GPUs that
are too few for that. GPUs beyond the number of workers, and those that are left over, are unused.

Share: a role may state the share of each of its workers. The rest of a GPU's total is divided equally among its other
workers, so the shares on a GPU add up to the total. A worker of several GPUs has the smallest of its shares on all.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

Role = Literal["prefill", "decode"]
ROLES: tuple[Role, ...] = ("prefill", "decode")
_ONE_RANK: Mapping[Role, int] = {"prefill": 1, "decode": 1}
_STEPS = 1_000_000  # resolution of a share, so that a flag can represent it exactly


class GpuAssignmentError(ValueError):
    """The workers cannot be assigned. The message names the field."""


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

    Raises GpuAssignmentError if GPUs are too few for a worker's ranks, or shares do not fit on one.
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
    """The GPUs of workers of `size` ranks. Raises GpuAssignmentError if there are too few for one."""
    if len(devices) < size:
        raise GpuAssignmentError(f"{role} workers have {size} ranks with a GPU each (named: {len(devices)})")
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
            raise GpuAssignmentError(
                f"{worker.role}_memory_utilization is needed: on device {device} {role} workers have pools of "
                f"an explicit size (num_blocks, kv_memory_bytes), so the rest is unknown"
            )
    total = shares.total[worker.role]
    others = sum(count for role, count in neighbours.items() if role not in shares.stated)
    share = math.floor((total - stated) / others * _STEPS) / _STEPS
    if share <= 0:
        raise GpuAssignmentError(
            f"memory_utilization = {total:g}: stated shares on device {device} take {stated:g}, which leaves "
            f"nothing for {worker.role}-{worker.number}"
        )
    return share


def _stated(device: str, neighbours: Mapping[Role, int], shares: MemoryShares) -> float:
    """The sum of stated shares on a device. Raises GpuAssignmentError if it exceeds 1."""
    here = {role: count for role, count in neighbours.items() if role in shares.stated}
    stated = math.fsum(shares.stated[role] * count for role, count in here.items())
    if stated > 1 + 1e-9:
        terms = (f"{count} x {role}_memory_utilization = {shares.stated[role]:g}" for role, count in here.items())
        raise GpuAssignmentError(f"{' and '.join(terms)} are {stated:g} of device {device} (allowed: at most 1)")
    return stated
