"""Plots of simulated runs. Needs matplotlib (the extra `bench`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from kvrelay.telemetry.plots import label_shares, legend_below, panels, save, shares_below
from kvrelay_simulator.results import RunFigures, RunResult, RunSlo


def draw_runs(runs: Sequence[RunResult], slo: RunSlo, path: Path, title: str) -> None:
    """Draws latencies with the SLO, goodput, hit rates and utilisation of each run."""
    figure, axes = panels(4)
    figure.suptitle(title)
    for run in runs:
        shares_below(axes[0], run.times.ttft_s, run.name)
        shares_below(axes[1], run.times.tpot_s, run.name)
    for axis, name, bound_s in ((axes[0], "TTFT", slo.ttft_s), (axes[1], "TPOT", slo.tpot_s)):
        label_shares(axis, name)
        if isfinite(bound_s):
            axis.axvline(1e3 * bound_s, color="black", linestyle=":", label="SLO")
    axes[0].set_xscale("log")
    legend_below(axes[0])
    _bars(axes[2], runs, "requests/s that keep the SLO", {"goodput": lambda f: f.goodput})
    shares: dict[str, Callable[[RunFigures], float]] = {
        "hit rate": lambda f: f.hit_rate,
        "of the best": lambda f: f.hit_share if f.can_hit else 0.0,
        "prefill busy": lambda f: f.prefill_utilisation,
        "decode busy": lambda f: f.decode_utilisation,
    }
    _bars(axes[3], runs, "share", shares)
    save(figure, path)


def draw_sweep(runs: Sequence[RunResult], slo: RunSlo, path: Path, title: str) -> None:
    """Draws goodput, latencies and utilisation over the number of prefill workers."""
    figure, axes = panels(3)
    figure.suptitle(title)
    counts = [run.num_prefill for run in runs]
    _line(axes[0], counts, runs, "goodput", lambda f: f.goodput)
    for name, value, bound_s in (
        ("TTFT p90 / SLO", lambda f: f.ttft_p90_s / slo.ttft_s, slo.ttft_s),
        ("TPOT p90 / SLO", lambda f: f.tpot_p90_s / slo.tpot_s, slo.tpot_s),
    ):
        if isfinite(bound_s):
            _line(axes[1], counts, runs, name, value)
    axes[1].axhline(1.0, color="black", linestyle=":")
    _line(axes[2], counts, runs, "prefill busy", lambda f: f.prefill_utilisation)
    _line(axes[2], counts, runs, "decode busy", lambda f: f.decode_utilisation)
    axes[1].set_yscale("log")
    axes[2].set_ylim(0, 1)
    for axis, name in zip(axes, ("requests/s that keep the SLO", "latency", "share of time"), strict=True):
        axis.set_xlabel("prefill workers")
        axis.set_ylabel(name)
        axis.grid(alpha=0.3)
        legend_below(axis)
    save(figure, path)


def _line(
    axis: Any, counts: Sequence[int], runs: Sequence[RunResult], name: str, value: Callable[[RunFigures], float]
) -> None:
    axis.plot(counts, [value(run.figures) for run in runs], marker="o", label=name)


def _bars(axis: Any, runs: Sequence[RunResult], title: str, values: dict[str, Callable[[RunFigures], float]]) -> None:
    """Draws one group of bars per run."""
    height = 0.8 / len(values)
    for number, (name, value) in enumerate(values.items()):
        places = [place + number * height for place in range(len(runs))]
        axis.barh(places, [value(run.figures) for run in runs], height, label=name)
    axis.set_yticks([place + 0.4 - height / 2 for place in range(len(runs))], [run.name for run in runs])
    axis.invert_yaxis()
    axis.set_xlabel(title)
    if len(values) > 1:
        legend_below(axis)
