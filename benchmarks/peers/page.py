"""The Markdown page of one or several runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.peers.cases import FIGURES, Figure
from benchmarks.peers.results import Measurement, Run
from benchmarks.peers.statistics import Statistic, best, ratio, statistic

BUSY_LOAD = 0.5
"""Load average per core before the first measurement above which the page warns."""


def page(runs: Sequence[Run]) -> str:
    """All runs, each with its machine, commands, tables and failures."""
    lines = [
        "# kvrelay and other servers",
        "",
        "Written by `python -m benchmarks.peers`; [docs/peers.md](../../docs/peers.md) says how to repeat it. One",
        "server runs at a time, and the servers take turns. Cells: median over the rounds (least to most). Ratios are",
        "taken within a round, so they hold even if the machine's speed changes between rounds.",
        "",
    ]
    for run in runs:
        lines += _run_lines(run)
    return "\n".join(lines).rstrip() + "\n"


def _run_lines(run: Run) -> list[str]:
    about = run.about
    lines = [f"## {about['model']}: {about['case']}", "", str(about["load"]), ""]
    lines += _busy_note(run)
    for load in run.loads:
        lines += [f"### {load[0].upper()}{load[1:]}", "", *_load_table(run, load), ""]
    if not _is_busy(run):
        lines += _best_lines(run)
    lines += _failure_lines(run)
    lines += _note_lines(run)
    return [*lines, *_origin_lines(run)]


def _load_table(run: Run, load: str) -> list[str]:
    figures = [each for each in FIGURES[run.about["case"]] if any(run.values(s, load, each.key) for s in run.servers)]
    base = run.about["base"]
    titles = ["server", "rounds"]
    for figure in figures:
        titles += [figure.title, f"/ {base}"]
    rows = [_row(run, load, server, figures, base) for server in run.servers]
    return markdown_table(titles, rows)


def _row(run: Run, load: str, server: str, figures: Sequence[Figure], base: str) -> list[str]:
    rounds = {each.round for each in run.measurements if (each.server, each.load) == (server, load)}
    if not rounds:
        return [server, "0", "failed", *[""] * (2 * len(figures) - 1)]
    cells = [server, str(len(rounds))]
    for figure in figures:
        values = run.values(server, load, figure.key)
        found = statistic(list(values.values()))
        cells.append(found.text(figure.scale, figure.digits) if found else "-")
        compared = ratio(run.values(base, load, figure.key), values) if server != base else None
        cells.append(compared.text(digits=2) if compared else "")
    return cells


def _best_lines(run: Run) -> list[str]:
    """A table of the best server of each figure, which may be any."""
    figures = FIGURES[run.about["case"]]
    rows = [[load, *(_best_cell(run, load, figure) for figure in figures)] for load in run.loads]
    if len(run.servers) < 2 or not rows:
        return []
    text = "The best server by median; in parentheses if the rounds of another server overlap with its rounds."
    return ["### Who is best", "", text, "", *markdown_table(["load", *(each.title for each in figures)], rows), ""]


def _best_cell(run: Run, load: str, figure: Figure) -> str:
    found = {server: statistic(list(run.values(server, load, figure.key).values())) for server in run.servers}
    known: Mapping[str, Statistic] = {server: each for server, each in found.items() if each is not None}
    winner = best(known, higher=figure.higher_is_better)
    if winner is None:
        return "-"
    return winner.server if winner.is_clear else f"({winner.server})"


def _is_busy(run: Run) -> bool:
    """Whether others used the machine. Only the load average before the run is free of the measured servers."""
    return float(run.about["load_average"]) > BUSY_LOAD * int(run.about["machine"]["cores"])


def _busy_note(run: Run) -> list[str]:
    if not _is_busy(run):
        return []
    about = run.about
    return [
        f"**The machine was busy: load average {about['load_average']:.1f} on {about['machine']['cores']} cores before "
        "the run. These figures show that the benchmark works; they do not rank the servers.**",
        "",
    ]


def _failure_lines(run: Run) -> list[str]:
    lines = [
        f"- {each.server}, round {each.round + 1}{f', {each.load}' if each.load else ''}: {each.error}"
        for each in run.failures
    ]
    return ["### Not measured", "", *lines, ""] if lines else []


def _note_lines(run: Run) -> list[str]:
    """Doubts about single measurements, grouped by server and load."""
    notes: dict[tuple[str, str], list[str]] = {}
    for each in run.measurements:
        notes.setdefault((each.server, each.load), []).extend(_remarks(each))
    lines = [f"- {server}, {load}: {'; '.join(dict.fromkeys(said))}" for (server, load), said in notes.items() if said]
    return ["### Notes", "", *lines, ""] if lines else []


def _remarks(each: Measurement) -> list[str]:
    failed = [f"{each.num_failed} of {each.num_requests} requests failed"] if each.num_failed else []
    share = each.values.get("still_running", 1.0)
    ended = [f"only {share:.0%} of the decodes ran until the last long prompt's first token"] if share < 1 else []
    return [*failed, *ended, *each.notes]


def _origin_lines(run: Run) -> list[str]:
    """Machine, versions and commands."""
    about = run.about
    lines = ["### Machine, versions, commands", ""]
    lines += [f"- {about['date']}; " + ", ".join(f"{name} {value}" for name, value in about["machine"].items())]
    lines += [f"- `{about['command']}`; {about['num_rounds']} rounds, order {about['order']}, commit {about['commit']}"]
    for server in run.servers:
        started = run.started(server)
        if started is None:
            continue
        versions = ", ".join(f"{name} {value}" for name, value in started.versions.items())
        lines += [f"- **{server}**: {started.about} ({versions}), ready after {started.seconds:.0f} s"]
        lines += [f"  - `{command}`" for command in started.commands]
    return [*lines, ""]


def markdown_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(titles) + " |", "|---|" + "--:|" * (len(titles) - 1)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows)]
