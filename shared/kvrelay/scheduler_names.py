"""The names of schedulers: the built-in ones, and those that other packages offer as entry points."""

from __future__ import annotations

from importlib.metadata import entry_points

ENTRY_POINT_GROUP = "kvrelay.schedulers"
DEFAULT_SCHEDULER = "sarathi"
BUILT_IN_SCHEDULERS = ("sarathi", "vllm", "simple_chunking", "orca", "faster_transformer")
WHOLE_PROMPTS = frozenset({"vllm", "orca", "faster_transformer"})
"""Built-in schedulers that do not cut prompts, so that `chunking` means nothing to them."""


class UnknownScheduler(ValueError):
    """Raised for a name without a scheduler."""


def scheduler_names() -> list[str]:
    """Returns all names, the built-in ones first."""
    offered = {entry_point.name for entry_point in entry_points(group=ENTRY_POINT_GROUP)}
    return [*BUILT_IN_SCHEDULERS, *sorted(offered.difference(BUILT_IN_SCHEDULERS))]


def check_scheduler_name(name: str) -> str:
    """Returns the name. Raises UnknownScheduler, which lists all names."""
    if name in BUILT_IN_SCHEDULERS:
        return name  # reading the entry points of all packages takes 20 ms
    names = scheduler_names()
    if name not in names:
        raise UnknownScheduler(f"must be one of {', '.join(names)}")
    return name
