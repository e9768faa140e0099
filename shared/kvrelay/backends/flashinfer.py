"""Attention on NVIDIA GPUs through FlashInfer's paged kernels, which read the pool's blocks in place.

A layer's keys and values are strided views of the block-major pool. Chunks of prompts use the prefill kernel, single
tokens the decode kernel. The parts that do not depend on the layer are planned once per step, for each kind of layer of
the model (window, soft cap, scale): most models have one kind, models with alternating windows two. FlashInfer: Ye et
al., "FlashInfer: Efficient and customizable attention engine for LLM inference serving", MLSys 2025.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch

from kvrelay.backends.backend import (
    AttentionBackend,
    AttentionParams,
    Int32Array,
    KVLayout,
    LayerKind,
    PackedRows,
    PoolShape,
    StepAttention,
    computed_in,
    is_eight_bit,
    last_contiguous,
    split_rows,
)
from kvrelay.backends.flashinfer_graphs import FlashInferFixedSteps, plan_options
from kvrelay.backends.flashinfer_kernels import (
    FlashInferKernels,
    PagedRows,
    invariant_row_tokens,
    num_chunk_rows,
    page_rows,
)
from kvrelay.backends.torch_sdpa import TorchBackend

_DTYPES = (torch.float16, torch.bfloat16)
_HEAD_DIMS = (64, 128, 256)
_MAX_ELEMENTS = 8192  # elements of a token's keys: the kernel that writes them has a thread for 8, and 1024 threads


class FlashInferBackend(AttentionBackend):
    """Supports 16-bit floats, beside a pool of these or 8 bits, with heads of 64, 128 or 256.

    Layers with attention sinks use plain torch.
    """

    name = "flashinfer"

    def __init__(self, device: torch.device, module: Any = None, *, batch_invariant: bool = False) -> None:
        """`module` replaces `flashinfer` in tests.

        With `batch_invariant`, single tokens go through the prefill kernel too, keys are not split, and rows are cut
        so that all plans have one tile. Decoding a few long sequences takes longer then, and so do prompts. Layers with
        attention sinks are not invariant.

        Raises ImportError if FlashInfer is not installed, or too old for `batch_invariant`.
        """
        self.kernels = FlashInferKernels(device, module, batch_invariant=batch_invariant)
        self.batch_invariant = batch_invariant
        self.fallback = TorchBackend()

    @staticmethod
    def can_hold(layout: KVLayout) -> bool:
        """Returns whether the kernels support this dtype and these heads."""
        fits = layout.num_kv_heads * layout.head_dim <= _MAX_ELEMENTS
        return layout.dtype in _DTYPES and layout.head_dim in _HEAD_DIMS and fits

    def plan(self, pool: torch.Tensor, rows: PackedRows) -> StepAttention:
        """Sends the step's indices to the device. The kernels' own plans follow at the first layer of each kind. Raises
        ValueError if the pool's dtype or heads are not among the kernels'."""
        _, num_layers, _, num_kv_heads, block_size, head_dim = pool.shape
        # Beside a pool of 8 bits, the first layer gives the dtype of the queries.
        dtype, stored = (torch.bfloat16, pool.dtype) if is_eight_bit(pool.dtype) else (pool.dtype, None)
        if not self.can_hold(KVLayout(num_layers, num_kv_heads, head_dim, block_size, dtype, stored)):
            raise ValueError(f"FlashInfer cannot hold {pool.dtype} with {num_kv_heads} heads of {head_dim}")
        self.kernels.await_planned()
        return FlashInferStep(self, pool, rows)

    def fixed_steps(self, pool: torch.Tensor, max_rows: int, max_row_blocks: int) -> FlashInferFixedSteps:
        return FlashInferFixedSteps(self.kernels, pool, max_rows, max_row_blocks)


class FlashInferStep:
    """One step of `FlashInferBackend`."""

    def __init__(self, backend: FlashInferBackend, pool: torch.Tensor, rows: PackedRows) -> None:
        self._kernels = backend.kernels
        self._fallback = backend.fallback
        self._pool = pool
        self._rows = rows
        self._shape = PoolShape(*pool.shape)
        self._paged = page_rows(rows, self._shape.block_size)
        self._num_chunks = self._paged.num_rows if backend.batch_invariant else num_chunk_rows(rows)
        self._num_chunk_tokens = int(rows.query_starts[self._num_chunks])
        self._written = _to_device(
            pool.device,
            rows.token_rows,
            rows.token_positions,
            self._paged.page_ids,
            self._paged.page_starts,
            self._paged.last_page_lens,
        )
        self._planned: dict[LayerKind, tuple[Any, Any]] = {}
        self._dtype = pool.dtype  # of queries; with an 8-bit pool, set to that of the first layer's key

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        if params.sinks is not None:
            return self._in_torch.attend(layer, query, key, value, params)
        self._dtype = computed_in(self._pool, key)
        query = last_contiguous(query, self._dtype)
        pages = self._kernels.write(self._pool, layer, key, value, self._written)
        kind = LayerKind(query.shape[1], params.scaling, params.sliding_window, params.softcap)
        if kind not in self._planned:
            self._planned[kind] = self._plan_prefill(kind), self._plan_decode(kind)
            self._kernels.note_planned()
        prefill, decode = self._planned[kind]
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        cut = self._num_chunk_tokens
        if prefill is not None:
            prefill.run(query[:cut], pages, out=out[:cut])
        if decode is not None:
            decode.run(query[cut:], pages, out=out[cut:])
        return out

    @cached_property
    def _in_torch(self) -> StepAttention:
        return self._fallback.plan(self._pool, self._rows)

    def _plan_prefill(self, kind: LayerKind) -> Any:
        """The wrapper for chunks of this kind of layer, planned. None if the step has no chunk."""
        if not self._num_chunks:
            return None
        wrapper = self._kernels.prefill_wrapper(kind, *self._heads, eight_bit=is_eight_bit(self._pool.dtype))
        self._plan_queries(wrapper, kind, *self._chunks(kind), causal=True)
        return wrapper

    def _chunks(self, kind: LayerKind) -> tuple[PagedRows, torch.Tensor]:
        """The rows of the prefill kernel, and their pages on the device."""
        if not self._kernels.batch_invariant:
            return self._take(0, self._num_chunks)
        rows = split_rows(self._rows, invariant_row_tokens(kind, self._shape.num_kv_heads))
        paged = page_rows(rows, self._shape.block_size)
        return paged, _to_device(self._pool.device, paged.page_ids)[0]

    def _plan_decode(self, kind: LayerKind) -> Any:
        """The wrapper for single tokens of this kind of layer, planned. None if the step has none."""
        if self._num_chunks == self._paged.num_rows:
            return None
        wrapper = self._kernels.decode_wrapper(kind, *self._heads)
        self._plan_rows(wrapper, kind, *self._take(self._num_chunks, self._paged.num_rows))
        return wrapper

    @property
    def _heads(self) -> tuple[int, int]:
        return self._shape.num_kv_heads, self._shape.head_dim

    def _plan_queries(
        self, wrapper: Any, kind: LayerKind, paged: PagedRows, page_ids: torch.Tensor, *, causal: bool
    ) -> None:
        wrapper.plan(
            *_on_host(paged.query_starts, paged.page_starts),
            page_ids,
            *_on_host(paged.last_page_lens),
            kind.num_heads,
            *self._heads,
            self._shape.block_size,
            causal=causal,
            **plan_options(self._kernels, kind, self._dtype, self._pool.dtype),
        )

    def _plan_rows(self, wrapper: Any, kind: LayerKind, paged: PagedRows, page_ids: torch.Tensor) -> None:
        wrapper.plan(
            *_on_host(paged.page_starts),
            page_ids,
            *_on_host(paged.last_page_lens),
            kind.num_heads,
            *self._heads,
            self._shape.block_size,
            **plan_options(self._kernels, kind, self._dtype, self._pool.dtype),
        )

    def _take(self, first: int, last: int) -> tuple[PagedRows, torch.Tensor]:
        """Rows of the step, and their pages on the device."""
        starts = self._paged.page_starts
        return self._paged.take(first, last), self._written[2][int(starts[first]) : int(starts[last])]


def _on_host(*arrays: Int32Array) -> list[torch.Tensor]:
    """Returns a plan's inputs as host tensors. Copying device tensors back would wait for the device."""
    return [torch.from_numpy(array) for array in arrays]


def _to_device(device: torch.device, *arrays: Int32Array) -> list[torch.Tensor]:
    """Copies int32 arrays to the device as one transfer. Each array begins at a multiple of 16 bytes."""
    lengths = [len(array) for array in arrays]
    padded = [-(-length // 4) * 4 for length in lengths]
    pinned = torch.empty(sum(padded), dtype=torch.int32, pin_memory=device.type == "cuda")
    host, start, starts = pinned.numpy(), 0, []
    for array, room in zip(arrays, padded, strict=True):
        host[start : start + len(array)] = array
        starts.append(start)
        start += room
    # The caching host allocator keeps the pinned memory until the copy is done.
    moved = pinned.to(device, non_blocking=True)
    return [moved[begin : begin + length] for begin, length in zip(starts, lengths, strict=True)]
