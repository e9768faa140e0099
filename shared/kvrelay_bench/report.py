"""Text tables of figures, at most `MAX_COLUMNS` wide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table

from kvrelay_bench.load_figures import BenchSlo, LoadFigures, Ratio, Spread

MAX_COLUMNS = 120
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
}
MAX_ERRORS = 5
APART = 0.02
"""A median of ratios that differs by this share from the ratio of the medians is marked."""


def report_console() -> Console:
    """Returns a console of the terminal's width, `MAX_COLUMNS` at most."""
    console = Console()
    return Console(width=min(MAX_COLUMNS, console.width) if console.is_terminal else MAX_COLUMNS)


def compared(slo: BenchSlo) -> Mapping[str, str]:
    """The figures of comparisons: dotted names by title. Goodput is one only with an SLO."""
    return {**COMPARED, **({"goodput": "goodput"} if slo.is_set else {})}


def value_of(figures: LoadFigures, path: str) -> float:
    """A figure by its dotted name."""
    found: object = figures
    for name in path.split("."):
        found = getattr(found, name)
    assert isinstance(found, int | float)
    return float(found)


def load_table(results: Sequence[tuple[str, LoadFigures]], slo: BenchSlo) -> RenderableType:
    """Two tables with one line per load: rates, and latencies in milliseconds."""
    rates = _table("Throughput")
    for name in ("requests", "failed", "seconds", "req/s", "output tok/s", "prompt tok/s", "cached"):
        rates.add_column(name, justify="right")
    for name in ("goodput", "good") if slo.is_set else ():
        rates.add_column(name, justify="right")
    latencies = _table("Latency in ms, from the time when a request was due")
    for name in LATENCIES:
        for quantile in ("p50", "p90", "p99"):
            latencies.add_column(f"{name} {quantile}" if quantile == "p50" else quantile, justify="right")
    for name, found in results:
        row = [
            str(found.num_requests),
            str(found.num_failed),
            f"{found.seconds:.1f}",
            f"{found.requests_s:.2f}",
            f"{found.output_tokens_s:,.0f}",
            f"{found.prompt_tokens_s:,.0f}",
            "-" if found.cached_share is None else f"{found.cached_share:.0%}",
        ]
        if found.goodput is not None and found.good_share is not None:
            row += [f"{found.goodput:.2f}", f"{found.good_share:.0%}"]
        rates.add_row(name, *row)
        row = []
        for path in LATENCIES.values():
            spread: Spread = getattr(found, path)
            row += [_ms(spread.p50), _ms(spread.p90), _ms(spread.p99)]
        latencies.add_row(name, *row)
    return Group(rates, latencies)


def comparison_table(
    name: str, a: Sequence[LoadFigures], b: Sequence[LoadFigures], slo: BenchSlo | None = None
) -> Table:
    """A table of medians over the rounds, and of the ratio of B to A within the rounds."""
    several = len(a) > 1
    table = _table(f"{name}: {len(a)} round{'s' if several else ''}, in turns; times in ms")
    table.columns[0].header = "figure"
    for column in (
        ("A, median", "B, median", "B / A, median of rounds", "least", "most") if several else ("A", "B", "B / A")
    ):
        table.add_column(column, justify="right")
    is_marked = False
    for figure, path in compared(slo or BenchSlo()).items():
        pairs = [(value_of(one, path), value_of(other, path)) for one, other in zip(a, b, strict=True)]
        ratio = Ratio.of(pairs)
        show = _ms if "_s." in path else _number
        medians = [median(values) for values in zip(*pairs, strict=True)]
        of_medians = Ratio.of([(medians[0], medians[1])]).median
        mark = "*" if abs(of_medians - ratio.median) > APART * of_medians else ""
        is_marked = is_marked or bool(mark)
        row = [f"{ratio.median:.3f}{mark}", f"{ratio.least:.3f}", f"{ratio.most:.3f}"]
        table.add_row(figure, *map(show, medians), *(row if several else row[:1]))
    if is_marked:
        table.caption = (
            "* Each round is compared with itself, and the median is taken of these ratios. It differs from B's median "
            "by A's median because the rounds differ from each other."
        )
    return table


def remarks(results: Sequence[tuple[str, LoadFigures]]) -> list[str]:
    """Notes on failed requests and on doubts about the figures."""
    lines = []
    for name, found in results:
        lines += [f"{name}: {count} failed: {error}" for error, count in list(found.errors.items())[:MAX_ERRORS]]
        lines += [f"{name}: {doubt}" for doubt in found.doubts]
    return lines


def _table(title: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", caption_justify="left", padding=(0, 1, 0, 0))
    table.add_column("load", overflow="fold", max_width=34)
    return table


def _ms(seconds: float) -> str:
    """Milliseconds with about four digits, or seconds with their unit."""
    if seconds != seconds:
        return "-"
    ms = 1e3 * seconds
    if ms >= 1e5:
        return f"{seconds:.0f} s"
    return f"{ms:.2f}" if ms < 10 else f"{ms:.1f}" if ms < 1000 else f"{ms:.0f}"


def _number(value: float) -> str:
    return f"{value:,.2f}"
