"""A GPU's memory with several processes on it: contexts, libraries, and a caching allocator for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

MIB = 1 << 20


@dataclass(slots=True)
class Process:
    """What one process takes, in bytes."""

    beside: int = 0  # of context and libraries
    tensors: int = 0
    cached: int = 0
    most: int = 0  # of tensors and cached

    @property
    def taken(self) -> int:
        return self.beside + self.tensors + self.cached


class FakeGpu:
    """`moment` is called before each look and each change: others may come in between."""

    def __init__(self, total_mib: int, moment: Callable[[], None]) -> None:
        self.total = total_mib * MIB
        self.moment = moment
        self.processes: list[Process] = []

    @property
    def used(self) -> int:
        return sum(process.taken for process in self.processes)


class FakeMemory:
    """`TorchMemory` of one process. With `counts_context`, `used` can be told before the process has a context."""

    def __init__(self, gpu: FakeGpu, context_mib: int, *, counts_context: bool = True) -> None:
        self._gpu = gpu
        self._context = context_mib * MIB
        self._counts_context = counts_context
        self.process = Process()
        gpu.processes.append(self.process)

    def total(self) -> int:
        self._gpu.moment()
        return self._gpu.total

    def free(self) -> int:
        self._touch()
        return self._gpu.total - self._gpu.used

    def used(self) -> int:
        if not self._counts_context:
            self._touch()
        self._gpu.moment()
        return self._gpu.used

    def reserved(self) -> int:
        return self.process.tensors + self.process.cached

    def most_reserved(self) -> int:
        return self.process.most

    def trim(self) -> None:
        self._touch()
        self.process.cached = 0
        self.process.most = self.reserved()

    def hold(self, num_bytes: int) -> None:
        """In one piece: what is cached by then lies in others, which do not join."""
        if num_bytes > self._gpu.total - self._gpu.used:
            raise torch.OutOfMemoryError(f"{num_bytes >> 20} MiB")
        self._touch()
        self.process.cached += num_bytes
        self.process.most = max(self.process.most, self.reserved())

    # -- what a process does ------------------------------------------------------------------------------------------

    def allocate(self, num_bytes: int) -> None:
        self._touch()
        from_cache = min(num_bytes, self.process.cached)
        if num_bytes - from_cache > self._gpu.total - self._gpu.used:
            raise torch.OutOfMemoryError(f"{num_bytes >> 20} MiB")
        self.process.cached -= from_cache
        self.process.tensors += num_bytes
        self.process.most = max(self.process.most, self.reserved())

    def release(self, num_bytes: int) -> None:
        """A tensor's memory stays with the allocator."""
        self.process.tensors -= num_bytes
        self.process.cached += num_bytes

    def load_library(self, num_bytes: int) -> None:
        self._touch()
        self.process.beside += num_bytes

    def end(self) -> None:
        self._gpu.moment()
        self._gpu.processes.remove(self.process)
        self.process = Process()

    def _touch(self) -> None:
        self._gpu.moment()
        if not self.process.beside:
            self.process.beside = self._context
