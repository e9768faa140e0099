"""Metric samples that every process reports."""

from __future__ import annotations

import resource

from kvrelay.telemetry.metric_samples import MetricSamples, samples_by


def process_samples() -> MetricSamples:
    """CPU time of all threads of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {"process.cpu.time": samples_by("cpu.mode", {"user": usage.ru_utime, "system": usage.ru_stime})}
