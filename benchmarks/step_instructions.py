"""Instructions of a step's bookkeeping, `schedule` and `commit`, counted by valgrind for one checkout or several.

The steps of schedule_cost.py: sequences that decode, and sequences that come and go besides. Counts do not depend on
other work on the machine, so checkouts can be compared within about a percent. Each checkout runs its own
schedule_cost.py. Needs valgrind (callgrind and its headers) and a C compiler.

Usage: python -m benchmarks.step_instructions [CHECKOUT ...] [--running 64,256] [--steps 40] [--keep FOLDER]
       CHECKOUT: worktrees to count, by default this one.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

WARM_STEPS = 20
CASES = ("decoding", "admitting")


def counted(arguments: argparse.Namespace, checkout: Path) -> dict[str, dict[str, float]]:
    """Thousands of instructions a step, by case and by `schedule` and `commit`."""
    from benchmarks.router_cost import python_path  # the child's checkout may lack these
    from benchmarks.router_instructions import DUMP, switch_library

    found: dict[str, dict[str, float]] = {}
    environ = {**os.environ, "PYTHONPATH": python_path(checkout), "PYTHONHASHSEED": "0"}
    for case in CASES:
        for running in arguments.running:
            with tempfile.TemporaryDirectory() as temporary:
                folder = Path(arguments.keep or temporary) / checkout.name / f"{case}_{running}"
                folder.mkdir(parents=True, exist_ok=True)
                switch = switch_library(folder)
                command = ["valgrind", "-q", "--tool=callgrind", "--instr-atstart=no"]
                command += [f"--callgrind-out-file={folder}/out", sys.executable, __file__]
                command += ["--child", str(switch), "--case", case]
                command += ["--running", str(running), "--steps", str(arguments.steps)]
                subprocess.run(command, env=environ, cwd=folder, check=True)
                parts = found.setdefault(f"{case}, {running} running", {})
                for dump in folder.glob("out.*"):
                    if total := DUMP.search(dump.read_text()):
                        parts[total[1]] = parts.get(total[1], 0.0) + int(total[2]) / arguments.steps / 1e3
    return found


class Clock:
    """Stands for `time` in schedule_cost.py: its steps ask for the time where `schedule` and `commit` begin and end."""

    def __init__(self, switch: Any) -> None:
        self._switch = switch
        self._num_calls = 0
        self.is_counting = False

    def process_time(self) -> float:
        turn = self._num_calls % 4
        self._num_calls += 1
        if self.is_counting:
            if turn in (0, 2):
                self._switch.start()
            else:
                self._switch.stop(b"schedule" if turn == 1 else b"commit")
        return 0.0


def run_case(case: str, running: int, num_steps: int, switch: Any) -> None:
    """Runs the steps of a case, and counts the last `num_steps`."""
    schedule_cost: Any = import_module("benchmarks.schedule_cost")  # that of the checkout that is measured
    if case == "decoding":
        scheduler = schedule_cost.decoding("sarathi", "fcfs", running, 2 * running, 2 * (WARM_STEPS + num_steps))
        clock = schedule_cost.time = Clock(switch)
        list(schedule_cost.timed_steps(scheduler, WARM_STEPS))
        gc.collect()
        clock.is_counting = True
        list(schedule_cost.timed_steps(scheduler, num_steps))
        return
    clock = Clock(switch)
    steps = schedule_cost.timed_steps

    class Admitting:
        """Asks for the time in steps alone: `admitting` also times arrivals."""

        process_time = staticmethod(lambda: 0.0)

    def timed(scheduler: Any, count: int) -> Any:
        schedule_cost.time = clock
        yield from list(steps(scheduler, count))
        schedule_cost.time = Admitting

    schedule_cost.time, schedule_cost.timed_steps = Admitting, timed
    for step, _ in enumerate(schedule_cost.admitting("sarathi", running, num_steps + WARM_STEPS)):
        clock.is_counting = step + 1 >= WARM_STEPS and step + 1 < num_steps + WARM_STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="*", type=Path, default=[Path(__file__).parents[1]])
    parser.add_argument("--running", default="64,256", help="sequences that run, comma-separated")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--keep", default="", help="a folder for callgrind's files")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.running = [int(each) for each in arguments.running.split(",")]
    if arguments.child is not None:
        run_case(arguments.case, arguments.running[0], arguments.steps, ctypes.CDLL(arguments.child))
        return
    for checkout in arguments.checkouts:
        for case, parts in counted(arguments, checkout.resolve()).items():
            figures = ", ".join(f"{part} {thousands:,.1f}" for part, thousands in sorted(parts.items()))
            print(f"{checkout}: {case}: {figures}; both {sum(parts.values()):,.1f} thousand instructions", flush=True)


if __name__ == "__main__":
    main()
