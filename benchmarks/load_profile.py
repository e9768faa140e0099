"""Where the time of a load goes on one worker that does both phases, and how near steps are to the machine's limits.

Router, worker and client are those of `step_profile`, the load is the closed loop of `peers`. A step is of one of two
kinds: with a chunk of a prompt, or decodes alone. For each kind: steps, the share of the load's time (the wall's clock)
that their layers and head take, tokens, and forward / floor. The floor is the sum over steps of the longer one of
reading weights and KV once at the read bandwidth, and computing all products at the rate of `torch.mm`, the better ones
of before and after the loads.

Usage: python -m benchmarks.load_profile --model DIR [--concurrency 8 32] [--requests 24 96] [--prompt-tokens 512]
    [--output-tokens 64] [--threads 2] [--write FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.cpu_kernels import cpu_name
from benchmarks.cpu_kernels_clock import DTYPE, Clock, Machine
from benchmarks.cpu_kernels_steps import StepCase, Work, step_work
from benchmarks.step_profile import send, served_name, serving, table
from kvrelay.engine.causal_model import CausalModel, load_model, open_source
from kvrelay_bench.load_figures import BenchSlo, figures
from kvrelay_bench.load_generator import LoadPoint
from kvrelay_bench.workload import Shape, Wire, synthetic

KINDS = ("with prompts", "decodes alone")
IDLE_NS = 20_000_000
"""A longer time between two forwards has waited for requests: a step's own work beside its forward is shorter."""
WIRE = Wire(token_ids=(1000, 2000), extra={"temperature": 0.0})


@dataclass(frozen=True, slots=True)
class Limits:
    """What the machine allowed, before the loads or after them."""

    read_gb_s: float
    gflop_s: float


@dataclass(frozen=True, slots=True)
class KindFigures:
    """The steps of one kind in a load. Times are sums over its steps, in seconds."""

    num_steps: int
    num_prompt_tokens: int
    num_decode_tokens: int
    forward_s: float
    floor_s: float


@dataclass(frozen=True, slots=True)
class LoadProfile:
    """A load's steps. `seconds`: from the begin of its first forward to the end of its last one."""

    concurrency: int
    output_tokens_s: float
    seconds: float
    kinds: dict[str, KindFigures]
    between_s: float
    idle_s: float


def profile_of(
    lines: Sequence[dict[str, Any]], works: Sequence[Work], limits: Limits, concurrency: int, output_tokens_s: float
) -> LoadProfile:
    """`works`: that of each step of `lines`, which are in the order of time."""
    kinds = {}
    for kind in KINDS:
        chosen = [
            (line, work)
            for line, work in zip(lines, works, strict=True)
            if bool(line["prompt_tokens"]) == (kind == KINDS[0])
        ]
        floors = [work.floor_s(limits.read_gb_s, limits.gflop_s) for _, work in chosen]
        prompts = sum(line["prompt_tokens"] for line, _ in chosen)
        kinds[kind] = KindFigures(
            num_steps=len(chosen),
            num_prompt_tokens=prompts,
            num_decode_tokens=sum(sum(line["tokens"]) for line, _ in chosen) - prompts,
            forward_s=sum(line["forward"] for line, _ in chosen) / 1e9,
            floor_s=sum(seconds for seconds, _ in floors),
        )
    seconds = (lines[-1]["ended"] - lines[0]["began"]) / 1e9
    idle_s = sum(line["gap"] for line in lines[1:] if line["gap"] > IDLE_NS) / 1e9
    forward_s = sum(each.forward_s for each in kinds.values())
    return LoadProfile(concurrency, output_tokens_s, seconds, kinds, seconds - forward_s - idle_s, idle_s)


def read_limits(threads: int) -> Limits:
    machine = Machine(Clock(threads, 5))
    return Limits(machine.read_gb_s(), machine.gemm_gflop_s(DTYPE))


