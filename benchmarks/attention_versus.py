"""Attention by the CPU kernels of this tree and of another one, in turns: for changes of kernels or of the KV's order.

Run: git worktree add ../other REVISION; python -m benchmarks.attention_versus ../other [--threads 1] [--rounds 5]
Prints, for each case, the least milliseconds of one layer in both trees, and the ratio; below 1 this tree is faster.
Layers are taken in turns, so that their KV comes from memory. Each tree runs in a process of its own, one at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import IO, Any

_BYTES = 128 * 2**20  # of all layers, several times a cache
_MAX_LAYERS = 28
_SHAPES = {"41.6M": (8, 4, 64), "0.6B": (16, 8, 128)}  # query heads, KV heads, head_dim
_DECODE = tuple(product((1, 8, 32), (1024, 4096)))
_PROMPTS = (512, 2048)


def cases(block_sizes: Sequence[int], dtypes: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The steps that are timed."""
    for shape, dtype, block_size in product(_SHAPES, dtypes, block_sizes):
        common = {"shape": shape, "dtype": dtype, "block_size": block_size}
        for batch, context in _DECODE:
            yield {**common, "lens": [1] * batch, "positions": [context - 1] * batch}
        for tokens in _PROMPTS:
            yield {**common, "lens": [tokens], "positions": [0]}


def title(case: dict[str, Any]) -> str:
    """The case's columns in the table."""
    tokens, rows = case["lens"][0], len(case["lens"])
    step = f"prompt of {tokens}" if tokens > 1 else f"decode {rows} x {case['positions'][0] + 1}"
    return f"{case['shape']} | {case['dtype']} | {case['block_size']} | {step}"


class _Step:
    """A case in the process of one tree, with what both trees' modules have in common."""

    def __init__(self, case: dict[str, Any]) -> None:
        import numpy as np
        import torch

        from kvrelay.backends.backend import AttentionParams, KVLayout, PackedRows, allocate_pool
        from kvrelay.backends.cpu import CpuBackend

        heads, kv_heads, dim = _SHAPES[case["shape"]]
        dtype, block_size = getattr(torch, case["dtype"]), case["block_size"]
        lens, positions = (np.array(case[name], np.int32) for name in ("lens", "positions"))
        width = int(max(-(-(lens + positions) // block_size)))
        tables = np.random.default_rng(0).permutation(width * len(lens)).astype(np.int32).reshape(len(lens), -1)
        layer_bytes = tables.size * block_size * kv_heads * dim * 2 * dtype.itemsize
        self._layers = min(_MAX_LAYERS, -(-_BYTES // layer_bytes))
        layout = KVLayout(self._layers, kv_heads, dim, block_size, dtype, None)
        pool = allocate_pool(layout, tables.size, torch.device("cpu"))
        pool.copy_(torch.randn(dim).to(dtype).expand(pool.shape))
        tokens = int(lens.sum())
        self._query = torch.randn(tokens, heads, dim).to(dtype)
        self._key, self._value = torch.randn(2, tokens, kv_heads, dim).to(dtype)
        self._params = AttentionParams(scaling=dim**-0.5)
        self._step = CpuBackend().plan(pool, PackedRows(lens, positions, tables))
        for layer in range(self._layers):
            self._attend(layer)

    def _attend(self, layer: int) -> None:
        self._step.attend(layer, self._query, self._key, self._value, self._params)

    def least(self, seconds: float) -> float:
        """The least seconds of a layer, of those that fit some time."""
        taken: list[float] = []
        end, layer = time.perf_counter() + seconds, 0
        while len(taken) < 3 or time.perf_counter() < end:
            start = time.perf_counter()
            self._attend(layer % self._layers)
            taken.append(time.perf_counter() - start)
            layer += 1
        return min(taken)


def serve(threads: int) -> None:
    """Answers lines of cases with lines of seconds, in the process of one tree."""
    import torch

    torch.set_num_threads(threads)
    current, step = None, None
    for line in sys.stdin:
        case, seconds = json.loads(line)
        if case != current or step is None:
            step = None  # its memory first
            current, step = case, _Step(case)
        print(step.least(seconds), flush=True)


class _Tree:
    """The process of one tree."""

    def __init__(self, root: Path, threads: int, stack: ExitStack) -> None:
        paths = os.pathsep.join([str(root / "shared"), str(root)])
        command = [sys.executable, __file__, "--serve", "--threads", str(threads)]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths}
        )
        stack.enter_context(process)
        assert process.stdin and process.stdout
        self._to: IO[str] = process.stdin
        self._back: IO[str] = process.stdout
        stack.callback(self._to.close)

    def least(self, case: dict[str, Any], seconds: float) -> float:
        """The least seconds of a layer."""
        print(json.dumps([case, seconds]), file=self._to, flush=True)
        return float(self._back.readline())


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, nargs="?", help="the directory of the other tree")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.1, help="of each round of each tree")
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.threads)
        return
    if arguments.other is None:
        parser.error("the directory of another tree is missing")
    print("| shape | type | block | step | other ms | this ms | ratio |\n|---|---|---|---|---|---|---|")
    with ExitStack() as stack:
        trees = [
            _Tree(root, arguments.threads, stack)
            for root in (arguments.other.resolve(), Path(__file__).resolve().parents[1])
        ]
        for case in cases(arguments.block_sizes, arguments.dtypes):
            rounds = [[tree.least(case, arguments.seconds) for tree in trees] for _ in range(arguments.rounds)]
            other, this = (min(taken) for taken in zip(*rounds, strict=True))
            print(f"| {title(case)} | {other * 1e3:.3f} | {this * 1e3:.3f} | {this / other:.2f} |", flush=True)


if __name__ == "__main__":
    main()
