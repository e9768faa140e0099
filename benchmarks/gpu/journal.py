"""The journal of GPU runs: one JSON object a line, written as things happen, so that a run that is killed leaves what
it has, and the next one goes on with it.

A line `{"run": ...}` begins a run and says on what it ran. The lines behind it are of its steps: rows, notes, outcomes
of tests, and last how the step ended. A step without such a line was killed with its run.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.figures import Cell, shown

DONE = "done"
KILLED = "killed with its run"


def append(path: Path, entry: dict[str, Any]) -> None:
    """One line, in one write: steps and their parts are processes of their own."""
    with path.open("ab", buffering=0) as file:
        file.write(json.dumps(entry).encode() + b"\n")


@dataclass
class Attempt:
    """What a run did of a step. `run`: the run's first line."""

    run: dict[str, Any]
    entries: list[dict[str, Any]] = field(default_factory=list)
    state: str = KILLED
    seconds: float = 0.0

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [entry for entry in self.entries if "table" in entry]


def read(path: Path) -> dict[str, list[Attempt]]:
    """The attempts at each step, in their order. Lines that were cut off in the middle are left out."""
    attempts: dict[str, list[Attempt]] = {}
    run: dict[str, Any] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        if "run" in entry:
            run = entry["run"]
            continue
        of_step = attempts.setdefault(entry.pop("step"), [])
        if not of_step or of_step[-1].run is not run:
            of_step.append(Attempt(run))
        if "state" in entry:
            of_step[-1].state, of_step[-1].seconds = entry["state"], entry["seconds"]
        else:
            of_step[-1].entries.append(entry)
    return attempts


def outcomes(attempts: list[Attempt]) -> dict[str, str]:
    """The last outcome of each test, by its id."""
    return {each["test"]: each["outcome"] for attempt in attempts for each in attempt.entries if "test" in each}


@dataclass
class Recorder:
    """Writes a step's rows to the journal as they come."""

    path: Path
    step: str
    deadline: float
    """On the clock of `time.monotonic`."""

    def row(self, table: str, **cells: Cell) -> None:
        """One more row of a table; names of cells are the columns' titles, `_` for a space."""
        named = {name.replace("_", " "): cell for name, cell in cells.items()}
        append(self.path, {"step": self.step, "table": table, "cells": named})
        print(f"  {table}: " + ", ".join(f"{name} {shown(cell)}" for name, cell in cells.items()), file=sys.stderr)

    def note(self, text: str) -> None:
        """A sentence below the tables."""
        append(self.path, {"step": self.step, "note": text})
        print(f"  {text}", file=sys.stderr)

    def has_time(self, what: str) -> bool:
        """Whether the step's time is not over; else that is noted, with what was left out."""
        if time.monotonic() < self.deadline:
            return True
        self.note(f"Not measured, for want of time: {what}.")
        return False
