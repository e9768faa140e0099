"""Steps of a GPU run: their time, and what a run that is killed, fails or hangs leaves to the next one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.gpu import journal
from benchmarks.gpu.figures import figures
from benchmarks.gpu.report import markdown
from benchmarks.gpu.run_steps import Run
from benchmarks.gpu.steps import STEPS, Step
from tests.fakes.waiting import PATIENCE_S, wait_until

HEADER = {
    "machine": {"GPU": "H0", "load average before": "1"},
    "versions": {"torch": "2"},
    "scale": "tiny",
    "command": "x",
}
GOOD, BAD, DEAF = ["true"], ["false"], [sys.executable, "-c", """
import signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "600"])
print("child", child.pid, flush=True)
time.sleep(600)
"""]  # fmt: skip


def step(name: str, limit_s: float = PATIENCE_S, *, always: bool = False) -> Step:
    return Step(name, name.title(), limit_s, always=always)


def make(out: Path, commands: dict[str, list[str]], total_s: float = 10 * PATIENCE_S) -> Run:
    return Run(out, HEADER, total_s, lambda step, limit_s, passed: commands[step.name], grace_s=0.2)


def states(run: Run) -> dict[str, list[str]]:
    return {name: [each.state for each in attempts] for name, attempts in journal.read(run.path).items()}


def test_a_failure_stops_nothing_and_is_tried_again_behind_what_was_never_tried(tmp_path: Path) -> None:
    steps = [step("floors", always=True), step("bad"), step("good"), step("late")]
    words = [sys.executable, "-c", "print('out of luck'); raise SystemExit(3)"]
    run = make(tmp_path, {"floors": GOOD, "bad": words, "good": GOOD})
    assert not run.all(steps[:3])
    failed = "failed with status 3: out of luck"
    assert states(run) == {"floors": ["done"], "bad": [failed], "good": ["done"]}
    run = make(tmp_path, {"floors": GOOD, "bad": GOOD, "late": GOOD})
    assert run.all(steps), "`good` would have no command"
    assert states(run) == {"floors": ["done", "done"], "bad": [failed, "done"], "good": ["done"], "late": ["done"]}
    order = re.findall(r"=== (\w+)", (tmp_path / "gpu.log").read_text())
    assert order == ["floors", "bad", "good", "floors", "late", "bad"]


def test_a_step_that_hangs_is_killed_with_what_it_started(tmp_path: Path) -> None:
    run = make(tmp_path, {"deaf": DEAF, "good": GOOD})
    assert not run.all([step("deaf", 1.0), step("good")])
    assert states(run)["deaf"][0].startswith("cut off after 1 s: child")
    assert states(run)["good"] == ["done"]
    child = int(re.findall(r"child (\d+)", (tmp_path / "gpu.log").read_text())[0])
    wait_until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE)


def test_time_that_is_short_goes_to_steps_that_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make(tmp_path, {"short": GOOD}, total_s=30.0)
    assert not run.all([step("long", 1000.0), step("short", 5.0)])
    assert states(run) == {"short": ["done"]}
    assert re.search(r"long +no time was left: \d+ s of 1000", capsys.readouterr().out)


def test_a_killed_run_leaves_no_step_and_goes_on_behind_a_torn_line(tmp_path: Path) -> None:
    program = """
import sys
from pathlib import Path
from tests.component.benchmarks.test_gpu_steps import DEAF, GOOD, make, step
make(Path(sys.argv[1]), {"good": GOOD, "deaf": DEAF}).all([step("good"), step("deaf")])
"""
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.DEVNULL)
    log = tmp_path / "gpu.log"
    wait_until(lambda: log.exists() and "child" in log.read_text())
    running = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    assert not psutil.wait_procs(running, PATIENCE_S)[1], "they would have the device"
    run = make(tmp_path, {"deaf": GOOD})
    recorder = journal.Recorder(run.path, "deaf", deadline=0.0)
    recorder.row("Table", step_ms=figures([1.0, 2.0]))
    with run.path.open("a") as file:
        file.write('{"step": "deaf", "table": "Tab')
    assert run.all([step("good"), step("deaf")])
    assert states(run) == {"good": ["done"], "deaf": [journal.KILLED, "done"]}
    cells = {"step ms": {"figures": [1.0, 2.0], "digits": 2}}
    assert journal.read(run.path)["deaf"][0].rows == [{"table": "Table", "cells": cells}]


def test_tests_that_passed_are_left_out_of_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tests = tmp_path / "test_some.py"
    tests.write_text(
        "import pytest\ndef test_a(): pass\n@pytest.mark.parametrize('x', ['b c'])\ndef test_b(x): assert 0\n"
    )
    chosen = Step("first", "First", PATIENCE_S, (str(tests),)), Step("second", "Second", PATIENCE_S, (str(tests),))

    def command(step: Step, limit_s: float, passed: list[str]) -> list[str]:
        return step.command(device="cuda", smoke=False, out=tmp_path, limit_s=limit_s, passed=passed)

    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # of this test's own process
    run = Run(tmp_path / "out", HEADER, 10 * PATIENCE_S, command)
    assert not run.all(chosen)
    found = {name: journal.outcomes(attempts) for name, attempts in journal.read(run.path).items()}
    assert [list(each.values()) for each in found.values()] == [["passed", "failed"], ["failed"]]
    tests.write_text(tests.read_text().replace("assert 0", "pass"))
    assert run.all(chosen), "the second step has none left"
    tests.write_text("import pytest\ndef test_c(): pytest.skip('no device')\n")
    assert not run.all([Step("third", "Third", PATIENCE_S, (str(tests),))])
    assert states(run)["third"][0].startswith("no test passed: ")


@pytest.mark.parametrize("change", [{}, {"scale": "other"}, {"versions": {"torch": "3"}}, {"machine": {"GPU": "H1"}}])
def test_only_figures_of_the_same_setting_are_kept(tmp_path: Path, change: dict[str, object]) -> None:
    first = make(tmp_path, {"good": GOOD})
    assert first.all([step("good")])
    later = Run(tmp_path, HEADER | {"command": "y"} | change, PATIENCE_S, lambda *_: BAD)
    assert later.all([step("good")]) == (not change)


def test_the_page_shows_the_latest_figures_with_the_floors_of_their_run(tmp_path: Path) -> None:
    path = tmp_path / "gpu.jsonl"
    for rate, ended in ((40.0, ("decode", "parity")), (50.0, ("decode",))):
        journal.append(path, {"run": HEADER})
        journal.Recorder(path, "floors", 0.0).row("Floors", what="copy", rate=figures([rate], 1), unit="GB/s")
        journal.append(path, {"step": "floors", "state": "done", "seconds": 1.0})
        if rate < 50.0:
            journal.Recorder(path, "decode", 0.0).row("Decoding step", batch=1, step_ms=figures([2.0]))
        for name in ended:
            journal.append(path, {"step": name, "state": "failed with status 1: why", "seconds": 1.0})
    page = markdown(journal.read(path), HEADER)
    assert "**Parity failed: no figure counts.**" in page
    assert "**decode: failed with status 1: why.**" in page
    assert "| 1 | 2.00 (2.00 to 2.00) |" in page
    assert "- Of an earlier run, in which the device did: copy 40.0 GB/s." in page


def test_steps_say_what_they_are_without_importing_torch() -> None:
    looks = "import sys; from benchmarks.gpu import __main__, steps; [step.about for step in steps.STEPS]; "
    looks += "print('torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", looks], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "False"
    assert len({step.name for step in STEPS}) == len(STEPS)
