"""A plugin of pytest that writes each test's outcome to the journal as soon as it is known, for the step of the
environment's `STEP`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.gpu.journal import append

STEP, JOURNAL = "GPU_RUN_STEP", "GPU_RUN_JOURNAL"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Of the process that collects: with several, each reports to it."""
    if "PYTEST_XDIST_WORKER" not in os.environ and (report.when == "call" or not report.passed):
        entry = {"step": os.environ[STEP], "test": report.nodeid, "outcome": report.outcome}
        append(Path(os.environ[JOURNAL]), entry | {"seconds": round(report.duration, 2)})
