"""`kvrelay top`: shows a router's `/fleet` in a terminal."""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator, Mapping, Sequence
from http.client import HTTPException
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvrelay.cli.stacks import KEY_VARIABLE, add_router_arguments, ask, router_url
from kvrelay.flag_parser import CommandFailed, FlagParser, number

TIMEOUT_S = 10.0
OTHERS = frozenset({"queued_tokens", "cancelled_requests", "sender_lost"})
"""Entries of a worker's `queues` that are no queues."""


def top(argv: Sequence[str]) -> int:
    """Runs until `q` or Ctrl-C. Raises CommandFailed if the router does not answer the first request."""
    parser = top_parser()
    arguments = parser.parse(argv)
    if not 0.1 <= arguments.interval <= 3600:
        parser.error("--interval must be from 0.1 to 3600")
    url = router_url(arguments)
    fleet = fleet_of(url)
    if arguments.once:
        Console().print(view(fleet))
        return 0
    with contextlib.suppress(KeyboardInterrupt):
        _follow(url, arguments.interval, fleet)
    return 0


def top_parser() -> FlagParser:
    parser = FlagParser(
        "kvrelay top",
        f"Shows the fleet as a router sees it, until q is pressed. A key, if one is needed, comes from {KEY_VARIABLE}.",
        usage="kvrelay top [URL] [flags]",
    )
    add_router_arguments(parser)
    parser.add_argument(
        "--interval", type=number(0.1, 3600), default=1.0, metavar="SECONDS", help="between looks (default: 1)"
    )
    parser.add_argument("--once", action="store_true", help="show it once and end")
    return parser


def fleet_of(url: str) -> dict[str, Any]:
    """A router's `/fleet`. Raises CommandFailed."""
    try:
        with ask(url, "/fleet", timeout_s=TIMEOUT_S) as answer:
            found: dict[str, Any] = json.load(answer)
    except (OSError, HTTPException, ValueError) as error:
        raise CommandFailed(f"{url}: {error}") from error
    return found


def _follow(url: str, interval_s: float, fleet: dict[str, Any]) -> None:
    with _keys_at_once(), Live(view(fleet), auto_refresh=False, screen=True) as live:
        while not _is_quit(interval_s):
            try:
                fleet = fleet_of(url)
            except CommandFailed as error:
                live.update(Group(Text(str(error), style="red"), view(fleet)), refresh=True)
            else:
                live.update(view(fleet), refresh=True)


@contextlib.contextmanager
def _keys_at_once() -> Iterator[None]:
    """Keys are read without Return and not shown, if standard input is a terminal."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _is_quit(wait_s: float) -> bool:
    """Waits so long, and returns whether `q` is pressed meanwhile."""
    if not sys.stdin.isatty():
        time.sleep(wait_s)
        return False
    end = time.monotonic() + wait_s
    while (left := end - time.monotonic()) > 0:
        if select.select([sys.stdin], [], [], left)[0] and os.read(sys.stdin.fileno(), 1) in (b"q", b"Q", b""):
            return True
    return False


def view(fleet: Mapping[str, Any]) -> RenderableType:
    """Renders an answer of `/fleet` as tables, one after the other for several models."""
    workers = fleet["workers"]
    if "models" not in fleet:
        return Group(_head(fleet), _workers(workers))
    parts: list[RenderableType] = []
    for model, own in fleet["models"].items():
        parts += [Text(model, style="bold"), _head(own), _workers([each for each in workers if each["model"] == model])]
    return Group(*parts)


def _head(fleet: Mapping[str, Any]) -> RenderableType:
    requests, cache, latency, router = fleet["requests"], fleet["cache"], fleet["latency"], fleet["router"]
    found, predicted = (_share(cache[f"{view}_tokens"], cache["prompt_tokens"]) for view in ("found", "predicted"))
    failed, retries = requests["failed"], requests["retries"]
    lines = [
        f"router {router['router_id']}, registry {router['registry']}, index {fleet['prefix_index']['state']}",
        f"{requests['running']} running, {requests['finished']} finished, {failed} failed, {retries} retries",
        f"first token {_three(latency['ttft_ms'])}, per token {_three(latency['tpot_ms'])}",
        f"cache hits {found}, {predicted} expected",
    ]
    text = Text("\n".join(lines))
    if fleet["fallback"]["active"]:
        text.append(f"\nfallback: {fleet['fallback']['reason']}", style="red")
    return text


def _workers(workers: Sequence[Mapping[str, Any]]) -> RenderableType:
    table = Table(expand=True, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for title in ("worker", "state", "queues", "blocks held", "cached/all", "tokens in/out"):
        table.add_column(title, no_wrap=title in ("state", "cached/all", "tokens in/out"))
    for worker in workers:
        blocks, totals = worker["blocks"], worker["totals"]
        queues = [f"{name} {depth}" for name, depth in worker["queues"].items() if depth and name not in OTHERS]
        held = {state: n for state, n in blocks.items() if n and state not in ("free", "cached", "total")}
        table.add_row(
            _named(worker),
            _state(worker),
            Text("\n".join(queues) or "-"),
            Text("\n".join(f"{state} {n}" for state, n in held.items()) or "-"),
            f"{_short(blocks.get('cached', 0))}/{_short(blocks.get('total', 0))}",
            f"{_short(totals.get('prefill_tokens', 0))}/{_short(totals.get('decode_tokens', 0))}",
        )
    return table


def _state(worker: Mapping[str, Any]) -> Text:
    """With the seconds since the last answer of a silent worker."""
    state = worker["state"]
    return Text(f"silent\n{worker['age_s']:.0f} s" if state == "silent" else state, "" if state == "ready" else "red")


def _named(worker: Mapping[str, Any]) -> Text:
    """The worker's name, with GPU and 8-bit KV type, if any, on a second line."""
    device, kv_dtype = worker.get("device", ""), worker.get("kv_dtype", "")
    notes = [device] * (device not in ("", "cpu")) + [f"KV {kv_dtype}"] * kv_dtype.startswith("fp8")
    return Text("\n".join([worker["worker_id"], *notes]))


def _short(number: float) -> str:
    """As 9500, 12.3k or 4.5M."""
    if number < 1e4:
        return f"{number:.0f}"
    unit, size = ("k", 1e3) if number < 1e6 else ("M", 1e6) if number < 1e9 else ("G", 1e9)
    return f"{number / size:,.1f}{unit}"


def _three(percentiles: Mapping[str, float]) -> str:
    if not percentiles:
        return "-"
    return " / ".join(f"{percentiles[name]:,.1f}" for name in ("p50", "p90", "p99")) + " ms"


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"
