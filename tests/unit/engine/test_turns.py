"""One start at a time on a GPU, whatever becomes of who has the turn."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvrelay.engine.pool_size import TurnNeverCame, turn_on_gpu
from tests.fakes.waiting import PATIENCE_S

pytestmark = pytest.mark.unit
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
