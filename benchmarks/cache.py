"""What each part of prefix reuse is worth, on one trace: no cache, a table instead of the tree, and queue orders.

Simulated as in schedulers.py, with its trace formats. Two figures stand beside each hit rate:

- best: the hit rate with a cache without end, in order of arrival: every full block of a prompt that an earlier prompt
  began with counts (but for the last token, which is always computed). Outputs are not counted, so a conversation's
  next turn may do better.
- share: the hit rate as a share of the best.

Usage: python -m benchmarks.cache [--trace FILE] [--requests 600] [--rate 14] [--num-blocks 3000]
    [--write benchmarks/results/cache.md]
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import cast

import numpy as np

from benchmarks.schedulers import BLOCK_SIZE, Request, fitted, simulate, synthetic_trace, traced
from kvrelay.kv.ablations import NullCache, TableCache
from kvrelay.kv.cache import Cache
from kvrelay.kv.pool import BlockPool
from kvrelay.kv.prefix_cache import PrefixCache
from kvrelay.scheduling.scheduler_settings import QueueOrderName
from kvrelay_simulator.results import best_possible_hit_rate

CASES: list[tuple[str, Callable[[BlockPool], Cache], QueueOrderName]] = [
    ("none", cast("Callable[[BlockPool], Cache]", lambda pool: NullCache()), "fcfs"),
    ("table", TableCache, "fcfs"),
    ("tree", PrefixCache, "random"),
    ("tree", PrefixCache, "fcfs"),
    ("tree", PrefixCache, "lpm"),
    ("tree", PrefixCache, "dfs_weight"),
]


def row(arguments: argparse.Namespace, requests: list[Request], case: int, best: float) -> list[str]:
    """One case's line of the table."""
    name, make_cache, order = CASES[case]
    settings = argparse.Namespace(**{**vars(arguments), "queue_order": order})
    measured = simulate(requests, settings, "sarathi", make_cache=make_cache)
    num_prompt = sum(len(request.prompt) for request in measured.requests)
    ttft = [request.token_times_s[0] - request.arrival_s for request in measured.requests]
    hit_rate = measured.num_cached / num_prompt
    return [
        name,
        order,
        f"{hit_rate:.1%}",
        f"{hit_rate / best:.0%}" if best else "-",
        f"{np.median(ttft):.2f}",
        f"{np.percentile(ttft, 99):.2f}",
        f"{measured.seconds:,.0f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--rate", type=float, default=14.0, help="synthetic requests a second")
    parser.add_argument("--num-blocks", type=int, default=3000)
    parser.add_argument("--write", type=Path)
    parser.set_defaults(token_budget=512, max_running=128, max_model_len=16_384, max_tokens=1024, new_token_ratio=0.0)
    arguments = parser.parse_args()
    if arguments.trace:
        name, requests = arguments.trace.name, traced(arguments.trace, arguments.requests)
    else:
        name = f"synthetic, {arguments.rate:g} a second"
        requests = synthetic_trace(arguments.requests, arguments.rate, seed=1)
    requests = fitted(requests, arguments.max_model_len)
    best = best_possible_hit_rate((request.prompt for request in requests), BLOCK_SIZE)
    lines = [
        "# What prefix reuse is worth",
        "",
        f"Simulated ({platform.machine()} with {os.cpu_count()} cores, CPython {platform.python_version()}), "
        f"{len(requests)} requests, {name}, {arguments.num_blocks}",
        f"blocks of {BLOCK_SIZE} tokens, scheduler sarathi. Best possible hit rate: {best:.1%}. TTFT and the whole run "
        "in seconds.",
        "Repeat with `python -m benchmarks.cache`; the script's head says what is measured.",
        "",
        "| cache | queue order | hit rate | share of the best | TTFT, median | p99 | whole run |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for case in range(len(CASES)):
        lines.append("| " + " | ".join(row(arguments, requests, case, best)) + " |")
        print(lines[-1], flush=True)
    text = "\n".join([*lines, ""])
    print(text)
    if arguments.write:
        arguments.write.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
