"""Large pieces of pinned host memory of exactly the requested size.

torch's allocator rounds pinned memory up to a power of two: for a swap space of 20 GiB it would pin 32 (pytorch/pytorch
issue 95823). So this module maps pages itself and registers them with the driver.
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
    """Returns zeros in pinned memory, for asynchronous copies to and from this GPU. The pages are unpinned when the
    tensor is collected.

    Falls back to torch's allocator if the driver does not pin mapped pages. Raises RuntimeError or OSError if there is
    not enough memory.
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
    # Pages must be unpinned before they go back to the system. At process exit the system does both, and CUDA may be
    # gone before a finalizer would run.
    weakref.finalize(flat.untyped_storage(), _unpin, api, flat.data_ptr(), pages).atexit = False
    return flat.view(shape)


def _forget_last_error(device: torch.device) -> None:
    """Clears the runtime's last error. torch checks it after its next kernel, and would report that kernel as failed.

    An error that persists was not caused by pinning, and is reported again.
    """
    with suppress(RuntimeError):
        torch.ones(1, device=device)


def _unpin(api: Any, address: int, pages: mmap.mmap) -> None:
    """Unpins the pages. The argument keeps them alive until now."""
    api.cudaHostUnregister(address)
