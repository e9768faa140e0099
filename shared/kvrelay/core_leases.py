"""The workers of one machine lend each other the cores that they do not use.

`kvrelay up` makes memory that its workers share, with a lease for each: the time until which the worker uses its share
of the cores. A worker renews its lease when a step begins, and ends it when nothing is left to do. Each step takes a
part of the cores whose leases are over. So no worker waits for another one, and the cores of one that dies are free
once its lease is over. A step keeps its threads to its end: until then there may be more threads than cores.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from tempfile import TemporaryFile
from typing import Self

INHERITED = "KVRELAY_INHERITED_CORE_LEASES"
"""The environment variable for a worker: descriptor, its number, number of cores, and the workers' shares."""
STEP_LEASE_NS = 5_000_000_000
"""A step that takes longer is taken for one of a worker that died."""
GAP_LEASE_NS = 20_000_000
"""From one step to the next."""
_STRIDE = 8  # words: no two leases are in one cache line


class CoreLeases:
    """One worker's part in it. No two threads are in its methods at once."""

    def __init__(
        self,
        leases: memoryview,
        number: int,
        num_cores: int,
        shares: Sequence[int],
        set_num_threads: Callable[[int], None],
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`leases`: writable, zeros at first, of `leases_bytes`. `shares`: each worker's number of cores while all are
        busy. `set_num_threads` is for the calling thread."""
        self._leases = leases.cast("B").cast("q")
        self._number, self._num_cores, self._shares = number, num_cores, shares
        self._set_num_threads = set_num_threads
        self._num_threads = 0
        self._clock_ns = clock_ns

    @classmethod
    def inherited(cls, environ: Mapping[str, str], set_num_threads: Callable[[int], None]) -> Self | None:
        """The leases of the process that started this one; None if it has none. To be called once."""
        value = environ.get(INHERITED)
        if value is None:
            return None
        descriptor, number, num_cores, *shares = map(int, value.split(","))
        memory = mmap.mmap(descriptor, leases_bytes(len(shares)))
        os.close(descriptor)
        return cls(memoryview(memory), number, num_cores, shares, set_num_threads)

    def begin_step(self) -> None:
        """Sets the number of threads. On the thread of the step."""
        now = self._clock_ns()
        self._leases[self._number * _STRIDE] = now + STEP_LEASE_NS
        own = self._shares[self._number]
        num_taken = own + sum(
            share
            for number, share in enumerate(self._shares)
            if number != self._number and self._leases[number * _STRIDE] > now
        )
        num_threads = own + max(0, self._num_cores - num_taken) * own // num_taken
        if num_threads != self._num_threads:
            self._num_threads = num_threads
            self._set_num_threads(num_threads)

    def end_step(self) -> None:
        self._leases[self._number * _STRIDE] = self._clock_ns() + GAP_LEASE_NS

    def end(self) -> None:
        """There is nothing to do: others may use this worker's cores at once."""
        self._leases[self._number * _STRIDE] = 0


def leases_bytes(num_workers: int) -> int:
    return num_workers * _STRIDE * 8


class SharedLeases:
    """The memory, in the process that starts the workers. It has no name and ends with the processes that use it."""

    def __init__(self, num_cores: int, shares: Sequence[int]) -> None:
        self.num_cores, self.shares = num_cores, tuple(shares)
        try:
            self.descriptor = os.memfd_create("kvrelay-core-leases")
        except (AttributeError, OSError):  # a system without it, or a sandbox that forbids it
            with TemporaryFile() as file:
                self.descriptor = os.dup(file.fileno())
        os.ftruncate(self.descriptor, leases_bytes(len(self.shares)))

    def environ_of(self, number: int) -> dict[str, str]:
        """Returns the environment of a worker's process, which inherits `descriptor`."""
        return {INHERITED: ",".join(map(str, (self.descriptor, number, self.num_cores, *self.shares)))}

    def close(self) -> None:
        """Idempotent. The workers keep the memory."""
        with suppress(OSError):
            os.close(self.descriptor)
