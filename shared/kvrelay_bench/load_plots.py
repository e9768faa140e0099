"""Plots of a run. Needs matplotlib (the extra `bench`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from kvrelay.telemetry.plots import label_shares, legend_below, panels, save, shares_below
from kvrelay_bench.answer_reader import Record
from kvrelay_bench.load_figures import LoadFigures


@dataclass(frozen=True, slots=True)
class PlottedLoad:
    """Figures and requests of one load on one endpoint in one round."""

    endpoint: str
    load: str
    figures: LoadFigures
    records: Sequence[Record]


def draw(results: Sequence[PlottedLoad], path: Path) -> None:
    """Draws the share of requests below each latency, and for several loads throughput against latency."""
    loads = list(dict.fromkeys(each.load for each in results))
    endpoints = list(dict.fromkeys(each.endpoint for each in results))
    num_panels = 4 if len(loads) > 1 else 3
    figure, axes = panels(num_panels)
    for endpoint in endpoints:
        side = [each for each in results if each.endpoint == endpoint]
        prefix = f"{endpoint}: " if len(endpoints) > 1 else ""
        for load in loads:
            _latencies(axes, [each for each in side if each.load == load], f"{prefix}{load}")
        if num_panels == 4:
            _throughput(axes[3], side, loads, prefix)
    for axis, title in zip(axes, ("time to first token", "time per output token", "whole answer"), strict=False):
        label_shares(axis, title)
    lines, names = axes[0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=4, fontsize="small")
    save(figure, path)


def _latencies(axes: Any, rounds: Sequence[PlottedLoad], name: str) -> None:
    good = [record for each in rounds for record in each.records if not record.error]
    shares_below(axes[0], [record.ttft_s for record in good], name)
    shares_below(axes[1], [record.tpot_s for record in good if record.tpot_s is not None], name)
    shares_below(axes[2], [record.e2e_s for record in good], name)


def _throughput(axis: Any, results: Sequence[PlottedLoad], loads: Sequence[str], prefix: str) -> None:
    """One point per load: medians over its rounds."""
    of_loads = [[each.figures for each in results if each.load == load] for load in loads]
    rates = [median(each.requests_s for each in rounds) for rounds in of_loads]
    for quantile, marker in (("p50", "o"), ("p99", "s")):
        latencies = [1e3 * median(getattr(each.ttft_s, quantile) for each in rounds) for rounds in of_loads]
        axis.plot(rates, latencies, marker=marker, linestyle="-", label=f"{prefix}TTFT {quantile}")
    axis.set_xlabel("requests/s")
    axis.set_ylabel("ms")
    axis.set_yscale("log")
    axis.grid(alpha=0.3)
    legend_below(axis)
