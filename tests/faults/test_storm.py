"""A short storm of random faults over real processes; `python -m tests.faults.storm` is the long one."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from tests.component.transfer.transports import NO_NIXL
from tests.faults.storm.__main__ import print_report
from tests.faults.storm.processes import StackSettings
from tests.faults.storm.storm import StormOptions, run_storm


@pytest.mark.always
@pytest.mark.timeout(900)
@pytest.mark.sends_requests
def test_constrained_outputs_are_valid_and_the_same_through_random_faults(
    pytestconfig: pytest.Config, tmp_path: Path
) -> None:
    """Half of them with drafts, which the undisturbed runs do without. `--requests 2000` is the long one."""
    num_requests = pytestconfig.getoption("--requests") or 100
    seed = int(time.time())
    print(f"seed {seed}")
    settings = StackSettings(num_routers=2, request_timeout_s=150)
    options = StormOptions(
        num_requests,
        seed,
        num_kinds=max(40, num_requests // 4),
        samples_share=0.25,
        constrained_share=1.0,
        pause_s=0.3,
        min_faults=5,
    )
    report = asyncio.run(run_storm(tmp_path, settings, options))
    print_report(report)
    assert not report.errors
    assert report.constrained["complete"] > report.constrained["cut"]
    assert report.requests["equal"] + report.requests["left"] == report.num_requests >= num_requests


@pytest.mark.timeout(900)
@pytest.mark.parametrize("transport", ["zmq", "nixl"])
def test_random_faults_change_no_output_and_leave_nothing(transport: str, tmp_path: Path) -> None:
    if transport == "nixl" and NO_NIXL:
        pytest.skip(NO_NIXL)
    seed = int(time.time())
    print(f"seed {seed}")
    settings = StackSettings(transport=transport, num_routers=2, request_timeout_s=150)
    options = StormOptions(120, seed, num_kinds=40, pause_s=0.3, min_faults=5)
    report = asyncio.run(run_storm(tmp_path, settings, options))
    print_report(report)
    assert not report.errors
    assert sum(report.faults.values()) >= 5
    assert report.requests["equal"] + report.requests["left"] == report.num_requests >= 120
