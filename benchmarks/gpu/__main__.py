"""kvrelay on a GPU against what the GPU itself can do, and beside transformers' own continuous batching.

    python -m benchmarks.gpu --write benchmarks/results/gpu.md
    python -m benchmarks.gpu --part decode,prefill --write benchmarks/results/gpu.md          # some parts of it
    python -m benchmarks.gpu --part handoff,peers --add --write benchmarks/results/gpu.md     # others, beside them
    python -m benchmarks.gpu --device cpu --smoke                                             # all, tiny, on a CPU

Parity with transformers is checked first, on the same device; where it fails nothing is measured. Then floors are
measured, which the other parts are held against, and each part in a process of its own, so that its memory is free
afterwards and a crash is its own. A part that takes longer than its time (`--limit decode=300`) is ended, with what
it has measured until then. After each part the page and its JSON are written, with what there is. Ratios within the run
are what to trust.

The model has Llama-3-8B's shape in bfloat16, with random weights made on the device. It takes a GPU with 80 GB.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import torch

from benchmarks.gpu.figures import Recorder, median, read_entries
from benchmarks.gpu.part import Floors, Part
from benchmarks.gpu.report import PartResult, Report
from benchmarks.gpu.scale import SCALES
from kvrelay.engine.run.device import find_device

LIMITS_S = {"parity": 600, "floors": 60, "decode": 240, "prefill": 180, "kernels": 60, "gaps": 260}
LIMITS_S |= {"throughput": 180, "transfer": 120, "handoff": 300, "peers": 360}
"""Seconds that a part may take. Parity includes the compilation of kernels that are not there yet."""
TITLES = {
    "parity": "Parity",
    "floors": "What the device does",
    "decode": "Decoding",
    "prefill": "Prefill",
    "kernels": "What kernels take",
    "gaps": "Between steps",
    "throughput": "256 requests at once",
    "transfer": "Blocks between two processes",
    "handoff": "What of a handoff is exposed",
    "peers": "Beside transformers' continuous batching",
}
ALWAYS = ("parity", "floors")
GRACE_S = 30.0
"""A part ends itself between rows; only one that hangs is ended by force."""


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 1 where a part failed or was cut off."""
    arguments = _arguments(argv)
    device = find_device(arguments.device)
    if arguments.child:
        _run_child(arguments, device)
        return 0
    scale = "smoke" if arguments.smoke else "full"
    command = shlex.join(["python", "-m", "benchmarks.gpu", *sys.argv[1:]])
    report = Report(device, f"The model has {SCALES[scale].name} in {SCALES[scale].dtype}", command)
    own = {name: PartResult(TITLES[name], _about(name)) for name in arguments.part}
    report.parts |= own
    if arguments.add:
        report.adopt(arguments.write)
    with tempfile.TemporaryDirectory() as folder:
        for name, result in own.items():
            _run_part(name, result, arguments, Path(folder))
            if arguments.write is not None:
                report.write(arguments.write)
            if name in ALWAYS and result.state != "done":
                print(f"{name}: {result.state}; nothing is measured then", file=sys.stderr)
                break
    print(report.markdown())
    return 0 if all(result.state == "done" for result in own.values()) else 1


def _about(name: str) -> str:
    text: str = importlib.import_module(f"benchmarks.gpu.parts.{name}").ABOUT
    return text


def _run_part(name: str, result: PartResult, arguments: argparse.Namespace, folder: Path) -> None:
    """In a process of its own, until it ends or its time is over; fills `result`."""
    limit_s = arguments.limit.get(name, LIMITS_S[name])
    print(f"{name}, {limit_s:g} s at most", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "benchmarks.gpu", "--child", name, "--folder", str(folder)]
    command += ["--device", arguments.device, "--limit", f"{name}={limit_s}", *(["--smoke"] if arguments.smoke else [])]
    started = time.monotonic()
    result.state = run_limited(command, limit_s, environ=_environ(arguments))
    result.seconds = round(time.monotonic() - started, 1)
    result.entries = read_entries(folder / f"{name}.jsonl")
    print(f"{name}: {result.state}, {result.seconds:.0f} s", file=sys.stderr, flush=True)


def _environ(arguments: argparse.Namespace) -> dict[str, str]:
    """On a busy CPU, threads of a forward that spin for each other take tens of times as long."""
    return {**os.environ, "OMP_NUM_THREADS": "1"} if arguments.device == "cpu" else dict(os.environ)


def run_limited(
    command: list[str], limit_s: float, grace_s: float = GRACE_S, environ: dict[str, str] | None = None
) -> str:
    """Runs it, for a while beyond its limit at most; returns how it ended. Nothing of it is left then."""
    process = subprocess.Popen(command, start_new_session=True, env=environ)
    try:
        status = process.wait(limit_s + grace_s)
        return "done" if status == 0 else f"failed with status {status}, see the output"
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # what it started ends with it
        with suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
        return f"cut off after {limit_s:g} s"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _run_child(arguments: argparse.Namespace, device: torch.device) -> None:
    logging.basicConfig(level=logging.INFO, format="  %(name)s: %(message)s")
    name, folder = arguments.child, arguments.folder
    deadline = time.monotonic() + arguments.limit[name]
    recorder = Recorder(folder / f"{name}.jsonl", deadline)
    scale = SCALES["smoke" if arguments.smoke else "full"]
    own = folder / name
    own.mkdir()
    part = Part(name, device, scale, recorder, own, read_floors(folder / "floors.jsonl"))
    importlib.import_module(f"benchmarks.gpu.parts.{name}").run(part)


def read_floors(path: Path) -> Floors | None:
    """Of the part that measured them; None before it did."""
    rates = {entry["cells"]["what"]: median(entry["cells"]["rate"]) for entry in read_entries(path)}
    if not rates:
        return None
    return Floors(rates["copy"] * 1e9, rates["matmul"] * 1e12, rates["to host"] * 1e9, rates["to device"] * 1e9)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu")
    parser.add_argument("--smoke", action="store_true", help="a tiny model: proves that the benchmark works, no more")
    parser.add_argument("--part", type=_parts, default=list(LIMITS_S), help=f"of {', '.join(LIMITS_S)} (default: all)")
    parser.add_argument("--limit", type=_limits, default={}, help="seconds, as in decode=300,peers=120")
    parser.add_argument("--write", type=Path, help="the page; its JSON lies beside it")
    parser.add_argument("--add", action="store_true", help="keep the page's other parts, of an earlier run like this")
    parser.add_argument("--child", choices=list(LIMITS_S), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    try:
        find_device(arguments.device)
    except ValueError as error:
        parser.error(str(error))
    if arguments.add and (arguments.write is None or not arguments.write.with_suffix(".json").exists()):
        parser.error("--add: --write names no page of an earlier run")
    return arguments


def _parts(text: str) -> list[str]:
    """With those that always run, in their order."""
    wanted = {name.strip() for name in text.split(",")}
    if unknown := wanted - set(LIMITS_S):
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))} (allowed: {', '.join(LIMITS_S)})")
    return [name for name in LIMITS_S if name in wanted or name in ALWAYS]


def _limits(text: str) -> dict[str, float]:
    found = {}
    for item in text.split(","):
        name, _, seconds = item.partition("=")
        if name not in LIMITS_S:
            raise argparse.ArgumentTypeError(f"unknown: {name!r} (allowed: {', '.join(LIMITS_S)})")
        try:
            found[name] = float(seconds)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{item!r}: seconds are a number, as in {name}=300") from None
    return found


if __name__ == "__main__":
    sys.exit(main())
