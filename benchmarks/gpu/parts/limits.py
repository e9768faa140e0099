"""Limits that were estimated before: where swapping and recomputing cross, and when reading a prefix once pays."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from benchmarks.gpu.figures import figures, ratios
from benchmarks.gpu.part import Part, decoding_batch, interleaved, launching
from benchmarks.gpu.scale import BLOCK_SIZE
from kvrelay.backends.cascade import CascadeCosts
from kvrelay.backends.flashinfer import FlashInferBackend
from kvrelay.engine.run.graphs import DecodeGraphs
from kvrelay.engine.run.transformers_runner import TransformersRunner
from kvrelay.kv.table import blocks_for
from kvrelay.step.batch import SwapCopies, WorkerBatch, WorkerRow

ABOUT = (
    "Preemption: the KV of one sequence is computed again in chunks of 512 tokens, or its scattered blocks are copied "
    "to pinned host memory and back. Ratios above 1: swapping is faster. Cascade attention: a decoding step whose "
    "sequences share a prefix, as a replay of a graph, launched kernel by kernel, and launched with the prefix read "
    "once for all of them. Saved: keys and values of a layer that are not read again. Pays above: the saving at which "
    "the step would take as long as the other way."
)
_SWAPPED = (256, 1024, 4096, 8000)
_SHARED = ((16, 1024), (64, 1024), (64, 4096), (256, 1024))  # sequences, tokens of their prefix
_OWN = 64  # tokens of a sequence behind the prefix
_REPEATS = 3
_TOKEN_BUDGET = 512
_SHARING = "kernel by kernel, shared"
_FREE = CascadeCosts(row_tokens=0, step_tokens=0)


def run(part: Part) -> None:
    """A row for each length that is swapped, and for each shared prefix."""
    on_gpu = part.device.type == "cuda"
    lengths = [length for length in _SWAPPED if length <= part.scale.max_model_len]
    shared = _SHARED if on_gpu else ((4, 64),)
    num_tokens = max([2 * lengths[-1], *(prefix + batch * 2 * _OWN for batch, prefix in shared)])
    sizes = sorted({batch for batch, _ in shared})
    runner = part.runner(num_tokens, sizes, num_swap_slots=blocks_for(lengths[-1], BLOCK_SIZE))
    for length in lengths:
        _swapping(part, runner, length)
    backend = part.model().backend
    if not isinstance(backend, FlashInferBackend):
        part.recorder.note("Shared prefixes are read together by FlashInfer alone.")
        return
    for batch, prefix in shared:
        if part.recorder.has_time(f"{batch} sequences with a prefix of {prefix} tokens, and more"):
            _sharing(part, runner, backend, batch, prefix)


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


def _sharing(part: Part, runner: TransformersRunner, backend: FlashInferBackend, batch: int, prefix: int) -> None:
    step = decoding_batch(runner, batch, prefix + _OWN, num_shared=prefix)
    works: dict[str, Callable[[], float]] = {
        how: _seconds(part, runner, backend, step, graphs, None) for how, graphs in part.launches(runner).items()
    }
    works[_SHARING] = _seconds(part, runner, backend, step, None, _FREE)
    taken = interleaved(works, part.scale.repeats)
    num_layers, rate = part.scale.config["num_hidden_layers"], part.known_floors.copy_rate
    saved = (batch - 1) * prefix * runner.spec.block_bytes // BLOCK_SIZE // num_layers
    for how, seconds in taken.items():
        late_s = [(shared_s - s) / num_layers for shared_s, s in zip(taken[_SHARING], seconds, strict=True)]
        part.recorder.row(
            "Cascade attention",
            sequences=batch,
            prefix=prefix,
            launched=how,
            step_ms=figures([1e3 * s for s in seconds], 3),
            saved_MiB=round(saved / 2**20, 1),
            pays_above_MiB="" if how == _SHARING else figures([(saved + s * rate) / 2**20 for s in late_s], 0),
        )


def _seconds(
    part: Part,
    runner: TransformersRunner,
    backend: FlashInferBackend,
    step: WorkerBatch,
    graphs: DecodeGraphs | None,
    costs: CascadeCosts | None,
) -> Callable[[], float]:
    def seconds() -> float:
        backend.share_prefixes(costs)
        try:
            with launching(runner, graphs):
                return part.seconds(lambda: runner.execute(step), part.scale.steps)
        finally:
            backend.share_prefixes(None)

    return seconds
