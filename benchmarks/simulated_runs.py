"""What benchmarks of simulated fleets share: options, runs in several processes, and the report."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Protocol, TypeVar

from kvrelay_simulator.results import RunFigures


class MeasuredRun(Protocol):
    """One fleet on one trace. Travels to another process."""

    def measure(self) -> RunFigures: ...


RunT = TypeVar("RunT", bound=MeasuredRun)


def parser_of(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True, action="append", help="may come again")
    parser.add_argument("--requests", type=int)
    parser.add_argument("--profile", default="llama3-8b-h100")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--write", type=Path)
    return parser


def measure_all(
    runs: Sequence[RunT], processes: int, told: Callable[[RunT, RunFigures], str]
) -> list[tuple[RunT, RunFigures]]:
    """Measures the runs, and prints what `told` says of each as soon as it is there."""
    results = []
    with ProcessPoolExecutor(processes) as pool:
        for run, found in zip(runs, pool.map(_measured, runs), strict=True):
            results.append((run, found))
            print(told(run, found), flush=True)
    return results


def publish(text: str, file: Path | None) -> None:
    """Prints a report, and writes it to the file if there is one."""
    print(text)
    if file:
        file.write_text(text, encoding="utf-8")


def _measured(run: MeasuredRun) -> RunFigures:
    return run.measure()
