"""Clocks and readings of the machine for `cpu_kernels`."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from kvrelay.backends.backend import PackedRows
from kvrelay.backends.host_pages import huge_page_memory

DTYPE = torch.bfloat16


class Clock:
    """The least time of a function over some repeats, in seconds."""

    def __init__(self, threads: int, repeats: int) -> None:
        self._now = time.thread_time if threads == 1 else time.perf_counter
        self.repeats = repeats

    def least(self, run: Callable[[int], object], repeats: int | None = None) -> float:
        """`run` gets the number of its repeat."""
        taken = []
        for repeat in range(repeats or self.repeats):
            start = self._now()
            run(repeat)
            taken.append(self._now() - start)
        return min(taken)


class Machine:
    """What the machine allows now. Other load changes it, so it is measured beside each table."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._memory = huge_page_memory(512 << 20).view(torch.float32).fill_(1)  # as weights and the pool lie

    def read_gb_s(self) -> float:
        """Bytes read per nanosecond."""
        return self._memory.nbytes / self._clock.least(lambda _: self._memory.sum(), 5) / 1e9

    def gemm_gflop_s(self, dtype: torch.dtype) -> float:
        """Of torch.mm over 1024 tokens."""
        a, b = torch.randn(1024, 1024).to(dtype), torch.randn(1024, 4096).to(dtype)
        return 2 * 1024 * 1024 * 4096 / self._clock.least(lambda _: torch.mm(a, b), 5) / 1e9


def scattered_rows(query_lens: list[int], positions: list[int], block_size: int) -> PackedRows:
    """Rows over blocks in random order."""
    width = max(-(-(p + q) // block_size) for p, q in zip(positions, query_lens, strict=True))
    tables = np.random.default_rng(0).permutation(width * len(positions)).astype(np.int32)
    return PackedRows(np.array(query_lens, np.int32), np.array(positions, np.int32), tables.reshape(len(positions), -1))
