"""A limit that was estimated before: where swapping and recomputing cross."""

from __future__ import annotations

import numpy as np

from benchmarks.gpu.figures import figures, ratios
from benchmarks.gpu.part import Part
from benchmarks.gpu.scale import BLOCK_SIZE
from kvrelay.engine.run.transformers_runner import TransformersRunner
from kvrelay.kv.table import blocks_for
from kvrelay.step.batch import SwapCopies, WorkerBatch, WorkerRow

ABOUT = (
    "Preemption: the KV of one sequence is computed again in chunks of 512 tokens, or its scattered blocks are copied "
    "to pinned host memory and back. Ratios above 1: swapping is faster."
)
_SWAPPED = (256, 1024, 4096, 8000)
_REPEATS = 3
_TOKEN_BUDGET = 512


def run(part: Part) -> None:
    """A row for each length that is swapped."""
    lengths = [length for length in _SWAPPED if length <= part.scale.max_model_len]
    runner = part.runner(2 * lengths[-1], [], num_swap_slots=blocks_for(lengths[-1], BLOCK_SIZE))
    for length in lengths:
        _swapping(part, runner, length)


def _swapping(part: Part, runner: TransformersRunner, length: int) -> None:
    blocks = np.random.default_rng(length).permutation(runner.spec.num_blocks).astype(np.int32)
    blocks = blocks[: blocks_for(length, BLOCK_SIZE)]
    recomputed, out, back = [], [], []
    for repeat in range(_REPEATS + 1):
        computed_s, (out_s, back_s) = _prefill_s(runner, length, blocks), _swap_s(runner, blocks)
        if repeat:
            recomputed.append(computed_s)
            out.append(out_s)
            back.append(back_s)
    swapped = [a + b for a, b in zip(out, back, strict=True)]
    num_bytes = len(blocks) * runner.spec.block_bytes
    part.recorder.row(
        "Preemption",
        tokens=length,
        recompute_ms=figures([1e3 * s for s in recomputed], 2),
        out_ms=figures([1e3 * s for s in out], 2),
        back_ms=figures([1e3 * s for s in back], 2),
        swap_GBps=figures([2 * num_bytes / 1e9 / s for s in swapped], 1),
        recompute_over_swap=ratios(recomputed, swapped),
    )


def _prefill_s(runner: TransformersRunner, num_tokens: int, blocks: np.ndarray) -> float:
    """Seconds of a prompt's chunks, nothing beside them."""
    tokens = np.random.default_rng(num_tokens).integers(5, 2000, num_tokens).astype(np.int32)
    seconds = 0.0
    for start in range(0, num_tokens, _TOKEN_BUDGET):
        part = tokens[start : start + _TOKEN_BUDGET]
        row = WorkerRow(("recompute", 1, 0), part, start, blocks, sample=False, is_prefill=True)
        seconds += runner.execute(WorkerBatch(0, [row])).forward_s
    return seconds


def _swap_s(runner: TransformersRunner, blocks: np.ndarray) -> tuple[float, float]:
    """Seconds out, seconds back."""
    copies = SwapCopies(tuple(blocks.tolist()), tuple(range(len(blocks))))
    out = runner.execute(WorkerBatch(0, [], swap_out=copies)).copy_s
    return out, runner.execute(WorkerBatch(0, [], swap_in=copies)).copy_s
