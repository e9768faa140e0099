"""How many blocks fit beside the weights and the largest step.

The largest step is run for real, on a pool just large enough for it (two steps in a row if steps are launched ahead).
Its peak above the resting memory is read from a gauge: for a CPU from the kernel (Linux: VmHWM, reset through
clear_refs), for a GPU from torch's allocator. As in vLLM, the measured amount is what the process then uses.

Processes that share a GPU start one after the other. The memory of a process beside torch's allocator (context,
kernels, libraries) is only known as a sum over all processes, so no other process may grow while one measures. One that
has started does not grow: it holds its pool and the memory of its largest step (`CudaGauge.keep`). So the next one
finds the memory free that no other counts on.
"""

from __future__ import annotations

import fcntl
import gc
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvrelay.backends.cpu_build import cache_dir
from kvrelay.backends.host_pages import release_freed_memory
from kvrelay.engine.model_runner import ModelRunner
from kvrelay.engine.run.device import device_uuid
from kvrelay.kv.table import blocks_for
from kvrelay.machine_memory import machine_memory_bytes
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


log = logging.getLogger(__name__)

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


class PoolDoesNotFit(ValueError):
    """The share of memory leaves too little for a pool. The message has the numbers."""


class HostGauge:
    """The machine's memory as the kernel accounts for it."""

    def total(self) -> int:
        """All of this memory, used or free."""
        return machine_memory_bytes()

    def rest(self) -> int:
        """The memory that this process uses now. Also resets `peak`."""
        gc.collect()
        release_freed_memory()
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
    (see `turn_on`). Processes that have started do not grow, because they `keep` the memory of their largest step. A
    process that ends meanwhile can hide at most what this one took beside torch since the last measurement.
    """

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


LONGEST_WAIT_S = 1800.0
"""Seconds to wait for processes that started before, each of which reads its weights in its turn."""
POLL_S = 0.1
SAY_EVERY_S = 60.0


class TurnNeverCame(ValueError):
    """Another process holds its turn for too long. The text names it."""


@contextmanager
def turn_on(device: torch.device) -> Iterator[None]:
    """Makes other processes that start on the same GPU wait. Raises TurnNeverCame."""
    with turn_on_gpu(device_uuid(device), cache_dir()) if device.type == "cuda" else nullcontext():
        yield


@contextmanager
def turn_on_gpu(uuid: str, directory: Path, timeout_s: float = LONGEST_WAIT_S) -> Iterator[None]:
    """Waits until no other process of this machine holds the turn for the same GPU: a lock on a file in `directory`,
    named by its UUID, which the kernel releases when the process ends, however that happens. Processes of different
    users, or in containers without a common cache directory, do not wait for each other.

    If the file cannot be made, it logs that and does not wait. Raises TurnNeverCame.
    """
    path = directory / f"gpu-{re.sub('[^A-Za-z0-9-]', '_', uuid)}.lock"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        log.warning("starts on this GPU are not taken in turns, so memory figures may mix: %s", error)
        yield
        return
    try:
        _wait_for(file, path, timeout_s)
        os.ftruncate(file, 0)
        os.pwrite(file, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(file)


def _wait_for(file: int, path: Path, timeout_s: float) -> None:
    started = time.monotonic()
    said = -SAY_EVERY_S
    while not _lock(file):
        waited_s = time.monotonic() - started
        holder = os.pread(file, 20, 0).decode() or "unknown"
        if waited_s >= timeout_s:
            raise TurnNeverCame(
                f"process {holder} has been starting on the same GPU for {waited_s:.0f} s (it holds {path}): end it"
            )
        if waited_s - said >= SAY_EVERY_S:
            log.info("waiting for process %s, which starts on the same GPU (%s)", holder, path)
            said = waited_s
        pause(POLL_S)


def pause(seconds: float) -> None:
    """Sleeps between two attempts to take the lock."""
    time.sleep(seconds)


def _lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
