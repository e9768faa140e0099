"""What every process tells of itself."""

from __future__ import annotations

import resource

from kvrelay.telemetry.readings import Readings, points


def process_readings() -> Readings:
    """CPU time of this process, all its threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {"process.cpu.time": points("cpu.mode", {"user": usage.ru_utime, "system": usage.ru_stime})}
