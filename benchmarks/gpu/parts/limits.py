"""Limits in the code that were guessed for want of a GPU: what they cost beside others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.figures import figures
from benchmarks.gpu.part import Part, decoding_batch, interleaved
from benchmarks.gpu.parts.prefill import prompt_work
from benchmarks.gpu.parts.transfer import block_bytes_of
from benchmarks.gpu.scale import BLOCK_SIZE
from kvrelay.backends.backend import LayerKind
from kvrelay.backends.flashinfer_kernels import FlashInferKernels
from kvrelay.engine.run import block_copies
from kvrelay.engine.run.graph_sizes import default_sizes
from kvrelay.engine.run.transformers_runner import TransformersRunner
from kvrelay.kv.table import blocks_for
from kvrelay.step.batch import HostCopies, WorkerBatch

ABOUT = (
    "Graphs: capturing the default sizes for 256 sequences, and steps in the next larger one of them over steps in a "
    "graph of their own size. Copies: 128 blocks to pinned memory and back, by runs of neighbours as swapping does, "
    "and gathered through staging buffers of several sizes as ZMQ does. Workspace: bytes that kernels of the longest "
    "prompt and the largest decoding step wrote to. Attention: one layer, 64 sequences of 4,096 tokens that share "
    "all but 512: FlashInfer's decode kernel, on tensor cores or not, over the same shared blocks, and its cascade."
)
_COPIED = 128
_SEQUENCES, _SHARED, _OWN = 64, 3584, 512
_CALLS = 20


def run(part: Part) -> None:
    """A table each; kernels on a GPU alone."""
    _copies(part)
    if part.device.type != "cuda":
        part.recorder.note("Graphs, workspace and attention are of a GPU alone.")
        return
    for name, measure in {"attention": _attention, "graphs": _graphs}.items():
        if part.recorder.has_time(name):
            measure(part)


def _copies(part: Part) -> None:
    block_bytes = block_bytes_of(part)
    pool = torch.randn(2 * _COPIED, block_bytes // 4, device=part.device)
    host, none = block_copies.HostBuffer(pool, _COPIED), HostCopies((), ())
    scattered = np.random.default_rng(0).permutation(len(pool))[:_COPIED]
    works: dict[str, Callable[[], object]] = {}
    for name, blocks in {"neighbours": np.arange(_COPIED), "scattered": scattered}.items():
        copies = HostCopies(tuple(blocks.tolist()), tuple(range(_COPIED)))
        works[f"swapped out, {name}"] = partial(host.swap, copies, none)
        works[f"swapped in, {name}"] = partial(host.swap, none, copies)
    for mib in (2, 8, 32, 128):
        block_copies._BUFFER_BYTES = mib << 20
        works[f"gathered through {mib} MiB"] = partial(_gather, block_copies.DevicePool(pool), scattered)
    rates = {name: partial(_rate, part, _COPIED * block_bytes, work) for name, work in works.items()}
    for name, taken in interleaved(rates, part.scale.repeats).items():
        part.recorder.row("Copies", what=name, GBps=figures([rate / 1e9 for rate in taken], 2))


def _gather(pool: block_copies.DevicePool, blocks: np.ndarray) -> None:
    for _ in pool.rows(blocks):
        pass


def _rate(part: Part, num_bytes: int, work: Callable[[], object]) -> float:
    return num_bytes / part.seconds(work)


def _graphs(part: Part) -> None:
    largest = max(part.scale.batches)
    defaults = default_sizes(largest)
    own_sizes = [size for size in (3, 33, 65, 129, 193) if size < largest]
    runner = part.runner((largest + 1) * (part.scale.context + 16), sorted({*defaults, *own_sizes}))
    assert runner._graphs is not None
    sizes_of_all = runner._graphs.sizes
    for size in own_sizes:
        step, taken = decoding_batch(runner, size, part.scale.context), {}
        for name, sizes in {"own": sizes_of_all, "next": defaults}.items():
            taken[name] = partial(_step_seconds, part, runner, step, sizes)
        found = interleaved(taken, part.scale.repeats)
        part.recorder.row(
            "Graph sizes", tokens=size, next_size=min(each for each in defaults if each >= size),
            own_ms=figures([1e3 * s for s in found["own"]], 3), next_ms=figures([1e3 * s for s in found["next"]], 3),
        )  # fmt: skip
    workspace = part.model().backend.kernels._workspace  # type: ignore[attr-defined]
    workspace.fill_(0x5A)
    runner.execute(decoding_batch(runner, largest, part.scale.context))
    prompt_work(part, runner, max(part.scale.chunks))()
    written = int((workspace != 0x5A).nonzero()[-1]) + 1 if bool((workspace != 0x5A).any()) else 0
    part.recorder.note(f"Of a workspace of {len(workspace) >> 20} MiB, {written >> 10:,} KiB were written to.")


def _step_seconds(part: Part, runner: TransformersRunner, step: WorkerBatch, sizes: tuple[int, ...]) -> float:
    assert runner._graphs is not None
    runner._graphs.sizes = sizes
    return part.seconds(lambda: runner.execute(step), _CALLS)


def _attention(part: Part) -> None:
    """Of one layer, over a pool of its own."""
    heads, kv_heads, dim = part.scale.num_heads, part.scale.config["num_key_value_heads"], part.scale.head_dim
    kernels, kind = FlashInferKernels(part.device), LayerKind(heads, dim**-0.5, None, None)
    shared, own = blocks_for(_SHARED, BLOCK_SIZE), blocks_for(_OWN, BLOCK_SIZE)
    pool = torch.randn(shared + _SEQUENCES * own, 2, kv_heads, BLOCK_SIZE, dim, device=part.device, dtype=part.dtype)
    query = torch.randn(_SEQUENCES, heads, dim, device=part.device, dtype=part.dtype)
    common = np.arange(shared, dtype=np.int32)
    suffixes = shared + np.arange(_SEQUENCES * own, dtype=np.int32).reshape(_SEQUENCES, own)
    whole = np.concatenate([np.tile(common, (_SEQUENCES, 1)), suffixes], axis=1)
    types = {"q_data_type": part.dtype, "kv_data_type": part.dtype}
    wrappers: dict[str, Any] = {}
    for on_tensor_cores in (True, False):
        made = kernels.flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            kernels.workspace_for(heads // kv_heads, dim), "HND", use_tensor_cores=on_tensor_cores, backend="fa2"
        )
        made.plan(*_pages(part, whole), heads, kv_heads, dim, BLOCK_SIZE, sm_scale=kind.scaling, **types)
        wrappers["decode, tensor cores" if on_tensor_cores else "decode, CUDA cores"] = made
    cascade = kernels.flashinfer.MultiLevelCascadeAttentionWrapper(2, kernels.workspace_for(1, dim), "HND")
    levels = [_pages(part, common[None]), _pages(part, suffixes)]
    ends = [[0, _SEQUENCES], range(_SEQUENCES + 1)]
    queries = [torch.tensor(list(each), dtype=torch.int32, device=part.device) for each in ends]
    cascade.plan(
        queries, *(list(each) for each in zip(*levels, strict=True)), heads, kv_heads, dim, BLOCK_SIZE,
        sm_scale=kind.scaling, **types,
    )  # fmt: skip
    wrappers["cascade"] = cascade
    outs = {name: wrapper.run(query, pool) for name, wrapper in wrappers.items()}
    expected = outs.pop("decode, tensor cores")
    assert all((out - expected).norm() <= 2e-2 * expected.norm() for out in outs.values()), "kernels disagree"
    runs = {name: partial(part.seconds, partial(made.run, query, pool), _CALLS) for name, made in wrappers.items()}
    for name, taken in interleaved(runs, part.scale.repeats).items():
        part.recorder.row("Attention", kernel=name, layer_us=figures([1e6 * s for s in taken], 1))


def _pages(part: Part, ids: np.ndarray) -> list[torch.Tensor]:
    """Starts, ids and lengths of last pages of rows that are full."""
    rows, count = ids.shape
    arrays = np.arange(rows + 1) * count, ids.reshape(-1), np.full(rows, BLOCK_SIZE)
    return [torch.tensor(array, dtype=torch.int32, device=part.device) for array in arrays]
