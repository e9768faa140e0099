"""Whether weights, pool and swap space fit the memory at all. Found before they take it: the kernel ends a process that
reaches the limit of its container without a word."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.engine.load.model_source import ModelSource
from kvrelay.engine.load.rank_size import least_bytes
from kvrelay.engine.pool_size import MemoryGauge
from kvrelay.machine_memory import machine_memory_bytes, memory_limits, own_memory_bytes


class MemoryTooSmall(ValueError):
    """The message names the need, the memory and what to change."""


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """In bytes, of one rank. `process`: what it has taken before the load. `num_sharing`: ranks that share `total`."""

    total: int
    process: int
    weights: int
    is_host: bool
    num_sharing: int = 1

    @classmethod
    def of(cls, source: ModelSource, gauge: MemoryGauge, *, fused_layers: bool) -> MemoryNeed:
        is_host, group = source.device.type == "cpu", source.ranks.all_ranks
        return cls(
            total=machine_memory_bytes() if is_host else gauge.total(),
            process=own_memory_bytes() if is_host else 0,
            weights=least_bytes(source, fused_layers=fused_layers),
            is_host=is_host,
            num_sharing=group.size if is_host and group is not None else 1,
        )

    def check(self, pool: int = 0, swap: int = 0) -> None:
        """Raises MemoryTooSmall. The swap space counts on a CPU; beside a GPU it lies in the host's memory."""
        parts = {"the process": self.process, "weights": self.weights, "the pool": pool}
        parts["the swap space"] = swap if self.is_host else 0
        needed = self.num_sharing * sum(parts.values())
        if needed <= self.total:
            return
        named = ", ".join(f"{_mib(size)} for {name}" for name, size in parts.items() if size)
        ranks = f" in each of {self.num_sharing} ranks" if self.num_sharing > 1 else ""
        lower = "kv_memory_bytes, num_blocks or swap_space" if pool else "the model's size by quantization or dtype"
        raise MemoryTooSmall(
            f"{self._memory()} is {_mib(self.total)}, and the worker needs at least {_mib(needed)} ({named}{ranks}): "
            f"raise it (`kvrelay size MODEL` prints what is needed), or lower {lower}"
        )

    def _memory(self) -> str:
        if not self.is_host:
            return "the memory of the GPU"
        is_limited = any(group.limit <= self.total for group in memory_limits())
        return "the memory limit of this container" if is_limited else "the memory of this machine"


def _mib(num_bytes: int) -> str:
    return f"{-(-num_bytes // 2**20)} MiB"
