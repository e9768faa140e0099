"""The GPU benchmark on a CPU: every part runs for real, on a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.__main__ import LIMITS_S

ROOT = Path(__file__).parents[2]
BENCHMARK = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--smoke"]
SLOWEST_S = 600


@pytest.mark.slow
@pytest.mark.timeout(len(LIMITS_S) * SLOWEST_S)
def test_every_part_runs_on_a_cpu_and_is_written_with_its_spread(tmp_path: Path) -> None:
    page = tmp_path / "gpu.md"
    limits = ",".join(f"{name}={SLOWEST_S}" for name in LIMITS_S)
    ended = subprocess.run(
        [*BENCHMARK, "--limit", limits, "--write", str(page)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    parts = json.loads(page.with_suffix(".json").read_text())["parts"]
    assert list(parts) == list(LIMITS_S)
    for name, part in parts.items():
        assert part["state"] == "done", name
        rows = [entry["cells"] for entry in part["entries"] if "table" in entry]
        assert rows, name
        assert name == "parity" or all(any(isinstance(cell, dict) for cell in row.values()) for row in rows)
        assert f"## {part['title']}" in page.read_text()
