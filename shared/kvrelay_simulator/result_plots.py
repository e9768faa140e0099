"""The plot of simulated runs. Needs matplotlib (the extra `bench`), which is imported on use."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from kvrelay_simulator.results import RunFigures, RunResult, RunSlo

SUFFIXES = (".svg", ".png", ".pdf")


def check_plot(path: Path) -> None:
    """Checks before a long run. Raises ValueError if matplotlib is missing, or for an unsupported file type."""
    if find_spec("matplotlib") is None:
        raise ValueError(f"--plot needs matplotlib: {sys.executable} -m pip install matplotlib")
    if path.suffix not in SUFFIXES:
        raise ValueError(f"--plot {path}: must end in .svg, .png or .pdf")


def draw_runs(runs: Sequence[RunResult], slo: RunSlo, path: Path, title: str) -> None:
    """Draws latencies with the SLO, goodput, hit rates and utilisation of each run."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 4, figsize=(16.8, 3.6), layout="constrained")
    figure.suptitle(title)
    for run in runs:
        for axis, values_s in ((axes[0], run.times.ttft_s), (axes[1], run.times.tpot_s)):
            shares = np.arange(1, len(values_s) + 1) / max(1, len(values_s))
            axis.step(1e3 * np.sort(values_s), shares, where="post", label=run.name)
    for axis, name, bound_s in ((axes[0], "TTFT", slo.ttft_s), (axes[1], "TPOT", slo.tpot_s)):
        axis.set(xlabel=f"{name}, ms", ylabel="share of requests", ylim=(0, 1))
        axis.grid(alpha=0.3)
        if isfinite(bound_s):
            axis.axvline(1e3 * bound_s, color="black", linestyle=":", label="SLO")
    axes[0].set_xscale("log")
    _legend_below(axes[0])
    _bars(axes[2], runs, "requests/s that keep the SLO", {"goodput": lambda f: f.goodput})
    shares_of: dict[str, Callable[[RunFigures], float]] = {
        "hit rate": lambda f: f.hit_rate,
        "of the best": lambda f: f.hit_share if f.can_hit else 0.0,
        "prefill busy": lambda f: f.prefill_utilisation,
        "decode busy": lambda f: f.decode_utilisation,
    }
    _bars(axes[3], runs, "share", shares_of)
    _legend_below(axes[3])
    figure.savefig(path)
    pyplot.close(figure)


def _legend_below(axis: Any) -> None:
    """Puts the legend under the panel, where it hides no curve."""
    axis.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2)


def _bars(
    axis: Any, runs: Sequence[RunResult], title: str, values: Mapping[str, Callable[[RunFigures], float]]
) -> None:
    """Draws one group of bars per run."""
    height = 0.8 / len(values)
    for number, (name, value) in enumerate(values.items()):
        places = [place + number * height for place in range(len(runs))]
        axis.barh(places, [value(run.figures) for run in runs], height, label=name)
    axis.set_yticks([place + 0.4 - height / 2 for place in range(len(runs))], [run.name for run in runs])
    axis.invert_yaxis()
    axis.set_xlabel(title)