def measure(arguments: argparse.Namespace) -> tuple[list[LoadProfile], Limits]:
    before = read_limits(arguments.threads)
    shape = Shape(arguments.prompt_tokens, arguments.output_tokens)
    loads = list(zip(arguments.concurrency, arguments.requests, strict=True))
    warm_up = max(arguments.concurrency)
    parts: list[tuple[int, float, int, int]] = []
    with tempfile.TemporaryDirectory() as directory:
        record = Path(directory) / "steps.jsonl"
        with serving(arguments, record) as port:
            name = served_name(port)
            asyncio.run(send(port, name, LoadPoint("", synthetic(shape, [0.0] * warm_up, 1 << 40), warm_up), WIRE))
            for number, (concurrency, count) in enumerate(loads):
                first = len(record.read_bytes().splitlines())
                point = LoadPoint("", synthetic(shape, [0.0] * count, number), concurrency)
                found = figures(asyncio.run(send(port, name, point, WIRE)), BenchSlo())
                parts.append((concurrency, found.output_tokens_s, first, len(record.read_bytes().splitlines())))
        lines = [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()]
    after = read_limits(arguments.threads)
    limits = Limits(max(before.read_gb_s, after.read_gb_s), max(before.gflop_s, after.gflop_s))
    source = open_source(str(arguments.model), arguments.dtype, max_model_len=4096)
    model = load_model(source, block_size=16)
    profiles = [
        profile_of(of_load := lines[first:end], works(model, of_load), limits, concurrency, rate)
        for concurrency, rate, first, end in parts
    ]
    return profiles, limits


def works(model: CausalModel, lines: Sequence[dict[str, Any]]) -> list[Work]:
    """The work of each step. The head counts for all rows, though the chunks before a prompt's last one need none."""
    return [step_work(model, StepCase("", line["tokens"], line["positions"])) for line in lines]


def report(profiles: Sequence[LoadProfile], limits: Limits, arguments: argparse.Namespace) -> str:
    lines = [
        "# Where the time of a load goes",
        "",
        f"{cpu_name()}, {platform.machine()} with {os.cpu_count()} cores (load {os.getloadavg()[0]:.1f} at the end), "
        f"{arguments.threads} thread(s) for the model, {arguments.dtype}; {arguments.prompt_tokens} prompt and "
        f"{arguments.output_tokens} output tokens. {limits.read_gb_s:.1f} GB/s read, {limits.gflop_s:.0f} GFLOP/s. "
        "Repeat with `python -m benchmarks.load_profile`; the script's head says what is measured.",
        "",
    ]
    header = ["", "steps", "share of the time", "prompt tokens", "decode tokens", "ms per step", "forward / floor"]
    for each in profiles:
        rows = []
        for kind, of_kind in each.kinds.items():
            if not of_kind.num_steps:
                continue
            rows.append(
                [
                    f"forward {kind}",
                    f"{of_kind.num_steps:,}",
                    f"{of_kind.forward_s / each.seconds:.1%}",
                    f"{of_kind.num_prompt_tokens:,}",
                    f"{of_kind.num_decode_tokens:,}",
                    f"{of_kind.forward_s / of_kind.num_steps * 1e3:.2f}",
                    f"{of_kind.forward_s / of_kind.floor_s:.2f}",
                ]
            )
        num_steps = sum(of_kind.num_steps for of_kind in each.kinds.values())
        between = f"{each.between_s / num_steps * 1e3:.2f}"
        rows.append(["between forwards", "", f"{each.between_s / each.seconds:.1%}", "", "", between, ""])
        rows.append(["waiting for requests", "", f"{each.idle_s / each.seconds:.1%}", "", "", "", ""])
        lines += [
            f"## Concurrency {each.concurrency}: {each.output_tokens_s:.0f} output tokens/s in {each.seconds:.1f} s",
            "",
            *table(header, rows),
            "",
        ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--requests", type=int, nargs="+", default=[24, 96])
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--flag", action="append", default=[], help="one more argument of the worker; repeatable")
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    if len(arguments.concurrency) != len(arguments.requests):
        parser.error("--requests needs as many numbers as --concurrency")
    torch.set_num_threads(arguments.threads)
    text = report(*measure(arguments), arguments)
    print(text)
    if arguments.write:
        arguments.write.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
