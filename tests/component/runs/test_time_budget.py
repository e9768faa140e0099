"""A run of pytest with a budget of time: what is executed first, and what is skipped."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.time_budget import LONGEST_TEST_S, MOST_VALUABLE

ROOT = Path(__file__).parents[3]
TWO_TESTS = "def test_one(): pass\ndef test_two(): pass\n"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = always\n")
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["tests.time_budget"]\n')
    faults = tmp_path / "faults"
    faults.mkdir()
    for name in ("test_another.py", "test_processes.py", "test_storm.py"):
        (faults / name).write_text(TWO_TESTS)
    (tmp_path / "test_unit.py").write_text(TWO_TESTS)
    return tmp_path


def executed(project: Path, *args: str) -> tuple[list[str], str]:
    """The tests in their order, and the output."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "COV"))}
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-p", "no:asyncio", *args]
    done = subprocess.run(
        command, cwd=project, env=environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    return re.findall(r"(\S+::test_\w+) PASSED", done.stdout), done.stdout


def test_under_a_budget_the_first_test_of_each_fault_file_goes_first(project: Path) -> None:
    order, _ = executed(project, f"--time-budget-s={LONGEST_TEST_S + 3600}")
    files = ["storm", "processes", "another"]
    expected = [f"faults/test_{file}.py::test_{number}" for number in ("one", "two") for file in files]
    assert order == [*expected, "test_unit.py::test_one", "test_unit.py::test_two"]


def test_without_a_budget_the_order_stays(project: Path) -> None:
    order, _ = executed(project)
    files = ["faults/test_another", "faults/test_processes", "faults/test_storm", "test_unit"]
    assert order == [f"{file}.py::test_{number}" for file in files for number in ("one", "two")]


def test_what_may_end_too_late_is_skipped(project: Path) -> None:
    order, output = executed(project, f"--time-budget-s={LONGEST_TEST_S}", "-rs")
    assert order == [] and "8 skipped" in output and "no time left" in output


def test_what_is_marked_always_goes_first_and_is_not_skipped(project: Path) -> None:
    (project / "test_wheel.py").write_text(f"import pytest\n{TWO_TESTS}@pytest.mark.always\ndef test_three(): pass\n")
    order, _ = executed(project, f"--time-budget-s={LONGEST_TEST_S + 3600}")
    assert order[0] == "test_wheel.py::test_three" and len(order) == 11
    order, output = executed(project, f"--time-budget-s={LONGEST_TEST_S}", "-rs")
    assert order == ["test_wheel.py::test_three"] and "10 skipped" in output


def test_what_ran_is_counted_by_kind_and_summed_over_runs(project: Path, tmp_path: Path) -> None:
    counts = tmp_path / "counts"
    _, output = executed(project, f"--counts={counts}")
    assert "faults: 6 passed" in output
    executed(project, f"--counts={counts}", f"--time-budget-s={LONGEST_TEST_S}")
    command = [sys.executable, "-m", "tests.time_budget", str(counts)]
    summed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert summed[0] == "faults: 6 passed, 6 left out for time"
    assert summed[-1] == "8 passed, 0 failed, 8 skipped"


def test_the_files_named_exist() -> None:
    assert [name for name in MOST_VALUABLE if not (ROOT / "tests" / "faults" / name).exists()] == []
