"""What of a handoff a client can feel: from the end of the last chunk to decode's first step with the request.

`kvrelay up` with the demo model, one prefill and one decode worker, for each transport. Prompts are random tokens, so
that nothing is cached; one request at a time; lengths take turns, so that a busy machine is unfair to all alike. The
first turn is thrown away. The times are those of the workers' metrics files.

The slope is that of a straight line through a turn's times over its prompt lengths.

    python -m benchmarks.handoff [--repeats 9] [--write benchmarks/results/handoff.md]
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.transfer import has_nixl
from kvrelay.telemetry.metrics_file import HandoffRecord, read_metrics
from tests.fakes.stack import Stack

LENGTHS = (512, 1024, 2048, 4096, 8176)
"""The last one leaves room for the output in the model's 8192."""
VOCABULARY = range(3, 2048)
NUM_OUTPUT = 4


@dataclass(frozen=True)
class Load:
    """What is served to whom. `model`: a directory; None: the demo model."""

    model: Path | None = None
    lengths: tuple[int, ...] = LENGTHS


class Series:
    """Of one transport and mode, by prompt length, one figure a turn: ms exposed, KiB sent after the last chunk."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.exposed_ms: dict[int, list[float]] = {length: [] for length in lengths}
        self.tail_kib: dict[int, list[float]] = {length: [] for length in lengths}

    @property
    def slopes_us(self) -> list[float]:
        """Microseconds a token, one per turn."""
        turns = zip(*self.exposed_ms.values(), strict=True)
        return [1e3 * float(np.polyfit(list(self.exposed_ms), turn, 1)[0]) for turn in turns]


def measure(transport: str, repeats: int, flags: Sequence[str], load: Load | None = None) -> Series:
    """The figures of one transport."""
    load = load or Load()
    rng = random.Random(transport)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        own = ("--transfer", transport, "--metrics-file", str(path / "{worker_id}.jsonl"))
        with Stack(load.model, path, *own, *flags) as stack:
            for turn in range(repeats + 1):
                for length in load.lengths:
                    stack.complete(rng.choices(VOCABULARY, k=length), NUM_OUTPUT, ignore_eos=True)
                print(f"{transport}: turn {turn} of {repeats}", file=sys.stderr)
        return read(path, load.lengths)


def read(folder: Path, lengths: Sequence[int] = LENGTHS) -> Series:
    """The exposed times of a stack that has ended, without its first turn."""
    records = [
        record
        for path in sorted(folder.glob("*.jsonl"))
        for record in read_metrics(path)
        if isinstance(record, HandoffRecord)
    ]
    first_steps = {record.request: record.at for record in records if record.role == "decode"}
    sent = sorted((record for record in records if record.role == "prefill"), key=lambda record: record.at)
    series = Series(lengths)
    for number, record in enumerate(sent):
        if number >= len(lengths):
            length = lengths[number % len(lengths)]
            last_chunk = record.at - record.exposed_s
            series.exposed_ms[length].append(1e3 * (first_steps[record.request] - last_chunk))
            series.tail_kib[length].append(record.num_bytes / record.num_blocks * record.num_tail_blocks / 1024)
    return series


def report(results: dict[str, Series], repeats: int, load: float) -> str:
    """The results as a Markdown page."""
    lines = [
        "# What of a handoff is exposed",
        "",
        "From the end of a prompt's last chunk (512 tokens) to the decode worker's first step with the request: ms, "
        f"median (min to max) of {repeats} turns, and what was still to be sent after the chunk. `kvrelay up` with the "
        "demo model in float32 (4 KiB of KV a token), one request at a time.",
        f"Machine: {platform.machine()}, {os.cpu_count()} cores, shared, load average {load:.1f} before the run; "
        f"Python {platform.python_version()}. Repeat with `python -m benchmarks.handoff`.",
        "",
        "| transport | " + " | ".join(f"{length} tokens" for length in LENGTHS) + " | slope, µs a token |",
        "|---|" + "--:|" * (len(LENGTHS) + 1),
    ]
    for transport, series in results.items():
        cells = [
            f"{spread(series.exposed_ms[length])}; {statistics.median(series.tail_kib[length]):,.0f} KiB"
            for length in LENGTHS
        ]
        lines.append(f"| {transport} | " + " | ".join(cells) + f" | {spread(series.slopes_us, 2)} |")
    return "\n".join(lines) + "\n"


def spread(figures: list[float], digits: int = 1) -> str:
    """Median (min-max)."""
    return f"{statistics.median(figures):.{digits}f} ({min(figures):.{digits}f} to {max(figures):.{digits}f})"


def main() -> None:
    """Reads the flags, measures, shows the page, and writes it where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, help="of each worker (default: an equal share of the cores)")
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    flags = ("--threads", str(arguments.threads)) if arguments.threads else ()
    transports = ("zmq", "nixl") if has_nixl() else ("zmq",)
    page = report(
        {transport: measure(transport, arguments.repeats, flags) for transport in transports}, arguments.repeats, load
    )
    sys.stdout.write(page)
    if arguments.write is not None:
        arguments.write.write_text(page)


if __name__ == "__main__":
    main()
