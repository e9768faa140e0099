"""What memory new processes and pages can take."""

from __future__ import annotations

from pathlib import Path

_MEMORY = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def available_memory_bytes() -> int:
    """Memory that new processes can take: of the machine, or of the control group if that is less."""
    fields = dict(line.split(":", 1) for line in _MEMORY.read_text(encoding="ascii").splitlines())
    available = sum(int(fields[name].split()[0]) << 10 for name in ("MemAvailable", "SwapFree"))
    try:
        limit = (_CGROUP / "memory.max").read_text(encoding="ascii").strip()
        used = int((_CGROUP / "memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return available
    return available if limit == "max" else max(0, min(available, int(limit) - used + _cache_of_group()))


def _cache_of_group() -> int:
    """Bytes of file cache that count as used by the control group and are freed on demand."""
    try:
        lines = (_CGROUP / "memory.stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return int(next((line.split()[1] for line in lines if line.startswith("inactive_file ")), 0))
