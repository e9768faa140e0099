"""Rows of results as they are kept, and as they are shown."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

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
