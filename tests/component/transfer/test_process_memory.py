"""Writes of many runs into another process's memory, against numpy and against a process that reads its own."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvrelay.handoff.transports.process_memory import Addresses, ProcessMemory
from kvrelay.process_identity import identity_of, own_identity

pytestmark = [pytest.mark.component, pytest.mark.skipif(sys.platform != "linux", reason="needs process_vm_writev")]

SIZE = 1 << 16
MAPPING = """
import mmap, sys
import numpy as np
file = open(sys.argv[1], "r+b")
memory = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)
print(memory.ctypes.data, flush=True)
sys.stdin.read()
"""


@pytest.fixture(params=[True, False], ids=["pidfd", "no pidfd"])
def _pidfd(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to find that a process has ended."""
    if request.param:
        return

    def refuse(process_id: int) -> int:
        raise OSError(errno.ENOSYS, "no such system call")

    monkeypatch.setattr(os, "pidfd_open", refuse)


@contextmanager
def process_with(path: Path) -> Iterator[tuple[subprocess.Popen[str], str, int]]:
    """A process that has mapped a file, its identity, and the address there."""
    command = [sys.executable, "-c", MAPPING, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process, identity_of(process.pid), int(process.stdout.readline())
        process.kill()


def addresses(first: int, rows: np.ndarray, num_bytes: int) -> Addresses:
    return np.uint64(first) + rows.astype(np.uint64) * np.uint64(num_bytes)


@pytest.mark.parametrize("seed", range(12))
def test_runs_land_where_numpy_puts_them(seed: int) -> None:
    """Scattered ones, neighbours on one side or both, and more than one system call takes."""
    random = np.random.default_rng(seed)
    num_bytes = int(random.integers(1, 17))
    num_rows = SIZE // num_bytes
    count = int(random.choice([0, 1, 2, 1023, 1024, 1025, 3000]))
    orders = [random.permutation(num_rows)[:count], np.arange(count) + random.integers(0, num_rows - count)]
    sources, targets = orders[seed & 1], orders[seed >> 1 & 1]
    source, target = random.integers(0, 256, SIZE, np.uint8), np.zeros(SIZE, np.uint8)
    expected = np.zeros_like(target)
    used = num_rows * num_bytes
    expected[:used].reshape(num_rows, num_bytes)[targets] = source[:used].reshape(num_rows, num_bytes)[sources]
    memory = ProcessMemory(own_identity())
    memory.write(
        addresses(source.ctypes.data, sources, num_bytes),
        addresses(target.ctypes.data, targets, num_bytes),
        num_bytes,
    )
    assert np.array_equal(target, expected)
    memory.close()


@pytest.mark.usefixtures("_pidfd")
def test_another_process_has_the_bytes_and_an_ended_one_takes_none(tmp_path: Path) -> None:
    path = tmp_path / "memory"
    path.write_bytes(bytes(SIZE))
    source = np.random.default_rng(0).integers(0, 256, SIZE, np.uint8)
    rows = np.arange(0, SIZE // 16, 2)
    with process_with(path) as (process, identity, address):
        there, here = addresses(address, rows, 16), addresses(source.ctypes.data, rows, 16)
        memory = ProcessMemory(identity)
        try:
            memory.write(here, there, 16)
        except PermissionError as error:
            pytest.skip(f"this machine forbids it: {error}")
        found = np.frombuffer(path.read_bytes(), np.uint8).reshape(-1, 16)
        assert np.array_equal(found[::2], source.reshape(-1, 16)[::2])
        assert not found[1::2].any()
        machine, number, started = identity.split("/")
        with pytest.raises(ProcessLookupError):
            ProcessMemory(f"{machine}/{number}/{int(started) + 1}")
        process.kill()
        process.wait()
        with pytest.raises(ProcessLookupError):
            memory.write(here, there, 16)
        with pytest.raises(ProcessLookupError):
            ProcessMemory(identity)
        memory.close()


@pytest.mark.usefixtures("_pidfd")
def test_a_closed_one_leaves_no_file_open() -> None:
    one = np.zeros(16, np.uint8)
    where = addresses(one.ctypes.data, np.arange(1), 16)
    before = os.listdir("/proc/self/fd")
    memory = ProcessMemory(own_identity())
    memory.close()
    memory.close()
    assert os.listdir("/proc/self/fd") == before
    with pytest.raises(ProcessLookupError):
        memory.write(where, where, 16)


@pytest.mark.parametrize("position", [0, 3, 1500, 1999])
def test_an_address_without_memory_is_an_error(position: int) -> None:
    source, target = np.ones(SIZE, np.uint8), np.zeros(SIZE, np.uint8)
    rows = np.arange(0, 4000, 2)
    targets = addresses(target.ctypes.data, rows, 16)
    targets[position] = 4096
    memory = ProcessMemory(own_identity())
    with pytest.raises(OSError, match="process_vm_writev"):
        memory.write(addresses(source.ctypes.data, rows, 16), targets, 16)
    memory.close()


@pytest.mark.parametrize("process", ["", "nothing", "elsewhere:pid:[1]/1/1"])
def test_a_process_that_cannot_be_seen_is_an_error(process: str) -> None:
    with pytest.raises(ProcessLookupError):
        ProcessMemory(process)
