"""Shared parts of the commands' plots. matplotlib (the extra `bench`) is imported on use."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

SUFFIXES = (".svg", ".png", ".pdf")


class NoMatplotlib(Exception):
    """matplotlib is missing. The message says how to install it."""


def check_plot(path: Path) -> None:
    """Checks before a long run. Raises NoMatplotlib, or ValueError for an unsupported file type."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise NoMatplotlib(f"--plot needs matplotlib: {sys.executable} -m pip install matplotlib") from error
    if path.suffix not in SUFFIXES:
        raise ValueError(f"--plot {path}: must end in .svg, .png or .pdf")


def panels(count: int) -> tuple[Any, Any]:
    """Creates a figure with `count` axes side by side."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    made: tuple[Any, Any] = pyplot.subplots(1, count, figsize=(4.2 * count, 3.6), layout="constrained")
    return made


def save(figure: Any, path: Path) -> None:
    """Writes the file and closes the figure."""
    from matplotlib import pyplot

    figure.savefig(path)
    pyplot.close(figure)


def shares_below(axis: Any, values_s: Sequence[float] | NDArray[np.float64], name: str) -> None:
    """Draws one line: the share of requests that took at most x milliseconds."""
    values = np.sort(np.asarray(values_s)) * 1e3
    axis.step(values, np.arange(1, len(values) + 1) / max(1, len(values)), where="post", label=name)


def label_shares(axis: Any, title: str) -> None:
    """Labels a panel of `shares_below`."""
    axis.set_xlabel(f"{title}, ms")
    axis.set_ylabel("share of requests")
    axis.set_ylim(0, 1)
    axis.grid(alpha=0.3)


def legend_below(axis: Any) -> None:
    """Puts the legend under the panel, where it hides no curve."""
    axis.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2)
