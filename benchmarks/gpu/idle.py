"""When the device did nothing, from a trace of what it did."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True)
class Activity:
    """A kernel or a copy on the device, in microseconds; `ends_step`: the copy that brings a step's tokens."""

    start: float
    end: float
    ends_step: bool = False


@dataclass(frozen=True)
class Idleness:
    """Shares of the time from the first activity to the last one."""

    between_steps: float
    within_steps: float
    num_steps: int


def idleness(activities: Iterable[Activity]) -> Idleness:
    """Gaps that follow a copy of a step's tokens are between steps, all others within one.

    Raises:
        ValueError: there was no activity.
    """
    ordered = sorted(activities, key=lambda activity: activity.start)
    if not ordered:
        raise ValueError("the trace has no activity of the device")
    between = within = 0.0
    num_steps = 0
    latest = ordered[0]
    for activity in ordered[1:]:
        gap = max(0.0, activity.start - latest.end)
        if latest.ends_step:
            between += gap
            num_steps += 1
        else:
            within += gap
        latest = max(latest, activity, key=lambda each: each.end)
    total = latest.end - ordered[0].start
    return Idleness(between / total, within / total, num_steps) if total > 0 else Idleness(0.0, 0.0, num_steps)


def make_profiler(activity: ProfilerActivity = ProfilerActivity.CUDA) -> profile:
    """Of all threads: steps run on one of their own."""
    try:
        config = _ExperimentalConfig(profile_all_threads=True)
    except TypeError:  # of torch before 2.7
        config = None
    return profile(activities=[activity], experimental_config=config)


def device_activities(profiler: profile) -> list[Activity]:
    """What a profiler saw of the GPU."""
    return [
        Activity(event.time_range.start, event.time_range.end, "Memcpy DtoH" in event.name)
        for event in _device_events(profiler)
    ]


def kernel_times(profiler: profile) -> list[tuple[str, float]]:
    """Name and seconds of each kernel and copy that a profiler saw on the GPU."""
    return [(event.name, 1e-6 * (event.time_range.end - event.time_range.start)) for event in _device_events(profiler)]


def _device_events(profiler: profile) -> list[Any]:
    return [event for event in profiler.events() or () if event.device_type.name == "CUDA"]
