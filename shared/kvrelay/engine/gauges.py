"""Gauges of the memory that a pool is to lie in, by device. Apart from `profile`, which does without torch."""

from __future__ import annotations

import gc
import logging
from importlib import import_module
from typing import Any, Protocol

import torch

from kvrelay.engine.device import device_uuid
from kvrelay.engine.profile import HostGauge, MemoryGauge, PoolDoesNotFit

log = logging.getLogger(__name__)


class GpuMemory(Protocol):
    """The books of one GPU's memory; all in bytes."""

    def total(self) -> int:
        """What there is, for all processes."""
        ...

    def free(self) -> int:
        """What no process takes."""
        ...

    def used(self) -> int:
        """What all processes take together; may count from another origin than `total` less `free`."""
        ...

    def reserved(self) -> int:
        """What torch's allocator holds in this process, for tensors and for later."""
        ...

    def most_reserved(self) -> int:
        """The most since `trim`."""
        ...

    def trim(self) -> None:
        """Torch's allocator gives back what it held for later."""
        ...

    def hold(self, num_bytes: int) -> None:
        """Torch's allocator takes so much for later. Raises torch.OutOfMemoryError."""
        ...


class CudaGauge:
    """What this process takes of a GPU: torch's reserve, and the context and libraries beside it.

    Torch tells the one of this process alone. The other is what all processes took beside since the gauge was made:
    make it before anything is on the GPU, and while no other process starts there (see `turns`). Processes that have
    started do not grow, because they `keep` what their largest step takes. One that ends meanwhile can hide what this
    one took beside torch since its last look, never more.
    """

    pool_rests = True

    def __init__(self, memory: GpuMemory) -> None:
        self._memory = memory
        self._others = memory.used() - memory.reserved()
        self._beside = 0
        self._rested = 0
        self._step = 0

    def total(self) -> int:
        """As the driver says."""
        return self._memory.total()

    def rest(self) -> int:
        """Without what torch's allocator holds for later."""
        gc.collect()
        self._memory.trim()
        self._rested = self._memory.reserved()
        return self._rested + self._beside_torch()

    def peak(self) -> int:
        """Of what torch reserved."""
        most = self._memory.most_reserved()
        self._step = most - self._rested
        return most + self._beside_torch()

    def free(self) -> int | None:
        """As the driver says, with what torch's allocator holds for later."""
        gc.collect()
        self._memory.trim()
        return self._memory.free()

    def keep(self) -> None:
        """See `MemoryGauge.keep`. What the allocator holds in smaller pieces would come on top of it."""
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
    """`GpuMemory` by torch, and by NVML where it is there: that counts without a context, and so the context too."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._nvml = _Nvml.of(device_uuid(device))

    def total(self) -> int:
        """See `GpuMemory.total`."""
        return torch.cuda.mem_get_info(self._device)[1]

    def free(self) -> int:
        """See `GpuMemory.free`."""
        return torch.cuda.mem_get_info(self._device)[0]

    def used(self) -> int:
        """See `GpuMemory.used`."""
        return self.total() - self.free() if self._nvml is None else self._nvml.used()

    def reserved(self) -> int:
        """See `GpuMemory.reserved`."""
        return torch.cuda.memory_reserved(self._device) if torch.cuda.is_initialized() else 0

    def most_reserved(self) -> int:
        """See `GpuMemory.most_reserved`."""
        return torch.cuda.max_memory_reserved(self._device)

    def trim(self) -> None:
        """See `GpuMemory.trim`."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def hold(self, num_bytes: int) -> None:
        """See `GpuMemory.hold`. Freed tensors stay with the allocator, and are cut up for smaller ones."""
        torch.empty(num_bytes, dtype=torch.uint8, device=self._device)


class _Nvml:
    """The driver's own books of one GPU, by UUID. `nvidia-ml-py` comes with FlashInfer."""

    def __init__(self, api: Any, handle: Any) -> None:
        self._api = api
        self._handle = handle

    @classmethod
    def of(cls, uuid: str) -> _Nvml | None:
        """None where it does not work, which is logged."""
        try:
            api = import_module("pynvml")
            api.nvmlInit()
            found = cls(api, api.nvmlDeviceGetHandleByUUID(uuid))
            found.used()
        except Exception as error:  # NVML's errors are its own classes, which are not there without it
            log.info("this process's CUDA context is not counted as its memory: NVML does not tell (%r)", error)
            return None
        return found

    def used(self) -> int:
        return int(self._api.nvmlDeviceGetMemoryInfo(self._handle).used)


def make_gauge(device: torch.device) -> MemoryGauge:
    """For the memory of `device`; see `CudaGauge` on when."""
    return CudaGauge(TorchMemory(device)) if device.type == "cuda" else HostGauge()
