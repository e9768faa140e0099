"""A test that hangs in C code fails, shows where it hung, and costs no other test."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
HANGS = """
import signal
import zmq

def test_first():
    pass

def test_hangs():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})  # nothing interrupts the call
    context = zmq.Context()
    socket = context.socket(zmq.PUSH)
    context.term()

def test_last():
    pass
"""
SLOW = """
import time
import pytest

@pytest.mark.parametrize("number", range(3))
def test_passes(number):
    time.sleep(0.1)
"""
SETTINGS = """
[pytest]
timeout = 2
time_limit_grace = 0
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "pytest.ini").write_text(SETTINGS)
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["tests.time_limit"]\n')
    (tmp_path / "test_a.py").write_text(HANGS)
    for name in "bcd":
        (tmp_path / f"test_{name}.py").write_text(SLOW)
    return tmp_path


def run_pytest(project: Path, *args: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "COV"))}
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-p", "no:asyncio", *args]
    return subprocess.run(
        command,
        cwd=project,
        env=environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_a_hang_is_one_failed_test_and_all_others_run(project: Path) -> None:
    done = run_pytest(project, "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")
    assert done.returncode == 1, done.stdout
    passed = re.findall(r"PASSED (\S+)", done.stdout)
    others = [f"test_{name}.py::test_passes[{number}]" for name in "bcd" for number in range(3)]
    assert sorted(passed) == sorted(["test_a.py::test_first", "test_a.py::test_last", *others]), done.stdout
    assert re.findall(r"^\[gw\d\].*FAILED (\S+)", done.stdout, re.MULTILINE) == ["test_a.py::test_hangs"]
    assert "crashed while running 'test_a.py::test_hangs'" in done.stdout
    assert re.search(r"zmq/sugar/context.py\", line \d+ in term\n.*in test_hangs", done.stdout), done.stdout


def test_without_other_processes_a_hang_ends_the_run_with_its_stack(project: Path) -> None:
    done = run_pytest(project)
    assert done.returncode == 1, done.stdout
    assert "PASSED" in done.stdout
    assert re.search(r"zmq/sugar/context.py\", line \d+ in term\n.*in test_hangs", done.stdout), done.stdout


def test_pytest_runs_without_xdist(project: Path) -> None:
    done = run_pytest(project, "-p", "no:xdist", "test_b.py")
    assert done.returncode == 0 and "3 passed" in done.stdout, done.stdout


def test_a_process_that_cannot_end_is_ended(project: Path) -> None:
    (project / "test_a.py").write_text(
        "import threading\ndef test_leaves_a_thread():\n    threading.Thread(target=threading.Event().wait).start()\n"
    )
    conftest = project / "conftest.py"
    conftest.write_text(conftest.read_text() + "import tests.time_limit\ntests.time_limit.END_LIMIT_S = 2.0\n")
    done = run_pytest(project, "test_a.py")
    assert done.returncode == 1 and "1 passed" in done.stdout, done.stdout
    assert "in _shutdown" in done.stdout, done.stdout


def test_files_that_share_a_stack_run_in_one_process_and_others_spread(project: Path) -> None:
    (project / "test_a.py").unlink()
    folder = project / "tests" / "demo_stack"
    folder.mkdir(parents=True)
    for name in "efg":
        (folder / f"test_{name}.py").write_text(SLOW)
    done = run_pytest(project, "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")
    assert done.returncode == 0 and "18 passed" in done.stdout, done.stdout
    ran = re.findall(r"^\[(gw\d)\].*PASSED (\S+)::", done.stdout, re.MULTILINE)
    assert len({process for process, file in ran if "/demo_stack/" in file}) == 1, done.stdout
    assert {process for process, _ in ran} == {"gw0", "gw1"}, done.stdout
