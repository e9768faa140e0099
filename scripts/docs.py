"""Writes the parts of docs/ that are taken from the code: the configuration reference, the help pages of the commands,
the state diagrams, the metrics.

Run: .venv/bin/python scripts/docs.py [--check]
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Collection, Mapping
from enum import StrEnum
from pathlib import Path

from kvrelay.cli.launch_plan import up_parser
from kvrelay.cli.main import COMMANDS, help_text
from kvrelay.config import reference
from kvrelay.flag_parser import FlagParser
from kvrelay.handoff.receiver import ReceiverState
from kvrelay.handoff.sender import SenderState
from kvrelay.telemetry.catalogue import ALL, METRICS
from kvrelay.telemetry.metrics import prometheus_name
from kvrelay_bench.program_bench import programs_parser

DOCS = Path(__file__).resolve().parents[1] / "docs"
HELP_COLUMNS = 102  # argparse leaves two of them free

S, R = SenderState, ReceiverState

SENDER_LABELS: dict[tuple[StrEnum, StrEnum], str] = {
    (S.QUEUED, S.COMPUTING): "first chunk scheduled, decode is asked",
    (S.QUEUED, S.RELEASED): "cancelled",
    (S.COMPUTING, S.SENDING): "last chunk done, no grant yet",
    (S.COMPUTING, S.HANDED): "last chunk done, all pushed, handoff message sent",
    (S.COMPUTING, S.DRAINING): "cancelled, writes in flight",
    (S.COMPUTING, S.RELEASED): "cancelled",
    (S.SENDING, S.HANDED): "granted, all pushed, handoff message sent",
    (S.SENDING, S.DRAINING): "cancelled or finished, writes in flight",
    (S.SENDING, S.RELEASED): "cancelled, or the first token ended it",
    (S.HANDED, S.SENDING): "decode lost or refused, asks another",
    (S.HANDED, S.DRAINING): "cancelled, or committed while an earlier grant still drains",
    (S.HANDED, S.RELEASED): "committed, or cancelled",
    (S.DRAINING, S.RELEASED): "nothing in flight any more",
}

RECEIVER_LABELS: dict[tuple[StrEnum, StrEnum], str] = {
    (R.ASKED, R.RESERVED): "room for all blocks, granted",
    (R.ASKED, R.FREED): "cancelled, or prefill is gone",
    (R.RESERVED, R.FILLING): "first block or handoff message came",
    (R.RESERVED, R.RUNNING): "all blocks were cached and the message is here, committed",
    (R.RESERVED, R.QUARANTINED): "given up, writes may still land",
    (R.RESERVED, R.FREED): "given up",
    (R.FILLING, R.RUNNING): "all blocks and the message are here, committed",
    (R.FILLING, R.QUARANTINED): "given up, writes may still land",
    (R.FILLING, R.FREED): "given up",
    (R.RUNNING, R.FREED): "the scheduler did not take it",
    (R.QUARANTINED, R.FREED): "drained, or the sender provably gone",
}


def state_diagram(
    states: type[StrEnum], labels: Mapping[tuple[StrEnum, StrEnum], str], also_ends: Collection[StrEnum] = ()
) -> str:
    """A mermaid diagram of a machine that starts in the first of `states`.

    A state without an exit is an end. `also_ends` are states with an exit that are usually the end. A test holds that
    `labels` names exactly the transitions that the machine makes.
    """
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {next(iter(states)).name}"]
    lines += [f"    {source.name} --> {target.name}: {label}" for (source, target), label in labels.items()]
    sources = {source for source, _ in labels}
    lines += [f"    {state.name} --> [*]" for state in states if state not in sources or state in also_ends]
    return "\n".join([*lines, "```"])


def metrics_table() -> str:
    """Every metric of the catalogue, as pages name it."""
    lines = ["| OpenTelemetry | Prometheus | Kind | By | Of | Meaning |", "|---|---|---|---|---|---|"]
    for metric in METRICS.values():
        attributes = ", ".join(f"`{name}`" for name in metric.attributes)
        services = "all" if metric.services == ALL else ", ".join(metric.services)
        names = f"`{metric.name}` ({metric.unit}) | `{prometheus_name(metric)}`"
        lines.append(f"| {names} | {metric.kind} | {attributes} | {services} | {metric.text}. |")
    return "\n".join(lines)


def generated() -> dict[Path, str]:
    """The files as they should be."""
    handoff, metrics = DOCS / "handoff.md", DOCS / "metrics.md"
    text = handoff.read_text(encoding="utf-8")
    text = _put(text, "sender", state_diagram(SenderState, SENDER_LABELS))
    text = _put(text, "receiver", state_diagram(ReceiverState, RECEIVER_LABELS, {R.RUNNING}))
    table = _put(metrics.read_text(encoding="utf-8"), "metrics", metrics_table())
    return {DOCS / "configuration.md": reference.render(), handoff: text, metrics: table, **help_pages()}


def help_pages() -> dict[Path, str]:
    """The help of every command as text, `HELP_COLUMNS` wide."""
    pages = {"kvrelay": help_text(), **{name: _help(command.flag_parser()) for name, command in COMMANDS.items()}}
    pages["up-all"] = _help(up_parser(), whole=True)
    pages["bench-workload"] = _help(programs_parser())
    return {DOCS / "help" / f"{name}.txt": text for name, text in pages.items()}


def _help(parser: FlagParser, *, whole: bool = False) -> str:
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(HELP_COLUMNS)
    try:
        return parser.format_help_all() if whole else parser.format_help()
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before


def outdated() -> list[Path]:
    """The files that are not as they should be, and help pages of commands that do not exist."""
    wanted = generated()
    left = [path for path in (DOCS / "help").glob("*.txt") if path not in wanted]
    return left + [path for path, text in wanted.items() if not path.exists() or path.read_text("utf-8") != text]


def main() -> int:
    """Returns 1 if a check found something to write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if something would be written")
    if parser.parse_args().check:
        for path in outdated():
            sys.stderr.write(f"{path} is out of date: run .venv/bin/python scripts/docs.py\n")
        return 1 if outdated() else 0
    for path, text in generated().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    for path in outdated():
        path.unlink()
    return 0


def _put(text: str, name: str, content: str) -> str:
    """`content` between the markers of this name. Raises ValueError where they are not."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise ValueError(f"the markers {begin} and {end} must be there once")
    return pattern.sub(lambda _: f"{begin}\n{content}\n{end}", text)


if __name__ == "__main__":
    sys.exit(main())
