"""Two processes that start on one device at the same time, and run their largest steps at the same time."""

from __future__ import annotations

import multiprocessing as mp
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch

from kvrelay.config import WorkerConfig
from kvrelay.engine.pool_size import HostGauge, profile_memory
from kvrelay.engine.run.transformers_runner import TransformersRunner
from kvrelay.machine_memory import machine_memory_bytes
from kvrelay.worker.worker_main import load_runner
from tests.gpu.conftest import KERNELS_TIMEOUT_S
from tests.tiny_models import build_model

TOKEN_BUDGET, MAX_RUNNING = 512, 16
GPU_SHARE = 0.3
HOST_BYTES = 1200 << 20
"""Of which a process takes about a third before it has loaded anything."""


def _start(config: WorkerConfig, cache_dir: Path) -> tuple[int, int]:
    """Bytes of the pool, and of what the process reserved on a GPU; the largest steps have run by then."""
    os.environ["KVRELAY_CACHE_DIR"] = str(cache_dir)
    runner = load_runner(config)
    assert isinstance(runner, TransformersRunner)
    for _ in range(3):
        profile_memory(runner, TOKEN_BUDGET, MAX_RUNNING, HostGauge())
    reserved = torch.cuda.max_memory_reserved() if config.device == "cuda" else 0
    return runner.pool.nbytes, reserved


@pytest.mark.slow
@pytest.mark.timeout(KERNELS_TIMEOUT_S)
def test_each_gets_its_share_and_both_run(device: torch.device, tmp_path: Path) -> None:
    config = WorkerConfig(
        model=str(build_model("llama", tmp_path)),
        role="decode",
        device=device.type,
        dtype="float32",
        memory_utilization=GPU_SHARE if device.type == "cuda" else HOST_BYTES / machine_memory_bytes(),
        token_budget=TOKEN_BUDGET,
        max_running=MAX_RUNNING,
        preemption="recompute",
        threads=1,
    )
    with ProcessPoolExecutor(2, mp_context=mp.get_context("spawn")) as processes:
        starts = [processes.submit(_start, config, tmp_path) for _ in range(2)]
        found = [start.result() for start in starts]
    for pool_bytes, reserved in found:
        assert pool_bytes > 0
        if device.type == "cuda":
            total = torch.cuda.mem_get_info()[1]
            assert GPU_SHARE / 2 * total < pool_bytes < reserved <= GPU_SHARE * total
