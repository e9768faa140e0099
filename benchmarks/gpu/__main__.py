"""kvrelay on a GPU: its tests there, what it takes of what the GPU can do, and others on the same GPU.

    scripts/gpu-run --archives DIR --out DIR [--kept gpu.jsonl]      # on a bare machine: unpacks packages first
    python -m benchmarks.gpu --out DIR                               # where they are installed; again, to go on
    python -m benchmarks.gpu --out DIR --steps decode,prefill
    python -m benchmarks.gpu --out DIR --device cpu --smoke          # all, tiny, on a CPU

Steps run by priority, each in a process of its own, within a time of its own and one for all. The folder has
`gpu.jsonl`, written row by row, with which the next call goes on (it repeats neither steps that are done nor tests that
passed), `gpu.md`, the page, and `gpu.log`, the steps' output. A step that fails or hangs is ended, and the next one
begins. Ratios within a run are what to trust; if parity failed, no figure counts.

The model has Llama-3-8B's shape in bfloat16, with random weights made on the device. It takes a GPU with 80 GB.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import shlex
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.gpu import journal
from benchmarks.gpu.report import header, markdown
from benchmarks.gpu.run_steps import Run, adopt_orphans, end_orphans
from benchmarks.gpu.steps import BY_NAME, SMOKE_LIMIT_S, STEPS, Step


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0 if every step is done, in this run or an earlier one."""
    arguments = _arguments(argv)
    if arguments.child:
        _run_child(arguments)
        return 0
    on_gpu = arguments.device != "cpu"
    command = shlex.join(["python", "-m", "benchmarks.gpu", *(sys.argv[1:] if argv is None else argv)])
    setting = header(command, on_gpu=on_gpu, smoke=arguments.smoke)
    if on_gpu and "GPU" not in setting["machine"]:
        print("nvidia-smi finds no GPU here (allowed: --device cpu --smoke)", file=sys.stderr)
        return 2
    if not on_gpu:  # on a busy CPU, threads of a forward that spin for each other take tens of times as long
        os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("FLASHINFER_DISABLE_JIT", "1")  # a kernel that is missing is an error, not minutes of nvcc

    def command_of(step: Step, limit_s: float, passed: list[str]) -> list[str]:
        return step.command(device=arguments.device, smoke=arguments.smoke, out=run.out, limit_s=limit_s, passed=passed)

    def write_page() -> None:
        end_orphans()
        page = markdown(journal.read(run.path), setting)
        (run.out / "gpu.md").write_text(page, encoding="utf-8")

    run = Run(arguments.out, setting, arguments.total_s, command_of, write_page)
    if arguments.kept is not None and not run.path.exists():
        run.out.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(arguments.kept, run.path)
    adopt_orphans()
    steps = [BY_NAME[name] for name in arguments.steps]
    if arguments.smoke:
        steps = [replace(step, limit_s=SMOKE_LIMIT_S) for step in steps]
    return 0 if run.all(steps) else 1


def _run_child(arguments: argparse.Namespace) -> None:
    """A part. Its modules import torch, for which the process that runs the steps has no time."""
    from benchmarks.gpu.part import Part, read_floors
    from benchmarks.gpu.scale import SCALES
    from kvrelay.engine.run.device import find_device

    logging.basicConfig(level=logging.INFO, format="  %(name)s: %(message)s")
    step, path = BY_NAME[arguments.child], arguments.out / "gpu.jsonl"
    recorder = journal.Recorder(path, step.name, time.monotonic() + arguments.limit)
    scale = SCALES["smoke" if arguments.smoke else "full"]
    with tempfile.TemporaryDirectory() as folder:
        part = Part(find_device(arguments.device), scale, recorder, Path(folder), read_floors(path), step.argument)
        importlib.import_module(f"benchmarks.gpu.parts.{step.part or step.name}").run(part)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    names = [step.name for step in STEPS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--smoke", action="store_true", help="a tiny model: proves that the benchmark works, no more")
    parser.add_argument("--steps", type=_steps, default=names, help=f"of {', '.join(names)} (default: all)")
    parser.add_argument("--out", type=Path, required=True, help="the folder of the journal, the page and the log")
    parser.add_argument("--kept", type=Path, help="an earlier run's gpu.jsonl, if it is not in the folder already")
    parser.add_argument("--total-s", type=float, default=480.0, help="seconds for all steps together (default: 480)")
    parser.add_argument("--child", choices=names, help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.kept is not None and not arguments.kept.is_file():
        parser.error(f"--kept: there is no file {arguments.kept}")
    return arguments


def _steps(text: str) -> list[str]:
    """Names in the steps' order, with those that every run does."""
    wanted = {name.strip() for name in text.split(",")}
    if unknown := wanted - set(BY_NAME):
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))} (allowed: {', '.join(BY_NAME)})")
    return [step.name for step in STEPS if step.name in wanted or step.always]


if __name__ == "__main__":
    sys.exit(main())
