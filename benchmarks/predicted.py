"""What the simulations say of the demo stack against what it does: time to first token, and per output token.

A round measures a profile (`kvrelay measure`), then sends one trace through three systems with one prefill and one
decode worker each: `kvrelay up` with the demo model; `kvrelay up --backend simulated` with the profile; and `kvrelay
simulate` with it, in virtual time. The first two get it from `kvrelay bench`. The trace: Poisson arrivals; prompts
log-normal (median 200 tokens, at most 1,500), every fourth begins with one of 3 shared prefixes of 512 tokens; outputs
log-normal (median 30).

The error is predicted over measured, less one: of each round, then the median with the least and the most.

Usage: python -m benchmarks.predicted [--rounds 3] [--requests 80] [--rates 2 5]
    [--write benchmarks/results/predicted.md]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvrelay_bench.traces import HASH_TOKENS
from tests.fakes.stack import Stack

DEMO = Path(__file__).resolve().parents[1] / "models" / "demo"
WORKER = ("--threads", "1", "--dtype", "float32", "--num-blocks", "2000")
UP = ("--prefill", "1", "--decode", "1", *WORKER)
FIGURES = ("TTFT p50", "TTFT p90", "TPOT p50", "TPOT p90")

Found = dict[str, float]


def write_trace(path: Path, num_requests: int, rate: float) -> None:
    rng = np.random.default_rng(5)
    fresh = iter(range(1000, 1_000_000))
    at_s = 0.0
    with path.open("w", encoding="utf-8") as file:
        for number in range(num_requests):
            at_s += float(rng.exponential(1 / rate))
            num_own = int(np.clip(rng.lognormal(np.log(200), 0.7), 16, 1500))
            shared = [int(rng.integers(3))] if number % 4 == 0 else []
            num_prompt = num_own + HASH_TOKENS * len(shared)
            entry = {
                "timestamp": 1e3 * at_s,
                "input_length": num_prompt,
                "output_length": int(np.clip(rng.lognormal(np.log(30), 0.5), 2, 120)),
                "hash_ids": [*shared, *(next(fresh) for _ in range(-(-num_own // HASH_TOKENS)))],
            }
            file.write(json.dumps(entry) + "\n")


def ran(*command: str) -> None:
    """A command of kvrelay, quietly."""
    done = subprocess.run([sys.executable, "-m", "kvrelay", *command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stdout}{done.stderr}")


def served(directory: Path, trace: Path, *flags: str) -> Found:
    """The trace through a stack of its own."""
    with Stack(DEMO, directory / "state", *UP, *flags) as stack:
        return loaded(directory, stack, "--trace", str(trace))


def loaded(directory: Path, stack: Stack, *load: str) -> Found:
    """A load of `kvrelay bench`, milliseconds; without what it has too few requests for. Raises SystemExit if requests
    fail."""
    out = directory / "bench.json"
    ran("bench", stack.base_url, *load, "--json", str(out))
    (result,) = json.loads(out.read_text())["loads"]
    figures = result["figures"]
    if figures["num_failed"]:
        raise SystemExit(f"{figures['num_failed']} requests failed: {figures['errors']}")
    values = {name: figures[f"{name[:4].lower()}_s"][name[5:]] for name in FIGURES}
    return {name: 1e3 * value for name, value in values.items() if value is not None}


def simulated(directory: Path, trace: Path, profile: str, token_budget: int = 512) -> Found:
    """In virtual time; as the services are configured by default, but for the budget."""
    out = directory / "simulate.json"
    flags = ["--block-size", "16", "--prefill-token-budget", str(token_budget), "--local-prefill-tokens", "0"]
    fleet = ["--prefill", "1", "--decode", "1", "--profile", profile]
    ran("simulate", "--trace", str(trace), *fleet, *flags, "--json", str(out))
    (figures,) = json.loads(out.read_text())["runs"].values()
    return {name: 1e3 * figures[f"{name[:4].lower()}_{name[5:]}_s"] for name in FIGURES}


def round_of(directory: Path, trace: Path) -> dict[str, Found]:
    """One measurement of each, milliseconds."""
    profile = directory / "profile.json"
    ran("measure", str(profile), "--model", str(DEMO), *WORKER)
    return {
        "measured": served(directory, trace),
        "real time": served(directory, trace, "--backend", "simulated", "--profile", str(profile)),
        "virtual time": simulated(directory, trace, str(profile)),
    }


def spread(values: Sequence[float], form: str) -> str:
    """The median, with the least and the most."""
    return f"{np.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def rows(rounds: Sequence[dict[str, Found]], rate: float) -> list[str]:
    lines = []
    for name in FIGURES:
        by_system = defaultdict(list)
        for each in rounds:
            for system, found in each.items():
                by_system[system].append(found[name])
        cells = [f"{rate:g}", name, spread(by_system["measured"], ",.1f")]
        for system in ("real time", "virtual time"):
            errors = [a / b - 1 for a, b in zip(by_system[system], by_system["measured"], strict=True)]
            cells += [spread(by_system[system], ",.1f"), spread(errors, "+.0%")]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=80)
    parser.add_argument("--rates", type=float, nargs="+", default=[2.0, 5.0], help="requests a second")
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    lines = [
        "# Predicted and measured",
        "",
        f"{platform.machine()} with {os.cpu_count()} cores, the demo model in float32 on one thread a worker, CPython "
        f"{platform.python_version()}; {arguments.rounds} rounds of {arguments.requests} requests.",
        "Milliseconds: the median over the rounds, with the least and the most. Repeat with",
        "`python -m benchmarks.predicted`; the script's head says what is measured.",
        "",
        "| requests/s | | measured | simulated backend | error | kvrelay simulate | error |",
        "|---:|---|---:|---:|---:|---:|---:|",
    ]
    with tempfile.TemporaryDirectory() as name:
        for rate in arguments.rates:
            trace = Path(name) / f"trace-{rate:g}.jsonl"
            write_trace(trace, arguments.requests, rate)
            rounds = [round_of(Path(name), trace) for _ in range(arguments.rounds)]
            lines += rows(rounds, rate)
            print("\n".join(lines), flush=True)
    if arguments.write:
        arguments.write.write_text("\n".join([*lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
