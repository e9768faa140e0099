"""Large pieces of pinned host memory, of exactly the size that is asked for.

Torch keeps pinned memory in an allocator that rounds each piece up to a power of two: for a swap space of 20 GiB it
would pin 32 (pytorch/pytorch issue 95823). So pages are mapped here, and the driver is told to pin them.
"""

from __future__ import annotations

import logging
import mmap
import weakref
from contextlib import suppress
from typing import Any

import torch

log = logging.getLogger(__name__)


def pinned_memory(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, for copies to and from this GPU beside which the host goes on; unpinned once nobody has the tensor.

    Where the driver does not pin mapped pages, torch's allocator does. Raises RuntimeError or OSError where there is
    not so much memory.
    """
    size_bytes = torch.Size(shape).numel() * dtype.itemsize
    if not size_bytes:
        return torch.empty(shape, dtype=dtype)
    pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    flat = torch.frombuffer(pages, dtype=dtype)
    with torch.cuda.device(device):
        api: Any = torch.cuda.cudart()
        status = int(api.cudaHostRegister(flat.data_ptr(), size_bytes, 0))
    if status:
        log.info("the driver does not pin mapped memory (CUDA error %d): torch pins it, in powers of two", status)
        _forget_last_error(device)
        return torch.zeros(shape, dtype=dtype, pin_memory=True)
    # Pinned pages must not go back to the system; with the process they do by themselves, and CUDA may be gone first.
    weakref.finalize(flat.untyped_storage(), _unpin, api, flat.data_ptr(), pages).atexit = False
    return flat.view(shape)


def _forget_last_error(device: torch.device) -> None:
    """The runtime remembers an error until somebody asks, and torch asks behind its next kernel, as if that had failed.

    One that stays after that is no longer the one of pinning, and comes again.
    """
    with suppress(RuntimeError):
        torch.ones(1, device=device)


def _unpin(api: Any, address: int, pages: mmap.mmap) -> None:
    """`pages` is held until now."""
    api.cudaHostUnregister(address)
