"""Bubbles of a pipeline of two stages with long prompts: chunks of fixed size against chunks of equal time.

A model with random weights runs in the engine in Python on two processes of one thread each. Prompts of `--prompt`
tokens wait from the start, and each brings one token. The bubble share of a stage is the part of the time, from the
first step to the last, in which it computes nothing. Engines take turns, `--rounds` times. Run it alone, with two idle
cores.

With `--decode` it measures tokens per second of running decodes instead, against one process of two threads (with the
modules of transformers, which stages run too) and two tensor-parallel ranks.

Usage: python -m benchmarks.pipeline [--decode] [--prompt 8192] [--prompts 5] [--budget 1024] [--layers 8] [--rounds 2]
       [--write benchmarks/results/pipeline.md]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrelay import Engine, SamplingParams
from kvrelay.ranks.ranked_runner import RankedRunner

DEMO = Path(__file__).resolve().parents[1] / "models" / "demo"
SHAPE = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4}
AT_A_TIME = "fixed chunks, one step at a time"
ENGINES: dict[str, tuple[str, float]] = {
    "fixed chunks": ("fixed", 1),
    "dynamic chunks": ("dynamic", 1),
    "fixed chunks, shorter": ("fixed", 0.375),
    "dynamic chunks, longer": ("dynamic", 2.5),
    AT_A_TIME: ("fixed", 1),
}
"""The chunking, and the part of the token budget. Dynamic chunks are at most as long as the budget, so there are more;
the shorter and the longer ones compare similar numbers of steps."""
DECODING: dict[str, dict[str, Any]] = {
    "one process, 2 threads, modules": {"threads": 2, "fused_layers": False},
    "2 stages, 1 thread each": {"threads": 1, "pipeline_parallel_size": 2},
    "2 tensor-parallel ranks, 1 thread each": {"threads": 1, "tensor_parallel_size": 2},
}
BATCHES = (1, 16, 64)
DECODE_PARAMS = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
ONE_PARAMS = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


@dataclass(frozen=True)
class Run:
    """`bubbles`: the share of each stage, from the first one on."""

    bubbles: tuple[float, ...]
    num_steps: int
    tokens_per_s: float


def write_model(directory: Path, num_layers: int, max_model_len: int) -> None:
    """A directory with the config of a small model and the demo model's tokenizer."""
    config = json.loads((DEMO / "config.json").read_text()) | SHAPE
    config |= {"head_dim": 64, "num_hidden_layers": num_layers, "max_position_embeddings": max_model_len}
    config["layer_types"] = ["full_attention"] * num_layers
    (directory / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, directory / name)


def measure(model: Path, args: argparse.Namespace, name: str) -> Run:
    """Runs the prompts with the engine of this name."""
    chunking, part = ENGINES[name]
    engine = Engine(
        str(model),
        load_format="dummy",
        dtype="bfloat16",
        threads=1,
        num_blocks=3 * (args.prompt // 16 + 2),
        token_budget=int(part * args.budget),
        chunking=chunking,
        max_running=2,
        prefix_cache=False,
        max_model_len=args.prompt + 32,
        pipeline_parallel_size=2,
    )
    try:
        runner = engine._runner
        assert isinstance(runner, RankedRunner)
        if name == AT_A_TIME:
            engine._steps._max_in_flight = 1
        engine.generate([7] * args.prompt, ONE_PARAMS)  # warm, and the cost model has seen long contexts
        for number in range(args.prompts):
            engine.add_request(None, [10 + number] * args.prompt, ONE_PARAMS)
        before, num_before, began = runner.stages_busy_s, engine.totals.num_steps, time.perf_counter()
        while engine.has_work:
            engine.step()
        took_s = time.perf_counter() - began
        busy_s = [after - earlier for after, earlier in zip(runner.stages_busy_s, before, strict=True)]
        num_steps = engine.totals.num_steps - num_before
        return Run(tuple(1 - each / took_s for each in busy_s), num_steps, args.prompts * args.prompt / took_s)
    finally:
        engine.close()


def measure_decode(model: Path, settings: dict[str, Any]) -> list[float]:
    """Tokens per second behind prompts of 64 tokens, for each of `BATCHES`."""
    engine = Engine(
        str(model),
        load_format="dummy",
        dtype="bfloat16",
        num_blocks=2000,
        token_budget=512,
        max_running=64,
        prefix_cache=False,
        max_model_len=1024,
        **settings,
    )
    found = []
    try:
        for batch in BATCHES:
            names = [engine.add_request(None, [10 + number] * 64, DECODE_PARAMS) for number in range(batch)]
            waiting = set(names)
            while waiting:  # until all decode
                waiting -= {told.request_id for told in engine.step()}
            began, num_tokens = time.perf_counter(), 0
            while engine.has_work:
                num_tokens += sum(len(told.token_ids) for told in engine.step())
            found.append(num_tokens / (time.perf_counter() - began))
    finally:
        engine.close()
    return found


def compare_decoding(model: Path, num_rounds: int) -> str:
    """A row for each engine: medians over the rounds."""
    rounds: dict[str, list[list[float]]] = {name: [] for name in DECODING}
    for _ in range(num_rounds):
        for name, settings in DECODING.items():
            rounds[name].append(measure_decode(model, settings))
            print(name, rounds[name][-1], flush=True)
    lines = [f"| Tokens/s by sequences | {' | '.join(map(str, BATCHES))} |", "|---|" + "---|" * len(BATCHES)]
    for name, runs in rounds.items():
        speeds = (f"{statistics.median(each):.0f}" for each in zip(*runs, strict=True))
        lines.append(f"| {name} | {' | '.join(speeds)} |")
    return "\n".join(lines)


def table(rounds: dict[str, list[Run]]) -> str:
    """A row for each engine: medians over the rounds."""
    lines = ["| Chunks | Bubble share, first stage | last stage | mean | Steps | Prompt tokens/s |"]
    lines.append("|---|---|---|---|---|---|")
    for name, runs in rounds.items():
        stages = [statistics.median(run.bubbles[stage] for run in runs) for stage in range(2)]
        mean = statistics.median(statistics.mean(run.bubbles) for run in runs)
        steps = round(statistics.median(run.num_steps for run in runs))
        speed = statistics.median(run.tokens_per_s for run in runs)
        lines.append(f"| {name} | {stages[0]:.3f} | {stages[1]:.3f} | {mean:.3f} | {steps} | {speed:.0f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decode", action="store_true")
    parser.add_argument("--prompt", type=int, default=8192)
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--write", type=Path)
    args = parser.parse_args()
    rounds: dict[str, list[Run]] = {name: [] for name in ENGINES}
    with tempfile.TemporaryDirectory() as name:
        write_model(Path(name), args.layers, args.prompt + 64)
        if args.decode:
            print(compare_decoding(Path(name), args.rounds))
            return
        for _ in range(args.rounds):
            for engine in ENGINES:
                run = measure(Path(name), args, engine)
                rounds[engine].append(run)
                print(engine, run, flush=True)
    text = (
        f"# Pipeline\n\n`python -m benchmarks.pipeline`: {args.prompts} prompts of {args.prompt} tokens, token budget "
        f"{args.budget},\n{args.layers} layers (hidden size {SHAPE['hidden_size']}) in bfloat16 on 2 stages of one "
        f"thread, median of {args.rounds} rounds,\nalone on the machine. {platform.machine()}, {os.cpu_count()} cores."
        f"\n\n{table(rounds)}\n"
    )
    print(text)
    if args.write:
        args.write.write_text(text)


if __name__ == "__main__":
    main()
