"""Limits of control groups: found for this process and the groups above it, in both versions, in containers or not."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrelay import machine_memory
from kvrelay.machine_memory import available_memory_bytes, machine_memory_bytes, num_memory_kills

KIB, MIB = 1 << 10, 1 << 20
UNLIMITED = 9223372036854771712
"""What version 1 says of a group without a limit."""


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 9 MiB, 5 of which are available, and no groups."""
    (tmp_path / "meminfo").write_text("MemTotal: 9216 kB\nMemAvailable:  4096 kB\nSwapFree: 1024 kB\n")
    (tmp_path / "self").write_text("0::/\n")
    (tmp_path / "cgroup").mkdir()
    monkeypatch.setattr(machine_memory, "_MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(machine_memory, "_GROUPS", tmp_path / "self")
    monkeypatch.setattr(machine_memory, "_CGROUP", tmp_path / "cgroup")
    return tmp_path / "cgroup"


def version_1(folder: Path, limit: int, used: int, cache: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"inactive_file 7\ntotal_inactive_file {cache}\n")


def version_2(folder: Path, limit: int | str, used: int, cache: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cache}\n")


def found() -> tuple[int, int]:
    return machine_memory_bytes() // KIB, available_memory_bytes() // KIB


def test_without_groups_it_is_the_machine_s(groups: Path) -> None:
    assert found() == (9216, 5120)
    (groups.parent / "self").unlink()
    assert found() == (9216, 5120)


def test_the_group_of_a_container_is_the_root_of_the_mount(groups: Path) -> None:
    version_2(groups, "max", 3 * MIB)
    assert found() == (9216, 5120)
    version_2(groups, 4 * MIB, 3 * MIB)
    assert found() == (4096, 1024)
    version_2(groups, 4 * MIB, 3 * MIB, cache=1 * MIB)
    assert found() == (4096, 2048)


def test_version_1(groups: Path) -> None:
    (groups.parent / "self").write_text("10:memory:/\n1:name=systemd:/\n0::/\n")
    version_1(groups / "memory", UNLIMITED, 3 * MIB)
    assert found() == (9216, 5120)
    version_1(groups / "memory", 4 * MIB, 3 * MIB, cache=1 * MIB)
    assert found() == (4096, 2048)


def test_version_1_in_a_container_that_sees_the_path_of_the_host(groups: Path) -> None:
    (groups.parent / "self").write_text("10:cpu,memory:/docker/0123\n0::/\n")
    version_1(groups / "memory", 4 * MIB, 3 * MIB)
    assert found() == (4096, 1024)


@pytest.mark.parametrize(("line", "root"), [("0::/machine/service", ""), ("4:memory:/machine/service", "memory")])
def test_every_group_above_counts(groups: Path, line: str, root: str) -> None:
    (groups.parent / "self").write_text(f"{line}\n")
    write = version_1 if root else version_2
    write(groups / root / "machine/service", 8 * MIB, 5 * MIB)
    write(groups / root / "machine", 7 * MIB, 6 * MIB)
    assert found() == (7168, 1024)
    write(groups / root / "machine/service", 6 * MIB, 6 * MIB + KIB)  # more than its limit, which was lowered
    assert found() == (6144, 0)


def test_files_that_cannot_be_understood_are_left_out(groups: Path) -> None:
    version_2(groups, "many", 3)
    assert found() == (9216, 5120)


def test_kills_of_the_kernel_are_counted_if_it_says_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_memory, "_VMSTAT", tmp_path / "vmstat")
    assert num_memory_kills() == 0
    (tmp_path / "vmstat").write_text("nr_free_pages 5\n")
    assert num_memory_kills() == 0
    (tmp_path / "vmstat").write_text("nr_free_pages 5\noom_kill 3\n")
    assert num_memory_kills() == 3
