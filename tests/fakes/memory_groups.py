"""Control groups with a memory limit, as containers have, of either version. Making one takes the rights of root."""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.fakes.waiting import wait_until

CGROUP = Path("/sys/fs/cgroup")


class MemoryGroup:
    """A group without a limit at first."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._is_version_1 = (folder / "memory.limit_in_bytes").exists()

    def limit(self, num_bytes: int) -> None:
        """Limits memory, swap space included."""
        if not self._is_version_1:
            self._write("memory.max", num_bytes)
            with suppress(OSError):  # there is no swap space
                self._write("memory.swap.max", 0)
            return
        self._write("memory.limit_in_bytes", num_bytes)
        with suppress(OSError):
            self._write("memory.memsw.limit_in_bytes", num_bytes)

    def add(self, pid: int) -> None:
        """Moves a process with all its threads into the group. Memory that it has already counts where it was."""
        self._write("cgroup.procs", pid)

    @property
    def num_killed(self) -> int:
        """How many processes of the group the kernel has killed because of its limit."""
        events = self._folder / ("memory.oom_control" if self._is_version_1 else "memory.events")
        found = re.search(r"^oom_kill (\d+)", events.read_text(encoding="ascii"), re.MULTILINE)
        assert found is not None
        return int(found.group(1))

    def _write(self, name: str, value: int) -> None:
        (self._folder / name).write_text(str(value), encoding="ascii")


@contextmanager
def memory_group() -> Iterator[MemoryGroup]:
    """Removes the group at the end, when its processes have ended. Skips the test if none can be made here."""
    parent = CGROUP / "memory" if (CGROUP / "memory" / "memory.limit_in_bytes").exists() else CGROUP
    folder = parent / f"kvrelay-test-{uuid.uuid4().hex[:8]}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made: {error}")
    try:
        if not any((folder / name).exists() for name in ("memory.limit_in_bytes", "memory.max")):
            pytest.skip("control groups here have no memory limits")
        yield MemoryGroup(folder)
    finally:
        wait_until(lambda: _is_removed(folder))


def _is_removed(folder: Path) -> bool:
    try:
        os.rmdir(folder)
    except OSError:  # a process is still there
        time.sleep(0.05)
        return False
    return True
