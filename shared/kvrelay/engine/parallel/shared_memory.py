"""Collectives of the ranks of one machine through memory that they share (backends/cpu_ranks.c).

Gloo wakes threads of its own on both sides, so a sum of one token's activations takes it 0.3 ms and more. Here ranks
spin for each other for up to 0.1 ms, and sleep only then.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import mmap
import os
import struct
import tempfile
from collections.abc import Callable
from contextlib import suppress
from ctypes import c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvrelay.backends.cpu_build import KernelBuildError, load_kernel
from kvrelay.engine.fused.weights import DTYPES

_log = logging.getLogger(__name__)
_DIRECTORY = Path("/dev/shm")
_SLOT_BYTES = 1 << 20
"""Of each rank, twice. Larger tensors take several turns."""
_WAIT_MS = 100
"""Time between looks at whether the other ranks still live."""
_LOCK = "hhqqi"
"""C's `struct flock`: type, whence, start, length, process."""


class SharedMemoryUnusable(RuntimeError):
    """Ranks cannot share memory here. The message says why."""


class RankEnded(RuntimeError):
    """A rank's process has ended in the middle of a collective."""


_GoesOn = ctypes.CFUNCTYPE(c_int64)


@dataclass(frozen=True, slots=True)
class RanksInC:
    """What C needs to sum over ranks by itself: the address of a `Ranks` of cpu_ranks.c, a function that it calls every
    `wait_ms` while it waits for others, and which returns 0 to end the wait."""

    ranks: int
    wait_ms: int
    goes_on: Any


class _Ranks(ctypes.Structure):
    _fields_ = [
        ("memory", c_void_p),
        *((name, c_int64) for name in ("rank", "size", "slot_bytes", "turn", "is_written", "at")),
    ]


class SharedMemory:
    """One rank's view of the memory. Calls come from one thread at a time.

    Each rank holds a lock on the file's byte of its number. The system frees it when the process ends, however that
    happens, so the others notice.
    """

    def __init__(self, path: Path, rank: int, size: int) -> None:
        """Raises:
        SharedMemoryUnusable: no file there, or no compiled kernel.
        """
        try:
            self._library = _declare(load_kernel())
            self._file = path.open("r+b")
        except (OSError, KernelBuildError) as error:
            raise SharedMemoryUnusable(str(error)) from None
        self._size = size
        fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _lock(fcntl.F_WRLCK, rank))
        self._memory = mmap.mmap(self._file.fileno(), 0)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._ranks = _Ranks(address, rank, size, _SLOT_BYTES, 0, 0, 0)

    def all_reduce(self, tensor: torch.Tensor, check: Callable[[], None]) -> None:
        """Adds all ranks' tensors in place, in float32 and in the order of ranks. `check` is called now and then while
        others are awaited, and ends the wait by raising. Raises RankEnded."""
        data = tensor.contiguous()
        call = (data.data_ptr(), data.numel(), DTYPES.index(data.dtype))
        self._await(lambda: self._library.kvrelay_sum_over_ranks(ctypes.byref(self._ranks), *call, _WAIT_MS), check)
        if data is not tensor:
            tensor.copy_(data)

    def gather(self, tensor: torch.Tensor, check: Callable[[], None], *, is_wanted: bool) -> list[torch.Tensor]:
        """All ranks' contiguous tensors of this shape; none where they are not wanted. `check` as for `all_reduce`.
        Raises RankEnded."""
        out = torch.empty((self._size if is_wanted else 0, *tensor.shape), dtype=tensor.dtype)
        call = (tensor.data_ptr(), tensor.nbytes, out.data_ptr() if is_wanted else None)
        self._await(lambda: self._library.kvrelay_gather_over_ranks(ctypes.byref(self._ranks), *call, _WAIT_MS), check)
        return list(out)

    def run_in_c(self, call: Callable[[RanksInC], None], check: Callable[[], None]) -> None:
        """Runs C that sums over the ranks by itself. `check` as for `all_reduce`. Raises RankEnded."""
        errors: list[Exception] = []
        ended: list[int] = []

        def goes_on() -> int:
            try:
                check()
                if ended:
                    self._check_alive()
                ended.extend(self._ended_ranks())  # it may have ended behind this sum: looked at once more
            except Exception as error:
                errors.append(error)
            return not errors

        call(RanksInC(ctypes.addressof(self._ranks), _WAIT_MS, _GoesOn(goes_on)))
        if errors:
            raise errors[0]

    def close(self) -> None:
        """The other ranks see this one as ended. The memory itself is freed with this object."""
        if not self._file.closed:
            # The memory's map has a descriptor of its own, which would keep the lock.
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _lock(fcntl.F_UNLCK, self._ranks.rank))
            self._file.close()

    def _await(self, is_done: Callable[[], int], check: Callable[[], None]) -> None:
        """`is_done` begins the next collective if it is called again after it returned non-zero."""
        while not is_done():
            check()
            if self._ended_ranks():
                # It may have done its part first, but after this rank looked.
                if is_done():
                    return
                self._check_alive()

    def _check_alive(self) -> None:
        for rank in self._ended_ranks():
            raise RankEnded(f"the process of rank {rank} has ended")

    def _ended_ranks(self) -> list[int]:
        return [rank for rank in range(self._size) if rank != self._ranks.rank and not self._is_alive(rank)]

    def _is_alive(self, rank: int) -> bool:
        found = fcntl.fcntl(self._file, fcntl.F_OFD_GETLK, _lock(fcntl.F_WRLCK, rank))
        kind: int = struct.unpack(_LOCK, found)[0]
        return kind != fcntl.F_UNLCK


