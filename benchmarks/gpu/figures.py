"""Rows of results as they are kept, and as they are shown."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

Cell = str | int | float | dict[str, Any]
"""What a table's cell is made of: text, a number, or `figures`, one a repeat, with the digits to show."""


def figures(values: Sequence[float], digits: int = 2) -> Cell:
    """One value a repeat."""
    return {"figures": [float(value) for value in values], "digits": digits}


def ratios(above: Sequence[float], below: Sequence[float], digits: int = 2) -> Cell:
    """Of pairs taken in the same repeat."""
    return figures([a / b for a, b in zip(above, below, strict=True)], digits)


def shown(cell: Cell) -> str:
    """Figures as their median, with the least and the most."""
    if not isinstance(cell, dict):
        return f"{cell:,.3g}" if isinstance(cell, float) else str(cell)
    values, digits = cell["figures"], cell["digits"]
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"


def median(cell: Cell) -> float:
    """Of a cell with figures."""
    assert isinstance(cell, dict)
    return float(statistics.median(cell["figures"]))


@dataclass
class Recorder:
    """Writes a part's rows to a file as they come, so that what was measured outlives whatever comes then."""

    path: Path
    deadline: float
    """On the clock of `time.monotonic`."""
    _file: TextIO = field(init=False)

    def __post_init__(self) -> None:
        self._file = self.path.open("a", encoding="utf-8")

    def row(self, table: str, **cells: Cell) -> None:
        """One more row of a table; names of cells are the columns' titles, `_` for a space."""
        self._write({"table": table, "cells": {name.replace("_", " "): cell for name, cell in cells.items()}})
        print(f"  {table}: " + ", ".join(f"{name} {shown(cell)}" for name, cell in cells.items()), file=sys.stderr)

    def note(self, text: str) -> None:
        """A sentence below the tables."""
        self._write({"note": text})
        print(f"  {text}", file=sys.stderr)

    def has_time(self, what: str) -> bool:
        """Whether the part's time is not over; else that is noted, with what was left out."""
        if time.monotonic() < self.deadline:
            return True
        self.note(f"Not measured, for want of time: {what}.")
        return False

    def _write(self, entry: dict[str, Any]) -> None:
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()


def read_entries(path: Path) -> list[dict[str, Any]]:
    """What a recorder wrote; a line that was cut off in the middle is left out."""
    entries = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            entries.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return entries
