"""Throughput against latency, one line per server. Needs matplotlib (the extra `bench`)."""

from __future__ import annotations

from pathlib import Path

from benchmarks.peers.cases import FIGURES
from benchmarks.peers.results import Run
from benchmarks.peers.statistics import Statistic, statistic

PLOTTED = ("ttft_p50", "gap_p50", "gap_p99")


def draw(run: Run, path: Path) -> None:
    """Draws one panel per latency: medians over the rounds, bars from least to most, a point per load."""
    titles = {each.key: each.title for each in FIGURES[run.about["case"]]}
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(PLOTTED), figsize=(4.2 * len(PLOTTED), 3.6), layout="constrained")
    for axis, key in zip(axes, PLOTTED, strict=True):
        for server in run.servers:
            points = _points(run, server, key)
            if not points:
                continue
            x, y = [each[0] for each in points], [each[1] for each in points]
            errors = [[p.median - p.least for p in y], [p.most - p.median for p in y]]
            axis.errorbar(
                [each.median for each in x],
                [1e3 * each.median for each in y],
                yerr=[[1e3 * value for value in side] for side in errors],
                marker="o",
                capsize=3,
                label=server,
            )
        axis.set_xlabel("output tokens/s")
        axis.set_ylabel(titles[key])
        axis.set_yscale("log")
        axis.grid(alpha=0.3)
    lines, names = axes[0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=4, fontsize="small")
    figure.savefig(path)
    pyplot.close(figure)


def _points(run: Run, server: str, key: str) -> list[tuple[Statistic, Statistic]]:
    """Throughput and latency of each load that has both."""
    found = []
    for load in run.loads:
        rate = statistic(list(run.values(server, load, "output_tokens_s").values()))
        latency = statistic(list(run.values(server, load, key).values()))
        if rate is not None and latency is not None:
            found.append((rate, latency))
    return found
