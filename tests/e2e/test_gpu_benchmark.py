"""The GPU benchmark on a CPU: every step runs for real, on a tiny model, once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import journal
from benchmarks.gpu.steps import STEPS

ROOT = Path(__file__).parents[2]
LIMIT_S = 3600


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
def test_every_step_is_done_on_a_cpu_and_kept(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--smoke", "--out", str(tmp_path)]
    command += ["--total-s", str(LIMIT_S)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout
    attempts, page = journal.read(tmp_path / "gpu.jsonl"), (tmp_path / "gpu.md").read_text()
    assert list(attempts) == [step.name for step in STEPS]
    for step in STEPS:
        (attempt,) = attempts[step.name]
        assert attempt.state == journal.DONE
        assert step.name == "check" or step.tests is not None or attempt.rows, step.name
        assert f"## {step.title}" in page
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stdout
    assert again.stdout.count("kept from an earlier run") == sum(not step.always for step in STEPS)
