"""On which GPU each worker of `kvrelay up` computes, and which share of its memory it gets. Pure: names in, data out.

Which GPU. Where each role has a list of its own, the role's workers take turns on it. One list for both is divided
between the roles, each gets one GPU at least, so that the fullest GPU holds as few workers as can be; where that leaves
a choice, decode gets more of them. The first GPUs are prefill's. On a single GPU all workers share it. GPUs beyond the
number of workers stay unused.

Which share. A role may state what each of its workers gets. What that leaves of the total of a GPU is divided equally
among its other workers, so that the shares on a GPU add up to the total.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

Role = Literal["prefill", "decode"]
ROLES: tuple[Role, ...] = ("prefill", "decode")
_STEPS = 1_000_000  # of a share: as many digits as a flag carries


class GpuAssignmentError(ValueError):
    """Workers cannot be placed so; the text names the field."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where worker `number` of a role goes."""

    role: Role
    number: int
    device: str
    share: float | None = None  # of the device's memory; None: its pool has a size of its own


@dataclass(frozen=True, slots=True)
class MemoryShares:
    """By role: what a worker is given (`stated`), or the `total` of a GPU of which the others get equal parts.

    A role in neither has pools of a size of their own, and no shares.
    """

    total: Mapping[Role, float] = field(default_factory=dict)
    stated: Mapping[Role, float] = field(default_factory=dict)


def place(devices: Mapping[Role, Sequence[str]], counts: Mapping[Role, int], shares: MemoryShares) -> list[Place]:
    """Each worker's place, prefill's first. `devices`: as from `divide`.

    Raises GpuAssignmentError: shares that do not fit on a GPU.
    """
    places = [
        Place(role, number, devices[role][number % len(devices[role])])
        for role in ROLES
        for number in range(counts[role])
    ]
    on: dict[str, Counter[Role]] = defaultdict(Counter)
    for each in places:
        on[each.device][each.role] += 1
    return [replace(each, share=_share(each, on[each.device], shares)) for each in places]


def divide(devices: Sequence[str], counts: Mapping[Role, int]) -> dict[Role, Sequence[str]]:
    """One list of at least one device, divided between the roles; see the module's text."""
    if len(devices) == 1 or not counts["prefill"]:
        return {"prefill": devices, "decode": devices}

    def fullest(num_prefill: int) -> int:
        num_decode = len(devices) - num_prefill
        return max(math.ceil(counts["prefill"] / num_prefill), math.ceil(counts["decode"] / num_decode))

    best = min(range(1, len(devices)), key=fullest)  # the first of equals
    return {"prefill": devices[:best], "decode": devices[best:]}


def _share(worker: Place, neighbours: Mapping[Role, int], shares: MemoryShares) -> float | None:
    """`neighbours`: how many of each role are on the worker's device, itself included."""
    stated = _stated(worker.device, neighbours, shares)
    if worker.role in shares.stated:
        return shares.stated[worker.role]
    if worker.role not in shares.total:
        return None
    for role in neighbours:
        if role not in shares.stated and role not in shares.total:
            raise GpuAssignmentError(
                f"{worker.role}_memory_utilization is needed: on device {worker.device} pools of {role} workers have a "
                f"size of their own (num_blocks, kv_memory_bytes), so nobody knows what is left to share"
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
    """What is stated on a device, at most all of it."""
    here = {role: count for role, count in neighbours.items() if role in shares.stated}
    stated = math.fsum(shares.stated[role] * count for role, count in here.items())
    if stated > 1 + 1e-9:
        terms = (f"{count} x {role}_memory_utilization = {shares.stated[role]:g}" for role, count in here.items())
        raise GpuAssignmentError(f"{' and '.join(terms)} are {stated:g} of device {device} (allowed: at most 1)")
    return stated
