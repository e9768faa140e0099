"""Schedulers by name: the built-in policies, and those of other packages.

A package adds its own by an entry point in the group `kvrelay.schedulers`. The entry point names either a class that
implements `SchedulingPolicy`, which is called without arguments for every scheduler, or a `SchedulerFactory`, for a
scheduler that does not use `BatchScheduler`. Nothing is imported before it is chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, cast

from kvrelay.kv.cache import Cache
from kvrelay.kv.pool import BlockPool
from kvrelay.scheduler_names import ENTRY_POINT_GROUP, UnknownScheduler, check_scheduler_name
from kvrelay.scheduling.scheduler_protocol import Scheduler
from kvrelay.scheduling.scheduler_settings import SchedulerLimits, SchedulerSettings

if TYPE_CHECKING:
    from kvrelay.scheduling.policies.scheduling_policy import SchedulingPolicy

SchedulerFactory = Callable[[SchedulerLimits, BlockPool, Cache, SchedulerSettings], Scheduler]

BUILT_IN: dict[str, tuple[str, str]] = {
    "sarathi": ("kvrelay.scheduling.policies.sarathi", "SarathiPolicy"),
    "vllm": ("kvrelay.scheduling.policies.vllm", "VllmPolicy"),
    "simple_chunking": ("kvrelay.scheduling.policies.simple_chunking", "SimpleChunkingPolicy"),
    "orca": ("kvrelay.scheduling.policies.orca", "OrcaPolicy"),
    "faster_transformer": ("kvrelay.scheduling.policies.faster_transformer", "FasterTransformerPolicy"),
}


def find_scheduler(name: str) -> SchedulerFactory:
    """Returns the factory of a scheduler. Other packages cannot replace a built-in name. Raises UnknownScheduler."""
    if name in BUILT_IN:
        module, policy = BUILT_IN[name]
        return _factory_of(getattr(import_module(module), policy))
    found = list(entry_points(group=ENTRY_POINT_GROUP, name=check_scheduler_name(name)))
    if len(found) > 1:
        offers = ", ".join(entry_point.value for entry_point in found)
        raise UnknownScheduler(f"{name} is offered more than once: {offers}")
    return _factory_of(found[0].load())


def _factory_of(target: Any) -> SchedulerFactory:
    """Returns the factory itself, or one that makes a `BatchScheduler` with a new object of the policy class."""
    if not hasattr(target, "fill"):
        return cast(SchedulerFactory, target)
    # Imported here, because the planner and everything below it are not needed to list and check names.
    from kvrelay.scheduling.scheduler import BatchScheduler

    def make(limits: SchedulerLimits, pool: BlockPool, cache: Cache, settings: SchedulerSettings) -> Scheduler:
        return BatchScheduler.build(cast("SchedulingPolicy", target()), limits, pool, cache, settings)

    return make


def make_scheduler(
    name: str, limits: SchedulerLimits, pool: BlockPool, cache: Cache, settings: SchedulerSettings
) -> Scheduler:
    """Returns a scheduler with its block manager. Raises UnknownScheduler."""
    return find_scheduler(name)(limits, pool, cache, settings)
