"""Sizes the pool: a share of memory minus the weights and the largest step.

The largest step is run for real, on a pool just large enough for it (two steps in a row if steps are launched ahead).
Its peak above the resting memory is read from a gauge: for a CPU from the kernel (Linux: VmHWM, reset through
clear_refs), for a GPU from torch's allocator. As in vLLM, the measured amount is what the process then uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from kvrelay.engine.memory.gauges import MemoryGauge, PoolDoesNotFit
from kvrelay.engine.model_runner import ModelRunner
from kvrelay.kv.table import blocks_for
from kvrelay.protocol.sampling import Sampling
from kvrelay.scheduling.memory.swapping import SWAP_PART
from kvrelay.step.batch import WorkerBatch, WorkerRow

_MIB = 2**20


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """All in bytes. `resting`: the process with its weights. `step`: what the largest step takes beside. `graphs`: what
    captured steps keep."""

    total: int
    resting: int
    step: int
    free: int | None = None  # beside what rests, if the use of others is known
    graphs: int = 0

    def check_free(self, memory_utilization: float) -> None:
        """Raises PoolDoesNotFit if other processes hold memory that the share counts on."""
        wanted = int(self.total * memory_utilization) - self.resting
        if self.free is not None and self.free < wanted:
            raise PoolDoesNotFit(
                f"memory_utilization {memory_utilization:g} of {self.total // _MIB} MiB is "
                f"{int(self.total * memory_utilization) // _MIB} MiB; this process takes {self.resting // _MIB} MiB of "
                f"them already, and of the other {wanted // _MIB} MiB only {self.free // _MIB} MiB are free: other "
                f"processes hold the rest. Lower memory_utilization, or stop them"
            )

    def pool_bytes(self, memory_utilization: float) -> int:
        """Bytes that the share leaves for the pool. May be negative."""
        share = int(self.total * memory_utilization) - self.resting
        most = share if self.free is None else min(share, self.free)
        return most - self.step - self.graphs

    def num_blocks(self, memory_utilization: float, block_bytes: int, least: int, *, swap_bytes: int | None = 0) -> int:
        """Blocks that fit beside a swap space of `swap_bytes`. None: the pool's size divided by `SWAP_PART`.

        Raises PoolDoesNotFit if they are fewer than `least`.
        """
        available = self.pool_bytes(memory_utilization)
        available = available * SWAP_PART // (SWAP_PART + 1) if swap_bytes is None else available - swap_bytes
        if available < least * block_bytes:
            raise PoolDoesNotFit(
                f"memory_utilization {memory_utilization:g} of {self.total // _MIB} MiB is "
                f"{int(self.total * memory_utilization) // _MIB} MiB; the process with its weights takes "
                f"{self.resting // _MIB} MiB and the largest step {self.step // _MIB} MiB"
                f"{self._and_graphs()}{_and_swap(swap_bytes)}, which "
                f"{_leaves(available)} for a pool that takes at least {least * block_bytes // _MIB} MiB "
                f"({least} blocks). Raise memory_utilization (of kvrelay up: for all its workers together), or lower "
                f"token_budget or swap_space"
            )
        return available // block_bytes

    def _and_graphs(self) -> str:
        return f" and its CUDA graphs {-(-self.graphs // _MIB)} MiB" if self.graphs else ""


def _leaves(available: int) -> str:
    if available < 0:
        return f"is {-available // _MIB} MiB too much and leaves nothing"
    return f"leaves {available // _MIB} MiB"


def _and_swap(swap_bytes: int | None) -> str:
    if swap_bytes is None:
        return f", the swap space a part in {SWAP_PART + 1} of the rest"
    return f" and the swap space {swap_bytes // _MIB} MiB" if swap_bytes else ""


def profile_memory(runner: ModelRunner, token_budget: int, max_running: int, gauge: MemoryGauge) -> MemoryProfile:
    """Runs the largest steps on `runner`, whose pool must hold them: see `blocks_for_profile`."""
    resting = gauge.rest()
    for batch in _largest_batches(runner, token_budget, max_running):
        for row in batch.rows:
            tokens = row.token_ids.tolist()
            runner.add_sequence(row.key, Sampling(temperature=1.0, top_p=0.9, max_tokens=1), tokens, len(tokens))
        _run(runner, batch)
        for row in batch.rows:
            runner.drop_sequence(row.key)
    step = max(0, gauge.peak() - resting)
    return MemoryProfile(gauge.total(), resting, step, gauge.free())


def _run(runner: ModelRunner, batch: WorkerBatch) -> None:
    """Runs two steps if steps are launched ahead, because the first one's logits stay until it has landed."""
    if getattr(runner, "follows", False):
        runner.follow(batch)  # type: ignore[attr-defined]
        return
    if not runner.launches_ahead:
        runner.execute(batch)
        return
    for step in [runner.launch(batch), runner.launch(batch)]:
        step.land()


def measure_kept(work: Callable[[], None], gauge: MemoryGauge) -> int:
    """Bytes that stay in use after `work` and were not before."""
    before = gauge.rest()
    work()
    return max(0, gauge.rest() - before)


def blocks_for_profile(token_budget: int, max_running: int, block_size: int) -> int:
    """Blocks that the largest steps write to."""
    return blocks_for(token_budget, block_size) + max_running


def _largest_batches(runner: ModelRunner, token_budget: int, max_running: int) -> Iterator[WorkerBatch]:
    """One prompt as long as the budget, and as many sequences as may run, all sampling a token."""
    spec = runner.spec
    longest = min(token_budget, spec.max_model_len)
    yield _batch([longest] * max(1, token_budget // longest), spec.block_size)
    num_rows = min(max_running, token_budget)
    yield _batch([min(longest, token_budget // num_rows)] * num_rows, spec.block_size)


def _batch(lengths: list[int], block_size: int) -> WorkerBatch:
    rows, next_block = [], 0
    for number, length in enumerate(lengths):
        num_blocks = blocks_for(length, block_size)
        rows.append(
            WorkerRow(
                key=("profile", 0, number),
                token_ids=np.ones(length, np.int32),
                position=0,
                block_ids=np.arange(next_block, next_block + num_blocks, dtype=np.int32),
                sample=True,
                is_prefill=True,
            )
        )
        next_block += num_blocks
    return WorkerBatch(0, rows)
