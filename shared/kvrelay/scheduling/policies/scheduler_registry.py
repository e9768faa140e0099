"""Schedulers by the name of their policy: the built-in policies, and those of other packages.

A package adds its own by an entry point in the group `kvrelay.schedulers`, which names a class that implements
`SchedulingPolicy`. It is called without arguments for every scheduler.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import cast

from kvrelay.kv.cache import Cache
from kvrelay.kv.pool import BlockPool
from kvrelay.scheduler_names import ENTRY_POINT_GROUP, UnknownScheduler, check_scheduler_name
from kvrelay.scheduling.policies.faster_transformer import FasterTransformerPolicy
from kvrelay.scheduling.policies.orca import OrcaPolicy
from kvrelay.scheduling.policies.sarathi import SarathiPolicy
from kvrelay.scheduling.policies.scheduling_policy import SchedulingPolicy
from kvrelay.scheduling.policies.simple_chunking import SimpleChunkingPolicy
from kvrelay.scheduling.policies.vllm import VllmPolicy
from kvrelay.scheduling.scheduler import Scheduler
from kvrelay.scheduling.scheduler_settings import SchedulerLimits, SchedulerSettings

BUILT_IN: dict[str, type[SchedulingPolicy]] = {
    "sarathi": SarathiPolicy,
    "vllm": VllmPolicy,
    "simple_chunking": SimpleChunkingPolicy,
    "orca": OrcaPolicy,
    "faster_transformer": FasterTransformerPolicy,
}


def find_policy(name: str) -> type[SchedulingPolicy]:
    """Returns the class of a policy. Other packages cannot replace a built-in name. Raises UnknownScheduler."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    found = list(entry_points(group=ENTRY_POINT_GROUP, name=check_scheduler_name(name)))
    if len(found) > 1:
        offers = ", ".join(entry_point.value for entry_point in found)
        raise UnknownScheduler(f"{name} is offered more than once: {offers}")
    return cast("type[SchedulingPolicy]", found[0].load())


def make_scheduler(
    name: str, limits: SchedulerLimits, pool: BlockPool, cache: Cache, settings: SchedulerSettings
) -> Scheduler:
    """Returns a scheduler with a policy and a block manager of its own. Raises UnknownScheduler."""
    policy = find_policy(name)()
    return Scheduler(policy, limits, policy.block_manager(pool, cache, limits.max_model_len), settings)
