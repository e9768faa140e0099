"""What the plots of the commands have in common. They need matplotlib (the extra `bench`), which is imported late."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

SUFFIXES = (".svg", ".png", ".pdf")


class NoMatplotlib(Exception):
    """The text says how to get it."""


def check_plot(path: Path) -> None:
    """Raises NoMatplotlib, and ValueError for a file of another kind, before a long run."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise NoMatplotlib("--plot needs matplotlib: pip install 'kvrelay[bench]'") from error
    if path.suffix not in SUFFIXES:
        raise ValueError(f"--plot {path}: must end in .svg, .png or .pdf")


def panels(count: int) -> tuple[Any, Any]:
    """A figure and its axes, side by side."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    made: tuple[Any, Any] = pyplot.subplots(1, count, figsize=(4.2 * count, 3.6), layout="constrained")
    return made


def save(figure: Any, path: Path) -> None:
    """Writes the file and lets go of the figure."""
    from matplotlib import pyplot

    figure.savefig(path)
    pyplot.close(figure)


def shares_below(axis: Any, values_s: Sequence[float] | NDArray[np.float64], name: str) -> None:
    """One line: which share of requests took at most so many milliseconds."""
    values = np.sort(np.asarray(values_s)) * 1e3
    axis.step(values, np.arange(1, len(values) + 1) / max(1, len(values)), where="post", label=name)


def label_shares(axis: Any, title: str) -> None:
    """Of a panel with `shares_below`."""
    axis.set_xlabel(f"{title}, ms")
    axis.set_ylabel("share of requests")
    axis.set_ylim(0, 1)
    axis.grid(alpha=0.3)
