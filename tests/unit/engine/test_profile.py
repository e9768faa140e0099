"""The size of a pool beside weights and steps, and one start at a time on a GPU."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

from kvrelay.engine.make import PoolSizing, make_runner
from kvrelay.engine.model_runner import LaunchedStep
from kvrelay.engine.pool_size import (
    HostGauge,
    MemoryProfile,
    PoolDoesNotFit,
    TurnNeverCame,
    profile_memory,
    turn_on_gpu,
)
from kvrelay.machine_memory import machine_memory_bytes
from kvrelay.step.batch import WorkerBatch
from tests.fakes.hash_runner import HashRunner
from tests.fakes.queued_runner import QueuedRunner
from tests.fakes.waiting import PATIENCE_S
from tests.tiny_models import build_model

MIB = 2**20


PROFILE = MemoryProfile(total=1000 * MIB, resting=300 * MIB, step=100 * MIB)


def test_the_numbers_add_up() -> None:
    assert PROFILE.pool_bytes(0.5) == 100 * MIB
    assert PROFILE.num_blocks(0.5, MIB, 10) == 100
    assert PROFILE.num_blocks(0.5, MIB, 10, swap_bytes=30 * MIB) == 70
    assert PROFILE.num_blocks(0.5, MIB, 10, swap_bytes=None) == 80  # and a quarter of it beside


@pytest.mark.parametrize(
    ("share", "swap_bytes", "message"),
    [
        (0.5, 95 * MIB, "the swap space 95 MiB, which leaves 5 MiB"),
        (0.1, 0, "is 300 MiB too much and leaves nothing for a pool that takes at least 20 MiB .* Raise memory_util"),
        (0.41, 0, r"0\.41 of 1000 MiB is 410 MiB.*300 MiB.*100 MiB.*leaves 10 MiB.*20 MiB"),
    ],
)
def test_a_share_that_is_too_small_is_refused_with_the_numbers(share: float, swap_bytes: int, message: str) -> None:
    with pytest.raises(PoolDoesNotFit, match=message):
        PROFILE.num_blocks(share, MIB, 20, swap_bytes=swap_bytes)


class HungryRunner(HashRunner):
    """Takes 200 MiB during each step."""

    def execute(self, batch):  # type: ignore[no-untyped-def]
        np.ones(200 * MIB, np.uint8)
        return super().execute(batch)


def _profile_of_hungry() -> MemoryProfile:
    return profile_memory(HungryRunner(num_blocks=64), token_budget=64, max_running=8, gauge=HostGauge())


@pytest.mark.slow
def test_the_peak_of_a_step_is_measured() -> None:
    """In a process of its own: in this one others' garbage comes and goes."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as processes:
        profile = processes.submit(_profile_of_hungry).result()
    assert 190 * MIB < profile.step < 260 * MIB
    assert profile.total == machine_memory_bytes()


def test_where_steps_are_launched_ahead_two_are_there_at_a_time() -> None:
    runner = QueuedRunner(64, 16, 512)
    runner.let_run.release(4)
    most = [0]
    launch = runner.launch

    def counting(batch: WorkerBatch) -> LaunchedStep:
        launched = launch(batch)
        most.append(len(runner._not_ended))
        return launched

    runner.launch = counting  # type: ignore[method-assign]
    profile_memory(runner, token_budget=64, max_running=8, gauge=HostGauge())
    runner.close()
    assert most == [0, 1, 2, 1, 2]


def _num_blocks(model: str, sizing: PoolSizing) -> int:
    return make_runner(model, dtype="float32", size_pool=sizing).spec.num_blocks


@pytest.mark.slow
def test_a_real_model_gets_a_pool_of_the_size_that_is_left(tmp_path: Path) -> None:
    """In processes of their own: what rests in this one depends on the tests that ran before."""
    model = str(build_model("qwen3", tmp_path))
    resident_after_imports = 400 * MIB
    share = (resident_after_imports + 800 * MIB) / machine_memory_bytes()
    fits = PoolSizing(share, token_budget=64, max_running=8)
    uncut = PoolSizing(share, token_budget=64, max_running=8, whole_prompts=True)
    too_small = PoolSizing(0.001, token_budget=64, max_running=8)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as processes:
        blocks, blocks_uncut = (processes.submit(_num_blocks, model, sizing).result() for sizing in (fits, uncut))
        with pytest.raises(PoolDoesNotFit):
            processes.submit(_num_blocks, model, too_small).result()
    block_bytes = make_runner(model, dtype="float32", num_blocks=8).spec.block_bytes
    assert 50 * MIB < blocks * block_bytes < 1100 * MIB
    assert blocks_uncut < blocks


# -- one start at a time on a gpu, whatever becomes of who has the turn ----------------------------------------------


HOLDS = """
import sys
from pathlib import Path
from kvrelay.engine.pool_size import turn_on_gpu
with turn_on_gpu("GPU-0", Path(sys.argv[1])):
    print("mine", flush=True)
    sys.stdin.read()
"""


def test_who_waits_gets_the_turn_when_it_is_over_and_other_gpus_do_not_wait(tmp_path: Path) -> None:
    order: list[str] = []

    def second() -> None:
        with turn_on_gpu("GPU-0", tmp_path):
            order.append("second")

    with turn_on_gpu("GPU-0", tmp_path):
        waiting = threading.Thread(target=second)
        waiting.start()
        with turn_on_gpu("MIG-GPU-1/7/0", tmp_path):
            order.append("another")
        order.append("first")
    waiting.join(PATIENCE_S)
    assert order == ["another", "first", "second"]


def test_a_turn_ends_with_its_process_however_that_ends(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "mine\n"
        words = rf"process {holder.pid} has been starting .*gpu-GPU-0.lock\): end it"
        with pytest.raises(TurnNeverCame, match=words), turn_on_gpu("GPU-0", tmp_path, timeout_s=0):
            pass
        holder.kill()
    with turn_on_gpu("GPU-0", tmp_path, timeout_s=0):
        assert (tmp_path / "gpu-GPU-0.lock").read_text() == str(os.getpid())


def test_an_error_within_is_not_taken_for_one_of_the_lock(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="a model that is not there"), turn_on_gpu("GPU-0", tmp_path):
        raise OSError("a model that is not there")
    with turn_on_gpu("GPU-0", tmp_path, timeout_s=0):
        pass


def test_without_a_place_for_the_file_it_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "taken").write_text("")
    with caplog.at_level(logging.WARNING), turn_on_gpu("GPU-0", tmp_path / "taken"):
        pass
    assert "not taken in turns" in caplog.text
