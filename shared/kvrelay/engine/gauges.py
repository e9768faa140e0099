"""Gauges of the memory that a pool is to lie in, by device. Apart from `profile`, which does without torch."""

from __future__ import annotations

import gc

import torch

from kvrelay.engine.profile import HostGauge, MemoryGauge


class CudaGauge:
    """A GPU's memory. Of what others take on it only `free` knows; make the gauge before the weights are loaded.

    What a process takes is torch's reserve, and what libraries took beside it since the gauge was made.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.init()
        self._beside_before = self._beside_torch()

    def total(self) -> int:
        """As the driver says."""
        return torch.cuda.mem_get_info(self._device)[1]

    def rest(self) -> int:
        """Without what torch's allocator keeps for later."""
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        return torch.cuda.memory_reserved(self._device) + self._grown_beside_torch()

    def peak(self) -> int:
        """Of what torch reserved."""
        return torch.cuda.max_memory_reserved(self._device) + self._grown_beside_torch()

    def free(self) -> int | None:
        """As the driver says, with what torch's allocator keeps for later."""
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)[0]

    def _beside_torch(self) -> int:
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free - torch.cuda.memory_reserved(self._device)

    def _grown_beside_torch(self) -> int:
        return max(0, self._beside_torch() - self._beside_before)


def make_gauge(device: torch.device) -> MemoryGauge:
    """For the memory of `device`; see `CudaGauge` on when."""
    return CudaGauge(device) if device.type == "cuda" else HostGauge()
