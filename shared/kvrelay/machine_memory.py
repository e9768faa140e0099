"""The memory available to new processes and pages: of the machine, or of the control groups that limit this process.

In a container the limits are those of its own group, at the root of the mount. Elsewhere `/proc/self/cgroup` names the
group, and each group above it limits it too. Both versions of control groups are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

_MEMORY = Path("/proc/meminfo")
_GROUPS = Path("/proc/self/cgroup")
_CGROUP = Path("/sys/fs/cgroup")
_VMSTAT = Path("/proc/vmstat")
_STATUS = Path("/proc/self/status")


class _Files(NamedTuple):
    """What a version of control groups calls its files, and the file cache in `memory.stat`, groups below included."""

    limit: str
    used: str
    cache: str


_VERSION_1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = _Files("memory.max", "memory.current", "inactive_file")


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """Of a control group, in bytes. `used` is without file cache that the kernel frees on demand."""

    limit: int
    used: int


def machine_memory_bytes() -> int:
    """The machine's memory, or the least limit of a control group if that is less."""
    return min([_meminfo("MemTotal"), *(group.limit for group in memory_limits())])


def available_memory_bytes() -> int:
    """Memory that new processes can take: of the machine, or of a control group if that is less."""
    available = _meminfo("MemAvailable", "SwapFree")
    return max(0, min([available, *(group.limit - group.used for group in memory_limits())]))


def own_memory_bytes() -> int:
    """The memory of this process that the kernel cannot drop, as it can pages of files. 0 if it does not say."""
    try:
        lines = _STATUS.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


def num_memory_kills() -> int:
    """How many processes of the machine the kernel has killed because memory, or that of a control group, ran out. 0 if
    it does not say."""
    try:
        lines = _VMSTAT.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return int(next((line.split()[1] for line in lines if line.startswith("oom_kill ")), 0))


def memory_limits() -> list[MemoryLimit]:
    """The limits of the control groups that this process is in. A group without a limit is left out."""
    found = (_read_limit(folder, files) for folder, files in _folders())
    return [limit for limit in found if limit is not None]


def _folders() -> Iterator[tuple[Path, _Files]]:
    """The folders of all groups of this process, its own one first."""
    try:
        lines = _GROUPS.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    paths = {tuple(controllers.split(",")): path for _, controllers, path in (line.split(":", 2) for line in lines)}
    of_memory = next((path for controllers, path in paths.items() if "memory" in controllers), "/")
    yield from _up_from(_CGROUP / "memory", of_memory, _VERSION_1)
    yield from _up_from(_CGROUP, paths.get(("",), "/"), _VERSION_2)


def _up_from(root: Path, path: str, files: _Files) -> Iterator[tuple[Path, _Files]]:
    """From the group `path` up to the root of the mount. In a container the path may be the host's: then only the root,
    which is the container's own group, exists."""
    group = PurePosixPath(path.lstrip("/"))
    for each in (group, *group.parents):
        yield root / each, files


def _read_limit(folder: Path, files: _Files) -> MemoryLimit | None:
    try:
        limit = (folder / files.limit).read_text(encoding="ascii").strip()
        used = int((folder / files.used).read_text(encoding="ascii"))
        if limit == "max":
            return None
        return MemoryLimit(int(limit), used - _cache(folder, files))
    except (OSError, ValueError):
        return None


def _cache(folder: Path, files: _Files) -> int:
    try:
        lines = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return int(next((line.split()[1] for line in lines if line.startswith(f"{files.cache} ")), 0))


def _meminfo(*names: str) -> int:
    """The sum of these fields, in bytes."""
    fields = dict(line.split(":", 1) for line in _MEMORY.read_text(encoding="ascii").splitlines())
    return sum(int(fields[name].split()[0]) << 10 for name in names)