def share_memory(rank: int, size: int, all_texts: Callable[[str], list[str]]) -> SharedMemory | None:
    """Memory that all ranks share; None if one of them cannot, say because it is on another machine. All ranks call it
    at the same time. `all_texts` returns what all ranks say."""
    path = None
    if rank == 0:
        try:
            path = _make_file(size)
        except SharedMemoryUnusable as error:
            _log.info("ranks do not share memory: %s", error)
    opened = None
    try:
        if not (offered := all_texts("" if path is None else str(path))[0]):
            return None
        try:
            opened = SharedMemory(Path(offered), rank, size)
        except SharedMemoryUnusable as error:
            _log.info("ranks do not share memory: rank %d: %s", rank, error)
        if not all(all_texts("opened" if opened is not None else "")) and opened is not None:
            opened.close()
            return None
        return opened  # all ranks have opened the file, so its name can be removed
    finally:
        if path is not None:
            path.unlink()


def can_sum(tensor: torch.Tensor) -> bool:
    """Whether `SharedMemory.all_reduce` takes it. All ranks must come to the same answer, so only the type counts."""
    return tensor.dtype in DTYPES


def _make_file(size: int) -> Path:
    """A file of memory, all zero, that only this user can open. Raises SharedMemoryUnusable."""
    try:
        library = _declare(load_kernel())
        descriptor, name = tempfile.mkstemp(prefix="kvrelay-ranks-", dir=_DIRECTORY)
    except (OSError, KernelBuildError) as error:
        raise SharedMemoryUnusable(str(error)) from None
    try:
        # Not `ftruncate`: the memory that a container lacks would be missed by a signal later.
        os.posix_fallocate(descriptor, 0, library.kvrelay_shared_bytes(size, _SLOT_BYTES))
    except OSError as error:
        with suppress(FileNotFoundError):
            Path(name).unlink()
        raise SharedMemoryUnusable(f"{_DIRECTORY}: {error}") from None
    finally:
        os.close(descriptor)
    return Path(name)


def _lock(kind: int, byte: int) -> bytes:
    return struct.pack(_LOCK, kind, os.SEEK_SET, byte, 1, 0)


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    library.kvrelay_shared_bytes.argtypes = [c_int64, c_int64]
    library.kvrelay_sum_over_ranks.argtypes = [c_void_p, c_void_p, c_int64, c_int64, c_int64]
    library.kvrelay_gather_over_ranks.argtypes = [c_void_p, c_void_p, c_int64, c_void_p, c_int64]
    for name in ("shared_bytes", "sum_over_ranks", "gather_over_ranks", "ranks_struct_bytes"):
        getattr(library, f"kvrelay_{name}").restype = c_int64
    if library.kvrelay_ranks_struct_bytes() != ctypes.sizeof(_Ranks):
        raise KernelBuildError("the struct of cpu_ranks.c differs from its declaration in Python")
    return library
