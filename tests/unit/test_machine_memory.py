"""What a process knows of its machine: limits of memory, lent cores, suspended clocks, and collections of garbage."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay import machine_memory
from kvrelay.awake_clock import MAX_GAP_S, AwakeClock
from kvrelay.core_leases import GAP_LEASE_NS, INHERITED, STEP_LEASE_NS, CoreLeases, SharedLeases, leases_bytes
from kvrelay.machine_memory import available_memory_bytes, machine_memory_bytes, num_memory_kills
from kvrelay.process import deferred_collection

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


# -- cores that workers of one machine lend each other ---------------------------------------------------------------


class Machine:
    def __init__(self, num_cores: int, shares: list[int]) -> None:
        self.now_ns = 1_000
        self.threads = [0] * len(shares)
        memory = memoryview(bytearray(leases_bytes(len(shares))))
        self.workers = [
            CoreLeases(memory, number, num_cores, shares, self._setter(number), lambda: self.now_ns)
            for number in range(len(shares))
        ]

    def _setter(self, number: int):  # type: ignore[no-untyped-def]
        def set_num_threads(num_threads: int) -> None:
            self.threads[number] = num_threads

        return set_num_threads


def test_a_worker_alone_has_all_cores_and_two_have_their_shares() -> None:
    machine = Machine(4, [2, 2])
    prefill, decode = machine.workers
    prefill.begin_step()
    assert machine.threads == [4, 0]
    decode.begin_step()
    prefill.end_step()
    prefill.begin_step()  # the gap between two steps lends nothing
    assert machine.threads == [2, 2]
    prefill.end_step()
    prefill.end()
    decode.end_step()
    decode.begin_step()
    assert machine.threads == [2, 4]


def test_cores_of_a_worker_that_died_or_stands_still_are_lent() -> None:
    machine = Machine(2, [1, 1])
    dead, other = machine.workers
    dead.begin_step()
    machine.now_ns += STEP_LEASE_NS - 1
    other.begin_step()
    assert machine.threads[1] == 1
    machine.now_ns += 1
    other.begin_step()
    assert machine.threads[1] == 2
    dead.begin_step()
    dead.end_step()
    machine.now_ns += GAP_LEASE_NS
    other.begin_step()
    assert machine.threads[1] == 2


@given(st.lists(st.integers(1, 8), min_size=1, max_size=6), st.integers(-2, 9), st.data())
def test_steps_never_have_more_threads_than_cores(shares: list[int], spare: int, data: st.DataObject) -> None:
    """Nor fewer than a worker's share, even if the shares are more than there are."""
    num_cores = max(1, sum(shares) + spare)
    machine = Machine(num_cores, shares)
    busy = data.draw(st.sets(st.integers(0, len(shares) - 1), min_size=1))
    for number in range(len(shares)):
        machine.workers[number].begin_step()
        machine.workers[number].end_step()
        if number not in busy:
            machine.workers[number].end()
    for number in busy:
        machine.workers[number].begin_step()
    threads = [machine.threads[number] for number in busy]
    assert all(machine.threads[number] >= shares[number] for number in busy)
    assert sum(threads) <= max(num_cores, sum(shares[number] for number in busy))
    if len(busy) == 1:
        assert threads == [max(num_cores, *threads)]
    # Less than a thread of each is left over.
    assert sum(threads) > num_cores - len(busy) or sum(threads) >= num_cores


@pytest.mark.parametrize("has_memfd", [True, False])
def test_processes_share_the_leases(has_memfd: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_memfd:
        monkeypatch.setattr(os, "memfd_create", Mock(side_effect=OSError(errno.ENOSYS, "no")))
    shared = SharedLeases(2, [1, 1])
    threads: list[tuple[int, int]] = []
    workers = []
    for number in range(2):
        environ = shared.environ_of(number)
        environ[INHERITED] = environ[INHERITED].replace(str(shared.descriptor), str(os.dup(shared.descriptor)), 1)
        worker = CoreLeases.inherited(environ, lambda count, number=number: threads.append((number, count)))  # type: ignore[misc]
        assert worker is not None
        workers.append(worker)
    os.close(shared.descriptor)
    workers[0].begin_step()
    workers[1].begin_step()
    workers[0].end()
    workers[1].begin_step()
    assert threads == [(0, 2), (1, 1), (1, 2)]
    assert CoreLeases.inherited({}, lambda count: None) is None


# -- the clock of a process that may be suspended counts each interval once ------------------------------------------


times = st.lists(st.integers(0, 40).map(lambda tenths: 100.0 + tenths / 8), min_size=1, max_size=20)


@given(times)
def test_readings_in_any_order_count_each_interval_once(readings: list[float]) -> None:
    clock = AwakeClock()
    start, newest, elapsed = clock.read(readings[0]), readings[0], 0.0
    for now in readings[1:]:
        elapsed += min(max(0.0, now - newest), MAX_GAP_S)
        newest = max(newest, now)
        assert clock.read(now) - start == pytest.approx(elapsed)


def test_a_time_that_was_taken_earlier_changes_nothing() -> None:
    clock = AwakeClock()
    start = clock.read(10.0)
    for _ in range(100):
        clock.read(10.25)
        clock.read(10.0)
    assert clock.read(10.25) - start == 0.25


# -- garbage collection during imports and after the start of a service ----------------------------------------------


SETTLES = """
import gc
from kvrelay.process import deferred_collection, settle_garbage
with deferred_collection():
    before = gc.get_freeze_count()
settle_garbage()
assert before == 0 and gc.get_freeze_count() > 1000 and gc.isenabled()
"""


def test_nothing_is_collected_meanwhile() -> None:
    assert gc.isenabled()
    with deferred_collection():
        assert not gc.isenabled()
        with deferred_collection():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_what_a_start_made_is_never_scanned_again() -> None:
    subprocess.run([sys.executable, "-c", SETTLES], check=True)
