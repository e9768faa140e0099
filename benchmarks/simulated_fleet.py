"""What a fleet of simulated devices costs the machine that it runs on: start, memory, and processor time.

For each size: `kvrelay up --backend simulated` with half of the workers for prefill, half for decode, 32 to a process.

- Ready: from the command to the greeting; all workers are registered and the router has heard of each.
- Memory: resident, of all worker processes.
- Idle: processor time of all worker processes over `--idle` seconds, as a share of one core; before the load, and after
  it, when workers that met keep their links.
- A token, a step: processor time of all worker processes over the load (`--requests` completions of 500 prompt and 100
  output tokens, 200 at a time), by output tokens and by steps.

Usage: python -m benchmarks.simulated_fleet [--sizes 8 64 256] [--requests 600]
    [--write benchmarks/results/simulated_fleet.md]
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from tests.fakes.stack import Stack

DEMO = Path(__file__).resolve().parents[1] / "models" / "demo"
NUM_OUTPUT = 100
PER_PROCESS = 32
COLUMNS = ["workers", "processes", "ready, s", "memory, MiB", "idle before", "idle after", "a token, us", "a step, us"]


def cpu_s(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def idle_share(processes: list[psutil.Process], seconds: float) -> float:
    before = cpu_s(processes)
    time.sleep(seconds)
    return (cpu_s(processes) - before) / seconds


def num_steps(stack: Stack) -> float:
    return float(sum(worker["totals"]["steps"] for worker in stack.fleet()["workers"]))


def row(size: int, arguments: argparse.Namespace, directory: Path) -> list[str]:
    each, per_process = str(size // 2), str(min(PER_PROCESS, size // 2))
    flags = ["--backend", "simulated", "--profile", arguments.profile, "--workers-per-process", per_process]
    started = time.monotonic()
    with Stack(DEMO, directory / str(size), *flags, "--prefill", each, "--decode", each) as stack:
        ready_s = time.monotonic() - started
        children = stack.children()
        processes = [psutil.Process(process_id) for name, process_id in children.items() if name != "router"]
        idle = [idle_share(processes, arguments.idle)]
        before = cpu_s(processes), num_steps(stack)
        load = ["--requests", str(arguments.requests), "--concurrency", "200", "--prompt-tokens", "500"]
        load += ["--output-tokens", str(NUM_OUTPUT)]
        subprocess.run([sys.executable, "-m", "kvrelay_bench", stack.base_url, *load], check=True)
        spent_s, steps = cpu_s(processes) - before[0], num_steps(stack) - before[1]
        memory = sum(process.memory_info().rss for process in processes)
        idle.append(idle_share(processes, arguments.idle))
    return [
        str(size),
        str(len(processes)),
        f"{ready_s:.1f}",
        f"{memory >> 20:,}",
        *(f"{share:.1%}" for share in idle),
        f"{1e6 * spent_s / (arguments.requests * NUM_OUTPUT):.0f}",
        f"{1e6 * spent_s / steps:,.0f}",
    ]


def main() -> None:
    """One size after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--idle", type=float, default=10.0)
    parser.add_argument("--profile", default="llama3-8b-h100")
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    lines = [
        "# What a simulated fleet costs",
        "",
        f"{platform.machine()} with {os.cpu_count()} cores, CPython {platform.python_version()}, profile "
        f"`{arguments.profile}`. Shares are of one core. Repeat with",
        "`python -m benchmarks.simulated_fleet`; the script's head says what is measured.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        "|" + "---:|" * len(COLUMNS),
    ]
    with tempfile.TemporaryDirectory() as directory:
        for size in arguments.sizes:
            lines.append(f"| {' | '.join(row(size, arguments, Path(directory)))} |")
            print(lines[-1], flush=True)
    text = "\n".join([*lines, ""])
    print(text)
    if arguments.write:
        arguments.write.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
