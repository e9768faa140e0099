"""Text tables of figures."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from rich import box
from rich.table import Table

from kvrelay_bench.load_figures import BenchSlo, LoadFigures, Ratio, Spread

LATENCIES = {"TTFT": "ttft_s", "TPOT": "tpot_s", "ITL": "itl_s", "E2E": "e2e_s"}
COMPARED = {
    "TTFT p50": "ttft_s.p50",
    "TTFT p99": "ttft_s.p99",
    "TPOT p50": "tpot_s.p50",
    "TPOT p99": "tpot_s.p99",
    "ITL p99": "itl_s.p99",
    "E2E p50": "e2e_s.p50",
    "E2E p99": "e2e_s.p99",
    "output tokens/s": "output_tokens_s",
    "requests/s": "requests_s",
    "goodput": "goodput",
}
MAX_ERRORS = 5


def value_of(figures: LoadFigures, path: str) -> float:
    """A figure by its dotted name."""
    found: object = figures
    for name in path.split("."):
        found = getattr(found, name)
    assert isinstance(found, int | float)
    return float(found)


def load_table(results: Sequence[tuple[str, LoadFigures]], slo: BenchSlo) -> Table:
    """A table with one line per load, in milliseconds."""
    table = Table(box=box.SIMPLE_HEAD, title="Latencies in ms, from the time a request should have been sent")
    table.add_column("load")
    for name in ("sent", "failed", "req/s", "tok/s", *(["goodput", "good"] if slo.is_set else [])):
        table.add_column(name, justify="right")
    for name in LATENCIES:
        for quantile in ("p50", "p90", "p99"):
            table.add_column(f"{name} {quantile}" if quantile == "p50" else quantile, justify="right")
    for name, found in results:
        row = [
            str(found.num_requests),
            str(found.num_failed),
            f"{found.requests_s:.2f}",
            f"{found.output_tokens_s:,.0f}",
        ]
        if slo.is_set:
            row += [f"{found.goodput:.2f}", f"{found.good_share:.0%}"]
        for path in LATENCIES.values():
            spread: Spread = getattr(found, path)
            row += [_ms(spread.p50), _ms(spread.p90), _ms(spread.p99)]
        table.add_row(name, *row)
    return table


def comparison_table(name: str, a: Sequence[LoadFigures], b: Sequence[LoadFigures]) -> Table:
    """A table of medians over the rounds, and the ratio of B to A per round."""
    table = Table(box=box.SIMPLE_HEAD, title=f"{name}: {len(a)} rounds, in turns; times in ms")
    table.add_column("figure")
    for column in ("A", "B", "B / A", "least", "most"):
        table.add_column(column, justify="right")
    for figure, path in COMPARED.items():
        pairs = [(value_of(one, path), value_of(other, path)) for one, other in zip(a, b, strict=True)]
        ratio = Ratio.of(pairs)
        show = _ms if "_s." in path else _number
        medians = [show(median(values)) for values in zip(*pairs, strict=True)]
        table.add_row(figure, *medians, f"{ratio.median:.3f}", f"{ratio.least:.3f}", f"{ratio.most:.3f}")
    return table


def remarks(results: Sequence[tuple[str, LoadFigures]]) -> list[str]:
    """Notes on failed requests and on doubts about the figures."""
    lines = []
    for name, found in results:
        lines += [f"{name}: {count} failed: {error}" for error, count in list(found.errors.items())[:MAX_ERRORS]]
        lines += [f"{name}: {doubt}" for doubt in found.doubts]
    return lines


def _ms(seconds: float) -> str:
    return "-" if seconds != seconds else f"{1e3 * seconds:,.1f}"


def _number(value: float) -> str:
    return f"{value:,.2f}"
