"""Pictures of a run; needs matplotlib (the extra `bench`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvrelay.telemetry.plots import label_shares, panels, save, shares_below
from kvrelay_bench.answer import Record
from kvrelay_bench.measure import Figures

Drawn = Sequence[tuple[str, Figures, Sequence[Record]]]


def draw(results: Drawn, path: Path) -> None:
    """Shares of requests below each latency, and with several loads their throughput against latency."""
    num_panels = 4 if len(results) > 1 else 3
    figure, axes = panels(num_panels)
    for name, _, records in results:
        good = [record for record in records if not record.error]
        shares_below(axes[0], [record.ttft_s for record in good], name)
        shares_below(axes[1], [record.tpot_s for record in good if record.tpot_s is not None], name)
        shares_below(axes[2], [record.e2e_s for record in good], name)
    for axis, title in zip(axes, ("time to first token", "time per output token", "whole answer"), strict=False):
        label_shares(axis, title)
    axes[0].legend(fontsize="small")
    if num_panels == 4:
        _throughput(axes[3], results)
    save(figure, path)


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
