"""What dividing a model among ranks costs on one machine: two ranks of one thread against one process of two threads.

A model of the shape of Qwen3-0.6B with random weights runs in the engine in Python: decoding steps of so many sequences
behind prompts of 64 tokens, and prompts of 512 tokens, one step each. Both run fused layers, and the modules of
transformers. Engines take turns, `--rounds` times; the table has medians, and the speed of ranks as a share of that of
one process of the same kind. The time in collectives is rank 0's, waits for the other rank included, without the sums
within fused layers.

Usage: python -m benchmarks.ranks [--dtype bfloat16] [--layers 28] [--rounds 2] [--only fused]
    [--write benchmarks/results/ranks.md]
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvrelay import Engine, SamplingParams
from kvrelay.engine.parallel.group_coordinator import GroupCoordinator

DEMO = Path(__file__).resolve().parents[1] / "models" / "demo"
BATCHES = (1, 8)
NUM_STEPS = 24
NUM_WARM = 4
PROMPT_TOKENS = 512
NUM_PROMPTS = 5
ENGINES: dict[str, dict[str, Any]] = {
    "one process, 2 threads, fused layers": {"threads": 2},
    "one process, 2 threads, modules": {"threads": 2, "fused_layers": False},
    "2 ranks, 1 thread each, fused layers": {"threads": 1, "tensor_parallel_size": 2},
    "2 ranks, 1 thread each, modules": {"threads": 1, "tensor_parallel_size": 2, "fused_layers": False},
}
KINDS = ("fused layers", "modules")
ONE = "one process, 2 threads"


def write_model(directory: Path, num_layers: int) -> None:
    """A directory with the config of Qwen3-0.6B and the demo model's tokenizer."""
    config = json.loads((DEMO / "config.json").read_text())
    config |= {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8}
    config |= {"head_dim": 128, "num_hidden_layers": num_layers, "vocab_size": 151936}
    config["layer_types"] = ["full_attention"] * num_layers
    (directory / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, directory / name)


@contextmanager
def timed_collectives() -> Iterator[list[float]]:
    """Seconds of rank 0 in collectives, one entry for each."""
    seconds: list[float] = []
    originals = {name: getattr(GroupCoordinator, name) for name in ("all_reduce", "gather_columns")}

    def timed(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            result = original(*args, **kwargs)
            seconds.append(time.perf_counter() - began)
            return result

        return call

    for name, original in originals.items():
        setattr(GroupCoordinator, name, timed(original))
    try:
        yield seconds
    finally:
        for name, original in originals.items():
            setattr(GroupCoordinator, name, original)


def timed_steps(engine: Engine, count: int, collectives: list[float]) -> tuple[float, float]:
    """Median seconds of a step, and of it in collectives."""
    steps, waits = [], []
    for _ in range(count):
        collectives.clear()
        began = time.perf_counter()
        engine.step()
        steps.append(time.perf_counter() - began)
        waits.append(sum(collectives))
    return statistics.median(steps), statistics.median(waits)


def measure(model: Path, dtype: str, settings: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Seconds of a step, and of it in collectives, by name of the load."""
    found: dict[str, tuple[float, float]] = {}
    with timed_collectives() as collectives:
        engine = Engine(
            str(model),
            load_format="dummy",
            dtype=dtype,
            num_blocks=256,
            token_budget=PROMPT_TOKENS,
            prefix_cache=False,
            max_model_len=2048,
            **settings,
        )
        try:
            for batch in BATCHES:
                params = SamplingParams(temperature=0, max_tokens=NUM_STEPS + NUM_WARM + 2, ignore_eos=True)
                for number in range(batch):
                    engine.add_request(None, [10 + number] * 64, params)
                for _ in range(1 + NUM_WARM):
                    engine.step()
                found[f"decoding, {batch}"] = timed_steps(engine, NUM_STEPS, collectives)
                for name in list(engine.request_ids):
                    engine.abort(name)
            for number in range(NUM_PROMPTS + 1):
                engine.add_request(
                    None, [20 + number] * PROMPT_TOKENS, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
                )
            engine.step()
            found[f"prompt of {PROMPT_TOKENS}"] = timed_steps(engine, NUM_PROMPTS, collectives)
        finally:
            engine.close()
    return found


def table(rounds: dict[str, list[dict[str, tuple[float, float]]]]) -> str:
    """A row for each engine and load: medians, and the speed as a share of that of one process of the same kind, in the
    median of rounds and in each round."""
    head = "| Load | Engine | Step, ms | In collectives, ms | Speed, of one process | In each round |"
    lines = [head, "|---|---|---|---|---|---|"]
    for load in next(iter(rounds.values()))[0]:
        for name, runs in rounds.items():
            kind = name.rpartition(", ")[2]
            shares = [one[load][0] / run[load][0] for one, run in zip(rounds[f"{ONE}, {kind}"], runs, strict=True)]
            step, waits = (1e3 * statistics.median(run[load][at] for run in runs) for at in (0, 1))
            each = ", ".join(f"{share:.2f}" for share in shares)
            lines.append(f"| {load} | {name} | {step:.1f} | {waits:.1f} | {statistics.median(shares):.2f} | {each} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", choices=[each.partition(" ")[0] for each in KINDS], help="engines of this kind")
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    engines = {
        name: settings
        for name, settings in ENGINES.items()
        if arguments.only is None or name.rpartition(", ")[2].startswith(arguments.only)
    }
    rounds: dict[str, list[dict[str, tuple[float, float]]]] = {name: [] for name in engines}
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory), arguments.layers)
        for _ in range(arguments.rounds):
            for name, settings in engines.items():
                rounds[name].append(measure(Path(directory), arguments.dtype, settings))
    text = f"""# Ranks

`python -m benchmarks.ranks`: {arguments.layers} layers of Qwen3-0.6B's shape in {arguments.dtype}, random weights,
rounds in turns: {arguments.rounds}. {platform.machine()}, {len(os.sched_getaffinity(0))} cores.

{table(rounds)}
"""
    print(text)
    if arguments.write:
        arguments.write.write_text(text)


if __name__ == "__main__":
    main()
