"""Pictures of a run; needs matplotlib (the extra `bench`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvrelay_bench.answer import Record
from kvrelay_bench.measure import Figures

Drawn = Sequence[tuple[str, Figures, Sequence[Record]]]


class NoMatplotlib(Exception):
    """The text says how to get it."""


def check_plot(path: Path) -> None:
    """Raises NoMatplotlib, and ValueError for a file of another kind, before a long run."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise NoMatplotlib("--plot needs matplotlib: pip install 'kvrelay[bench]'") from error
    if path.suffix not in (".svg", ".png", ".pdf"):
        raise ValueError(f"--plot {path}: must end in .svg, .png or .pdf")


def draw(results: Drawn, path: Path) -> None:
    """Shares of requests below each latency, and with several loads their throughput against latency."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    panels = 4 if len(results) > 1 else 3
    figure, axes = pyplot.subplots(1, panels, figsize=(4.2 * panels, 3.6), layout="constrained")
    for name, _, records in results:
        good = [record for record in records if not record.error]
        _below(axes[0], [record.ttft_s for record in good], name)
        _below(axes[1], [record.tpot_s for record in good if record.tpot_s is not None], name)
        _below(axes[2], [record.e2e_s for record in good], name)
    for axis, title in zip(axes, ("time to first token", "time per output token", "whole answer"), strict=False):
        axis.set_xlabel(f"{title}, ms")
        axis.set_ylabel("share of requests")
        axis.set_ylim(0, 1)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize="small")
    if panels == 4:
        _throughput(axes[3], results)
    figure.savefig(path)
    pyplot.close(figure)


def _below(axis: Any, values_s: Sequence[float], name: str) -> None:
    values = np.sort(np.asarray(values_s)) * 1e3
    axis.step(values, np.arange(1, len(values) + 1) / max(1, len(values)), where="post", label=name)


def _throughput(axis: Any, results: Drawn) -> None:
    for quantile, marker in (("p50", "o"), ("p99", "s")):
        rates = [figures.requests_s for _, figures, _ in results]
        latencies = [1e3 * getattr(figures.ttft_s, quantile) for _, figures, _ in results]
        axis.plot(rates, latencies, marker=marker, linestyle="-", label=f"TTFT {quantile}")
    axis.set_xlabel("requests/s")
    axis.set_ylabel("ms")
    axis.set_yscale("log")
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small")
