"""The host's swap space: one slot per block, in pinned memory if the pool lies on an accelerator.

On a CPU the pool is host memory too, and the buffer is plain memory whose pages are allocated at the first write.
Blocks that are neighbours in both pool and buffer are copied as one run; a block of all layers is contiguous in both.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from kvrelay.engine.pinned import pinned_memory
from kvrelay.step.batch import SwapCopies

_MEASURED_BLOCKS = 16


class HostBuffer:
    """`num_slots` slots beside a pool whose first dimension is the block. Copies run on the caller's thread."""

    def __init__(self, pool: torch.Tensor, num_slots: int) -> None:
        """Raises ValueError if there is not enough memory."""
        self._pool = pool.view(pool.shape[0], -1)
        self._pinned = pool.device.type == "cuda"
        shape = (num_slots, self._pool.shape[1])
        try:
            if self._pinned:
                self._slots = pinned_memory(shape, pool.dtype, pool.device)
            else:
                self._slots = torch.empty(shape, dtype=pool.dtype)
        except (RuntimeError, OSError) as error:
            num_bytes = shape[0] * shape[1] * pool.element_size()
            raise ValueError(f"swap_space: the host does not give {num_bytes} bytes of memory ({error})") from error

    def swap(self, out: SwapCopies, back: SwapCopies) -> float:
        """Copies the blocks of `out` from the pool to host slots, then those of `back` from host slots into the pool.

        Returns the seconds that the copies took.

        Raises:
            IndexError: a block or slot does not exist.
        """
        if not out.blocks and not back.blocks:
            return 0.0
        started = time.perf_counter()
        self._check(out)
        self._check(back)
        # Copies on one stream keep their order, and the forward comes behind them. Only the time measurement below
        # waits.
        for block, slot, length in _runs(out):
            self._slots[slot : slot + length].copy_(self._pool[block : block + length], non_blocking=self._pinned)
        for block, slot, length in _runs(back):
            self._pool[block : block + length].copy_(self._slots[slot : slot + length], non_blocking=self._pinned)
        if self._pinned:
            torch.cuda.current_stream(self._pool.device).synchronize()
        return time.perf_counter() - started

    def measure(self) -> float:
        """Measures the seconds to copy a block one way. Leaves the pool's content unchanged. Returns 0
        without slots."""
        count = min(len(self._slots), len(self._pool), _MEASURED_BLOCKS)
        if not count:
            return 0.0
        copies = SwapCopies(tuple(range(count)), tuple(range(count)))
        self.swap(copies, copies)  # warm-up: the first write to a host page allocates it
        return self.swap(copies, copies) / (2 * count)

    def _check(self, copies: SwapCopies) -> None:
        for name, ids, limit in (("block", copies.blocks, len(self._pool)), ("slot", copies.slots, len(self._slots))):
            if ids and (min(ids) < 0 or max(ids) >= limit):
                raise IndexError(f"{name}s from {min(ids)} to {max(ids)}, but there are {limit}")


def _runs(copies: SwapCopies) -> Iterator[tuple[int, int, int]]:
    """Yields (block, slot, length) of the longest runs that are contiguous on both sides."""
    start = 0
    blocks, slots = copies
    for end in range(1, len(blocks) + 1):
        if end < len(blocks) and blocks[end] == blocks[end - 1] + 1 and slots[end] == slots[end - 1] + 1:
            continue
        yield blocks[start], slots[start], end - start
        start = end
