"""Gauges of the memory in which the pool will lie, by device. All values are in bytes."""

from __future__ import annotations

import gc
import logging
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from kvrelay.engine.run.device import device_uuid
from kvrelay.machine_memory import machine_memory_bytes

log = logging.getLogger(__name__)

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


class PoolDoesNotFit(ValueError):
    """The share of memory leaves too little for a pool. The message has the numbers."""


class HostGauge:
    """The machine's memory as the kernel accounts for it."""

    pool_rests = False
    """Whether a pool counts in `rest` before it is written to."""

    def total(self) -> int:
        """All of this memory, used or free."""
        return machine_memory_bytes()

    def rest(self) -> int:
        """The memory that this process uses now. Also resets `peak`."""
        gc.collect()
        _CLEAR_REFS.write_text("5")  # resets the peak to the resident memory
        return _status_bytes("VmRSS")

    def peak(self) -> int:
        """The most memory that this process used since `rest`."""
        return _status_bytes("VmHWM")

    def free(self) -> int | None:
        """Memory that no process uses now. None: the use of other processes changes too fast to be counted."""
        return None

    def keep(self) -> None:
        """Does nothing: reserved but unused pages would be lost to other processes."""


def _status_bytes(name: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{_STATUS} has no {name}")


class CudaGauge:
    """The GPU memory of this process: torch's reserve, and the context and libraries beside it.

    torch reports its reserve for this process alone. The rest is measured as what all processes have taken beside torch
    since the gauge was made. So make the gauge before anything is on the GPU and while no other process starts there
    (see `turns`). Processes that have started do not grow, because they `keep` the memory of their largest step. A
    process that ends meanwhile can hide at most what this one took beside torch since the last measurement.
    """

    pool_rests = True

    def __init__(self, memory: TorchMemory) -> None:
        self._memory = memory
        self._others = memory.used() - memory.reserved()
        self._beside = 0
        self._rested = 0
        self._step = 0

    def total(self) -> int:
        return self._memory.total()

    def rest(self) -> int:
        """Used memory without the unused part of torch's reserve."""
        gc.collect()
        self._memory.trim()
        self._rested = self._memory.reserved()
        return self._rested + self._beside_torch()

    def peak(self) -> int:
        """The most memory that torch reserved."""
        most = self._memory.most_reserved()
        self._step = most - self._rested
        return most + self._beside_torch()

    def free(self) -> int | None:
        """Free memory as the driver reports it, plus the unused part of torch's reserve."""
        gc.collect()
        self._memory.trim()
        return self._memory.free()

    def keep(self) -> None:
        """See `MemoryGauge.keep`. Blocks that the allocator holds in smaller pieces come on top."""
        gc.collect()
        self._memory.trim()
        try:
            self._memory.hold(self._step)
        except torch.OutOfMemoryError as error:
            raise PoolDoesNotFit(
                f"the largest step takes {self._step >> 20} MiB of GPU memory, but another process took it while the "
                f"pool was made: {error}"
            ) from error

    def _beside_torch(self) -> int:
        self._beside = max(self._beside, self._memory.used() - self._others - self._memory.reserved())
        return self._beside


class TorchMemory:
    """The accounting of one GPU's memory by torch, and by NVML if it is installed, which also sees the context."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._nvml = _Nvml.of(device_uuid(device))

    def total(self) -> int:
        return torch.cuda.mem_get_info(self._device)[1]

    def free(self) -> int:
        return torch.cuda.mem_get_info(self._device)[0]

    def used(self) -> int:
        """Memory that all processes use. May count from another origin than `total` minus `free`."""
        return self.total() - self.free() if self._nvml is None else self._nvml.used()

    def reserved(self) -> int:
        return torch.cuda.memory_reserved(self._device) if torch.cuda.is_initialized() else 0

    def most_reserved(self) -> int:
        return torch.cuda.max_memory_reserved(self._device)

    def trim(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def hold(self, num_bytes: int) -> None:
        """Makes torch's allocator reserve this much. Raises torch.OutOfMemoryError.

        Freed tensors stay with the allocator, which splits them for smaller ones."""
        torch.empty(num_bytes, dtype=torch.uint8, device=self._device)


class _Nvml:
    """The driver's accounting of one GPU, by UUID. `nvidia-ml-py` comes with FlashInfer."""

    def __init__(self, api: Any, handle: Any) -> None:
        self._api = api
        self._handle = handle

    @classmethod
    def of(cls, uuid: str) -> _Nvml | None:
        """Returns None, after logging why, if NVML does not work."""
        try:
            api = import_module("pynvml")
            api.nvmlInit()
            found = cls(api, api.nvmlDeviceGetHandleByUUID(uuid))
            found.used()
        except Exception as error:  # NVML's exception classes cannot be named: the module may be missing
            log.info("this process's CUDA context is not counted as its memory: NVML does not tell (%r)", error)
            return None
        return found

    def used(self) -> int:
        return int(self._api.nvmlDeviceGetMemoryInfo(self._handle).used)


MemoryGauge = HostGauge | CudaGauge


def make_gauge(device: torch.device) -> MemoryGauge:
    """Makes the gauge for the memory of `device`. See `CudaGauge` for when to call it."""
    return CudaGauge(TorchMemory(device)) if device.type == "cuda" else HostGauge()
