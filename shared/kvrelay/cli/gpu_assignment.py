"""Assigns each worker of `kvrelay up` a GPU and a share of its memory. Pure.

GPU: if each role has its own list, its workers use the list in turn. One list for both roles is divided so that the
fullest GPU has as few workers as possible, with at least one GPU per role; ties give decode more GPUs. Prefill gets the
first ones. All workers share a single GPU. GPUs beyond the number of workers are unused.

Share: a role may state the share of each of its workers. The rest of a GPU's total is divided equally among its other
workers, so the shares on a GPU add up to the total.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

Role = Literal["prefill", "decode"]
ROLES: tuple[Role, ...] = ("prefill", "decode")
_STEPS = 1_000_000  # resolution of a share, so that a flag can represent it exactly


class GpuAssignmentError(ValueError):
    """The workers cannot be assigned. The message names the field."""


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """The GPU of worker `number` of a role."""

    role: Role
    number: int
    device: str
    share: float | None = None  # share of the device's memory; None: the pool has an explicit size


@dataclass(frozen=True, slots=True)
class MemoryShares:
    """By role: the share of each worker (`stated`), or the `total` of a GPU from which the others get equal parts.

    A role in neither has pools with an explicit size and no shares.
    """

    total: Mapping[Role, float] = field(default_factory=dict)
    stated: Mapping[Role, float] = field(default_factory=dict)


def place(devices: Mapping[Role, Sequence[str]], counts: Mapping[Role, int], shares: MemoryShares) -> list[WorkerPlace]:
    """The place of each worker, prefill first. `devices`: from `divide`, or one list per role.

    Raises GpuAssignmentError if shares do not fit on a GPU.
    """
    places = [
        WorkerPlace(role, number, devices[role][number % len(devices[role])])
        for role in ROLES
        for number in range(counts[role])
    ]
    on: dict[str, Counter[Role]] = defaultdict(Counter)
    for each in places:
        on[each.device][each.role] += 1
    return [replace(each, share=_share(each, on[each.device], shares)) for each in places]


def divide(devices: Sequence[str], counts: Mapping[Role, int]) -> dict[Role, Sequence[str]]:
    """Divides one list of at least one device between the roles, by the rule above."""
    if len(devices) == 1 or not counts["prefill"]:
        return {"prefill": devices, "decode": devices}

    def fullest(num_prefill: int) -> int:
        num_decode = len(devices) - num_prefill
        return max(math.ceil(counts["prefill"] / num_prefill), math.ceil(counts["decode"] / num_decode))

    best = min(range(1, len(devices)), key=fullest)  # min() returns the first of equals
    return {"prefill": devices[:best], "decode": devices[best:]}


def _share(worker: WorkerPlace, neighbours: Mapping[Role, int], shares: MemoryShares) -> float | None:
    """The share of a worker. `neighbours`: workers of each role on its device, including itself."""
    stated = _stated(worker.device, neighbours, shares)
    if worker.role in shares.stated:
        return shares.stated[worker.role]
    if worker.role not in shares.total:
        return None
    for role in neighbours:
        if role not in shares.stated and role not in shares.total:
            raise GpuAssignmentError(
                f"{worker.role}_memory_utilization is needed: on device {worker.device} {role} workers have pools of "
                f"an explicit size (num_blocks, kv_memory_bytes), so the rest is unknown"
            )
    total = shares.total[worker.role]
    others = sum(count for role, count in neighbours.items() if role not in shares.stated)
    share = math.floor((total - stated) / others * _STEPS) / _STEPS
    if share <= 0:
        raise GpuAssignmentError(
            f"memory_utilization = {total:g}: stated shares on device {worker.device} take {stated:g}, which leaves "
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
