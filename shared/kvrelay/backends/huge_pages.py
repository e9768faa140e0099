"""Memory in huge pages, for what a step reads from end to end: with pages of 4 KiB, translating their addresses takes a
third of the time in a virtual machine, where each translation goes through two page tables."""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch

HUGE_PAGE_BYTES = 2 << 20
_CHUNK_BYTES = 16 << 20
_ALIGNMENT = 64


def huge_page_memory(num_bytes: int) -> torch.Tensor:
    """Returns `[num_bytes]` uint8 zeros that begin at a huge page, and are in huge pages where the system has them.
    Pages take memory once they are written."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(num_bytes, dtype=torch.uint8)
    memory = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # not every kernel has huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_PAGE_BYTES
    return whole[start : start + num_bytes]


class HugePages:
    """Puts tensors side by side into huge pages, as most are smaller than one or fill the last one in part. A chunk of
    them is released once none of its tensors is in use."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a contiguous copy of a tensor on the CPU."""
        size = tensor.nbytes
        if size >= _CHUNK_BYTES:
            memory = huge_page_memory(size)
        else:
            if self._used + size > len(self._chunk):
                self._chunk, self._used = huge_page_memory(_CHUNK_BYTES), 0
            memory = self._chunk[self._used : self._used + size]
            self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
        return memory.view(tensor.dtype).view(tensor.shape).copy_(tensor)
