"""Times one layer of paged attention on the CPU: the compiled kernel against gathering blocks for torch's SDPA.

Run: python -m benchmarks.attention_cpu [--threads 2] [--repeats 20]
Prints, for each case, the median milliseconds of both with their 10th and 90th percentiles, and the ratio.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from kvrelay.backends.backend import KV_DTYPES, AttentionBackend, AttentionParams, KVLayout, PackedRows, allocate_pool
from kvrelay.backends.cpu import CpuBackend
from kvrelay.backends.torch_sdpa import TorchBackend

_NUM_HEADS, _NUM_KV_HEADS, _HEAD_DIM, _BLOCK_SIZE = 16, 8, 128, 16


@dataclass(frozen=True, slots=True)
class TimedCase:
    """One step: the new tokens and the position of every row."""

    name: str
    query_lens: list[int]
    positions: list[int]


CASES = [
    TimedCase("decode B=1 ctx=1024", [1], [1023]),
    TimedCase("decode B=1 ctx=8192", [1], [8191]),
    TimedCase("decode B=8 ctx=1024", [1] * 8, [1023] * 8),
    TimedCase("decode B=32 ctx=1024", [1] * 32, [1023] * 32),
    TimedCase("prefill 512", [512], [0]),
    TimedCase("prefill 2048", [2048], [0]),
    TimedCase("chunk 512 at 1536", [512], [1536]),
    TimedCase("chunk 256 at 0, decode B=16 ctx=1024", [256, *[1] * 16], [0, *[1023] * 16]),
]


def make_rows(case: TimedCase) -> PackedRows:
    """The case's rows over blocks in random order."""
    num_blocks = [-(-(p + q) // _BLOCK_SIZE) for p, q in zip(case.positions, case.query_lens, strict=True)]
    order = np.random.default_rng(0).permutation(sum(num_blocks)).astype(np.int32)
    tables = np.zeros((len(num_blocks), max(num_blocks)), np.int32)
    for row, blocks in enumerate(np.split(order, np.cumsum(num_blocks)[:-1])):
        tables[row, : len(blocks)] = blocks
    return PackedRows(np.array(case.query_lens, np.int32), np.array(case.positions, np.int32), tables)


def time_case(
    backend: AttentionBackend, case: TimedCase, dtype: torch.dtype, stored: torch.dtype | None, repeats: int
) -> np.ndarray:
    """Milliseconds of each repeat, planning not counted (it is shared by all layers)."""
    rows = make_rows(case)
    layout = KVLayout(1, _NUM_KV_HEADS, _HEAD_DIM, _BLOCK_SIZE, dtype, stored)
    pool = allocate_pool(layout, int(rows.block_tables.max()) + 1, torch.device("cpu"))
    pool.copy_(torch.randn(pool.shape))
    num_tokens = sum(case.query_lens)
    query = torch.randn(num_tokens, _NUM_HEADS, _HEAD_DIM).to(dtype)
    key, value = torch.randn(2, num_tokens, _NUM_KV_HEADS, _HEAD_DIM).to(dtype)
    step = backend.plan(pool, rows)
    params = AttentionParams(scaling=_HEAD_DIM**-0.5)
    run: Callable[[], object] = lambda: step.attend(0, query, key, value, params)  # noqa: E731
    run()
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        taken.append((time.perf_counter() - start) * 1e3)
    return np.array(taken)


def main() -> None:
    """Prints a line per case and dtype."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    heads = f"{_NUM_HEADS} heads, {_NUM_KV_HEADS} KV heads of {_HEAD_DIM}"
    print(f"{heads}, {arguments.threads} threads; milliseconds: median [10th, 90th percentile]")
    kinds: list[tuple[str, torch.dtype, torch.dtype | None]] = [("float32", torch.float32, None)]
    kinds += [("bfloat16", torch.bfloat16, None)]
    kinds += [(f"float32, KV {name}", torch.float32, stored) for name, stored in KV_DTYPES.items()]
    for kind, dtype, stored in kinds:
        for case in CASES:
            kernel = time_case(CpuBackend(), case, dtype, stored, arguments.repeats)
            gather = time_case(TorchBackend(), case, dtype, stored, max(3, arguments.repeats // 4))
            texts = [
                "{1:9.2f} [{0:.2f}, {2:.2f}]".format(*np.percentile(taken, (10, 50, 90))) for taken in (kernel, gather)
            ]
            ratio = np.median(gather) / np.median(kernel)
            print(f"{kind:20} {case.name:38} kernel {texts[0]:28} gather {texts[1]:28} {ratio:5.1f}x")


if __name__ == "__main__":
    main()
