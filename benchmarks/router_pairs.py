"""A router against that of another checkout: both run, each with workers of its own, and loads take turns.

What changes with the machine (other work, its clock) falls on both, so the ratios of pairs hold where single figures do
not. An event's CPU time is taken as in router_cost.py, by the difference of runs with few and with many tokens; at
several numbers of streams, because a step of one worker is one message, and wakes the router up once for all of that
worker's streams. At the last number it falls behind, and joins tokens: there a token's time is what counts. A request's
time is that of router_cost.py too; the first event is waited for under the same open load for both.

Usage: git worktree add /tmp/before COMMIT && python -m benchmarks.router_pairs /tmp/before [--pairs 5] [--only request]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from benchmarks.router_cost import FEW_TOKENS, Router, measure_cost, running, spread

MANY_TOKENS = 264
NUM_STREAMS = (4, 32, 128, 512)
MIN_REQUESTS = 40
SATURATING = 256
COST_RUNS = argparse.Namespace(requests=400, concurrency=32)
OPEN_RATE = 250.0

Measure = Callable[[Router], float]


def token_us(num_streams: int, what: str) -> Measure:
    """CPU microseconds for one of `what`: events or tokens."""

    def measure(router: Router) -> float:
        num_requests = str(max(MIN_REQUESTS, 2 * num_streams))
        load = ("--requests", num_requests, "--concurrency", str(num_streams), "--tokens")
        few, many = router.load(*load, str(FEW_TOKENS)), router.load(*load, str(MANY_TOKENS))
        return float((many.cpu_s - few.cpu_s) / (many.seen[what] - few.seen[what]) * 1e6)

    return measure


def requests_s(router: Router) -> float:
    """Requests of 32 tokens that it serves in a second, with as many clients as keep it busy."""
    seen = router.load("--concurrency", str(SATURATING), "--requests", "800", "--tokens", "32").seen
    return float(seen["requests"] / seen["seconds"])


def request_us(*flags: str) -> Measure:
    """CPU microseconds of a request, without its events. `flags`: of the load."""
    return lambda router: measure_cost(router, COST_RUNS, *flags).request_us


def first_ms(router: Router) -> float:
    """Until half of the requests of an open load had their first event."""
    load = router.load("--rate", str(OPEN_RATE), "--requests", "500", "--tokens", "32")
    return float(load.seen["first_p50_ms"])


def compare(measure: Measure, before: Router, after: Router, num_pairs: int) -> list[tuple[float, float]]:
    """(before, after) of each pair; which of them goes first changes."""
    pairs = []
    for number in range(num_pairs):
        first, second = (before, after) if number % 2 else (after, before)
        one, other = measure(first), measure(second)
        pairs.append((one, other) if number % 2 else (other, one))
        print(pairs[-1], file=sys.stderr, flush=True)
    return pairs


def row(name: str, pairs: list[tuple[float, float]], digits: int = 1) -> str:
    befores, afters = ([pair[side] for pair in pairs] for side in (0, 1))
    ratios = [after / before for before, after in pairs]
    return f"| {name} | {spread(befores, digits)} | {spread(afters, digits)} | {spread(ratios, 2)} |"


def measures() -> dict[str, tuple[Measure, int]]:
    """What is compared, by the names of its rows, with the digits that are shown."""
    found: dict[str, tuple[Measure, int]] = {}
    for num_streams in NUM_STREAMS[:-1]:
        found[f"CPU us an event, {num_streams} streams"] = token_us(num_streams, "events"), 1
    found[f"CPU us a token, {NUM_STREAMS[-1]} streams"] = token_us(NUM_STREAMS[-1], "tokens"), 1
    for kind, flags in (("completion", ()), ("chat", ("--chat",)), ("completion of new words", ("--new-words",))):
        found[f"CPU us a request, {kind}"] = request_us(*flags), 0
    found[f"first event p50 ms at {OPEN_RATE:g} requests/s"] = first_ms, 1
    found["requests/s at saturation"] = requests_s, 0
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="the other checkout")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--only", default="", help="rows whose names have this")
    parser.add_argument("--prefill", type=int, default=2)
    parser.add_argument("--decode", type=int, default=4)
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--port", type=int, default=18473, help="and the one after it")
    arguments = parser.parse_args()
    arguments.router = []
    with ExitStack() as stack:
        before = stack.enter_context(running(arguments, arguments.before.resolve()))
        arguments.port += 1
        after = stack.enter_context(running(arguments))
        for router in (before, after):
            router.load("--requests", "300", "--tokens", "32")  # warm
        print("| | before | after | of pairs, after / before |\n|---|---|---|---|")
        for name, (measure, digits) in measures().items():
            if arguments.only in name:
                print(row(name, compare(measure, before, after, arguments.pairs), digits), flush=True)


if __name__ == "__main__":
    main()
