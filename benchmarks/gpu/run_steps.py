"""Runs steps one after the other, within the time of all together, and keeps the journal."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.gpu import journal
from benchmarks.gpu.outcomes import JOURNAL, STEP
from benchmarks.gpu.steps import Step

GRACE_S = 10.0
"""A step ends itself between rows or tests when it is interrupted; only one that hangs is ended by force."""
_WORTH_IT = 0.4  # of a step's time: with less, a shorter one is tried
_PR_SET_CHILD_SUBREAPER = 36
_GUARD = ["sh", "-c", 'cat; kill -s KILL -- "-$0" 2>/dev/null || :']
"""Kills a process group once its input is closed, which it also is when this process is killed: a step that went on
would take the device from the next run."""
_NO_TESTS_LEFT = 5  # pytest's status
NO_TIME = "no time was left"


@dataclass
class Run:
    """One call. `out`: the folder of the journal (`gpu.jsonl`) and of the steps' output (`gpu.log`). `header`: on what
    it runs. `command`: of a step with so many seconds, without tests of these ids."""

    out: Path
    header: dict[str, Any]
    total_s: float
    command: Callable[[Step, float, list[str]], list[str]]
    on_end: Callable[[], None] = lambda: None
    grace_s: float = GRACE_S

    @property
    def path(self) -> Path:
        """Of the journal."""
        return self.out / "gpu.jsonl"

    def all(self, steps: Sequence[Step]) -> bool:
        """Runs those that are not done, and never tried ones first. Returns whether all are done."""
        ended_at = time.monotonic() + self.total_s
        self.out.mkdir(parents=True, exist_ok=True)
        tried = journal.read(self.path)
        done = {name for name, attempts in tried.items() if self._is_kept(attempts[-1])}
        with self.path.open("ab") as file:
            file.write(b"\n")  # behind a line that was cut off
        journal.append(self.path, {"run": self.header})
        for step in sorted(steps, key=lambda step: not step.always and step.name in tried):
            if step.name in done and not step.always:
                print(f"{step.name:<14} {'':>6}  kept from an earlier run", flush=True)
                continue
            left_s = ended_at - time.monotonic() - self.grace_s
            if left_s < _WORTH_IT * step.limit_s:
                print(f"{step.name:<14} {'':>6}  {NO_TIME}: {max(0.0, left_s):.0f} s of {step.limit_s:g}", flush=True)
                continue
            if self._step(step, min(step.limit_s, left_s)):
                done.add(step.name)
        return {step.name for step in steps} <= done

    def _is_kept(self, attempt: journal.Attempt) -> bool:
        return attempt.state == journal.DONE and same_setting(attempt.run, self.header)

    def _step(self, step: Step, limit_s: float) -> bool:
        """Returns whether it is done."""
        command = self.command(step, limit_s, self._passed() if step.tests is not None else [])
        environ = {**os.environ, STEP: step.name, JOURNAL: str(self.path.resolve())}
        log, started = self.out / "gpu.log", time.monotonic()
        with log.open("ab") as output:
            output.write(f"\n=== {step.name}, {limit_s:.0f} s at most\n".encode())
            begin = output.tell()
        state = run_limited(command, limit_s, log, self.grace_s, environ)
        seconds = round(time.monotonic() - started, 1)
        said = log.read_bytes()[begin:].decode(errors="replace").strip()
        if step.tests is not None:
            state = self._state_of_tests(step, state)
        if state != journal.DONE:
            state += f": {said.splitlines()[-1][-200:]}" if said else ""
        journal.append(self.path, {"step": step.name, "state": state, "seconds": seconds})
        print(f"{step.name:<14} {seconds:6.1f}s {state}", flush=True)
        self.on_end()
        return state == journal.DONE

    def _state_of_tests(self, step: Step, state: str) -> str:
        """Tests that were all left out are done; those that were all skipped are not."""
        if state.endswith(f"status {_NO_TESTS_LEFT}"):
            return journal.DONE
        found = set(journal.outcomes(journal.read(self.path).get(step.name, [])[-1:]).values())
        return state if state != journal.DONE or "passed" in found else "no test passed"

    def _passed(self) -> list[str]:
        """Ids of tests, whichever step ran them."""
        tests: dict[str, str] = {}
        for attempts in journal.read(self.path).values():
            tests |= journal.outcomes([each for each in attempts if same_setting(each.run, self.header)])
        return [name for name, outcome in tests.items() if outcome == "passed"]


def same_setting(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether figures of the two runs can stand on one page: the same GPU, versions and scale."""
    return all(_lasting(one.get(name)) == _lasting(other.get(name)) for name in ("machine", "versions", "scale"))


def _lasting(value: object) -> object:
    """Without what changes from machine to machine of one kind."""
    changes = ("load", "driver", "cores")
    return {k: v for k, v in value.items() if not k.startswith(changes)} if isinstance(value, dict) else value


def run_limited(
    command: list[str], limit_s: float, log: Path, grace_s: float = GRACE_S, environ: dict[str, str] | None = None
) -> str:
    """Runs it, for `grace_s` beyond its limit at most, with its output appended to `log`. Returns how it ended; nothing
    of its process group is left then."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, process_group=0, env=environ
        )
    guard = subprocess.Popen([*_GUARD, str(process.pid)], stdin=subprocess.PIPE, process_group=0)
    try:
        status = process.wait(limit_s)
        return journal.DONE if status == 0 else f"failed with status {status}"
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # what it started ends with it
        with suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
        return f"cut off after {limit_s:.0f} s"
    finally:
        guard.communicate()
        process.wait()


def adopt_orphans() -> None:
    """From now on, what steps leave behind becomes a child of this process, whatever its session; see `end_orphans`."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_orphans() -> None:
    """Kills what steps have left running."""
    left = psutil.Process().children(recursive=True)
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, GRACE_S)
