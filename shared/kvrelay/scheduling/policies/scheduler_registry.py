"""Schedulers by name: the built-in ones, and those that other packages offer.

A package offers its own through the entry point group `kvrelay.schedulers`; the entry point leads to a callable such as
`BatchScheduler.build` of a subclass. Nothing is imported until it is chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import entry_points
from typing import cast

from kvrelay.kv.cache import Cache
from kvrelay.kv.pool import BlockPool
from kvrelay.scheduling.scheduler_protocol import Scheduler
from kvrelay.scheduling.scheduler_settings import SchedulerLimits, SchedulerSettings

ENTRY_POINT_GROUP = "kvrelay.schedulers"
DEFAULT_SCHEDULER = "sarathi"

SchedulerFactory = Callable[[SchedulerLimits, BlockPool, Cache, SchedulerSettings], Scheduler]

BUILT_IN: dict[str, tuple[str, str]] = {
    "sarathi": ("kvrelay.scheduling.policies.sarathi", "SarathiScheduler"),
    "vllm": ("kvrelay.scheduling.policies.vllm", "VllmScheduler"),
    "simple_chunking": ("kvrelay.scheduling.policies.simple_chunking", "SimpleChunkingScheduler"),
    "orca": ("kvrelay.scheduling.policies.orca", "OrcaScheduler"),
    "faster_transformer": ("kvrelay.scheduling.policies.faster_transformer", "FasterTransformerScheduler"),
}
WHOLE_PROMPTS = frozenset({"vllm", "orca", "faster_transformer"})
"""Built-in schedulers that do not cut prompts, so that `chunking` means nothing to them."""


class UnknownScheduler(ValueError):
    """A name that nobody offers a scheduler under."""


def scheduler_names() -> list[str]:
    """All names, the built-in ones first."""
    offered = {entry_point.name for entry_point in entry_points(group=ENTRY_POINT_GROUP)}
    return [*BUILT_IN, *sorted(offered - BUILT_IN.keys())]


def check_scheduler_name(name: str) -> str:
    """The name. Raises UnknownScheduler, naming those that there are."""
    names = scheduler_names()
    if name not in names:
        raise UnknownScheduler(f"must be one of {', '.join(names)}")
    return name


def find_scheduler(name: str) -> SchedulerFactory:
    """What makes a scheduler of this name; a built-in name cannot be taken over. Raises UnknownScheduler."""
    if name in BUILT_IN:
        module, scheduler = BUILT_IN[name]
        return cast(SchedulerFactory, getattr(import_module(module), scheduler).build)
    found = list(entry_points(group=ENTRY_POINT_GROUP, name=check_scheduler_name(name)))
    if len(found) > 1:
        offers = ", ".join(entry_point.value for entry_point in found)
        raise UnknownScheduler(f"{name} is offered more than once: {offers}")
    return cast(SchedulerFactory, found[0].load())


def make_scheduler(
    name: str, limits: SchedulerLimits, pool: BlockPool, cache: Cache, settings: SchedulerSettings
) -> Scheduler:
    """A scheduler with its block manager. Raises UnknownScheduler."""
    return find_scheduler(name)(limits, pool, cache, settings)
