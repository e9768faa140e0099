"""Attention on NVIDIA GPUs through FlashInfer's paged kernels, which read the pool's blocks where they lie.

A layer's keys and values are strided views of the block-major pool. Chunks of prompts go to the prefill kernel, single
tokens to the decode kernel. What does not depend on the layer is planned once a step, for each kind of layer that the
model has (window, soft cap, scale): most have one, models with alternating windows two.
FlashInfer: Ye et al., "FlashInfer: Efficient and customizable attention engine for LLM inference serving", MLSys 2025.
"""

from __future__ import annotations

from functools import cached_property
from importlib import import_module
from typing import Any, NamedTuple

import torch

from kvrelay.backends.base import AttentionParams, Int32Array, PackedRows, StepAttention, last_contiguous
from kvrelay.backends.paging import PagedRows, num_chunk_rows, page_rows
from kvrelay.backends.torch_sdpa import TorchBackend

_DTYPES = (torch.float16, torch.bfloat16)
_HEAD_DIMS = (64, 128, 256)
_WORKSPACE_BYTES = 256 * 2**20  # twice what FlashInfer recommends: prefill of 8192 tokens splits long rows
_TENSOR_CORE_GROUP = 4  # query heads a KV head from which decoding on tensor cores is the faster one
_LAYOUT = "NHD"  # tokens of a block before its heads, as in the pool


class LayerKind(NamedTuple):
    """What a plan depends on beside the step."""

    num_heads: int
    scaling: float
    sliding_window: int | None
    softcap: float | None

    @property
    def window_left(self) -> int:
        """Keys in sight before the query's own; -1: all."""
        return -1 if self.sliding_window is None else self.sliding_window - 1


class FlashInferBackend:
    """16-bit floats with heads of 64, 128 or 256; layers with attention sinks go through plain torch."""

    name = "flashinfer"

    def __init__(self, device: torch.device, module: Any = None) -> None:
        """Takes the workspace, in bytes `_WORKSPACE_BYTES`. `module` stands in for `flashinfer`, for tests.

        Raises:
            ImportError: FlashInfer is not installed.
        """
        self.flashinfer: Any = import_module("flashinfer") if module is None else module
        self._device = device
        self._workspace = torch.zeros(_WORKSPACE_BYTES if module is None else 1, dtype=torch.uint8, device=device)
        self._prefill: dict[LayerKind, Any] = {}
        self._decode: dict[LayerKind, Any] = {}
        self.fallback = TorchBackend()

    @staticmethod
    def can_hold(dtype: torch.dtype, head_dim: int) -> bool:
        """Whether the kernels know this element type and head size."""
        return dtype in _DTYPES and head_dim in _HEAD_DIMS

    def plan(self, pool: torch.Tensor, rows: PackedRows) -> StepAttention:
        """Sends the step's indices to the device; the kernels' own plans follow with the first layer of each kind.

        Raises:
            ValueError: the pool's dtype or head size is not one of the kernels'.
        """
        if not self.can_hold(pool.dtype, pool.shape[-1]):
            raise ValueError(f"FlashInfer cannot hold {pool.dtype} with heads of {pool.shape[-1]}")
        return FlashInferStep(self, pool, rows)

    # A wrapper keeps its plan, and on the device what the plan's kernels read: one per kind of layer, for all steps.

    def prefill_wrapper(self, kind: LayerKind) -> Any:
        """The prefill kernel's wrapper for this kind of layer."""
        if kind not in self._prefill:
            make = self.flashinfer.BatchPrefillWithPagedKVCacheWrapper
            self._prefill[kind] = make(self._workspace, _LAYOUT)
        return self._prefill[kind]

    def decode_wrapper(self, kind: LayerKind, group: int) -> Any:
        """The decode kernel's wrapper for this kind of layer, with `group` query heads a KV head."""
        if kind not in self._decode:
            make = self.flashinfer.BatchDecodeWithPagedKVCacheWrapper
            tensor_cores = group >= _TENSOR_CORE_GROUP
            self._decode[kind] = make(self._workspace, _LAYOUT, use_tensor_cores=tensor_cores, backend="fa2")
        return self._decode[kind]


class FlashInferStep:
    """One step of `FlashInferBackend`."""

    def __init__(self, backend: FlashInferBackend, pool: torch.Tensor, rows: PackedRows) -> None:
        self._backend = backend
        self._pool = pool
        self._rows = rows
        block_size, num_rows = pool.shape[3], len(rows.query_lens)
        self._num_chunks = num_chunk_rows(rows)
        self._num_chunk_tokens = int(rows.query_starts[self._num_chunks])
        self._chunks = page_rows(rows, 0, self._num_chunks, block_size) if self._num_chunks else None
        self._decodes = page_rows(rows, self._num_chunks, num_rows, block_size) if self._num_chunks < num_rows else None
        written = page_rows(rows, 0, num_rows, block_size)
        self._written = _to_device(
            pool.device,
            rows.token_rows,
            rows.token_positions,
            written.page_ids,
            written.page_starts,
            written.last_page_lens,
        )
        self._planned: dict[LayerKind, tuple[Any, Any]] = {}

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """See `StepAttention.attend`."""
        if params.sinks is not None:
            return self._in_torch.attend(layer, query, key, value, params)
        query, key, value = (last_contiguous(tensor, self._pool.dtype) for tensor in (query, key, value))
        keys, values = self._pool[:, layer, 0], self._pool[:, layer, 1]
        token_rows, token_positions, page_ids, page_starts, last_page_lens = self._written
        self._backend.flashinfer.append_paged_kv_cache(
            *(key, value, token_rows, token_positions, (keys, values), page_ids, page_starts, last_page_lens, _LAYOUT)
        )
        kind = LayerKind(query.shape[1], params.scaling, params.sliding_window, params.softcap)
        if kind not in self._planned:
            self._planned[kind] = self._plan(kind)
        prefill, decode = self._planned[kind]
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        cut = self._num_chunk_tokens
        if prefill is not None:
            prefill.run(query[:cut], (keys, values), out=out[:cut])
        if decode is not None:
            decode.run(query[cut:], (keys, values), out=out[cut:])
        return out

    @cached_property
    def _in_torch(self) -> StepAttention:
        return self._backend.fallback.plan(self._pool, self._rows)

    def _plan(self, kind: LayerKind) -> tuple[Any, Any]:
        """The wrappers for this kind of layer, planned; None where the step has no such rows."""
        return self._plan_prefill(kind, self._chunks), self._plan_decode(kind, self._decodes)

    def _plan_prefill(self, kind: LayerKind, paged: PagedRows | None) -> Any:
        if paged is None:
            return None
        wrapper = self._backend.prefill_wrapper(kind)
        wrapper.plan(
            # Host tensors: a plan is made on the host, and reading device tensors back would wait for the device.
            *map(torch.from_numpy, (paged.query_starts, paged.page_starts, paged.page_ids, paged.last_page_lens)),
            *(kind.num_heads, self._pool.shape[4], self._pool.shape[5], self._pool.shape[3]),
            causal=True,
            **self._options(kind),
        )
        return wrapper

    def _plan_decode(self, kind: LayerKind, paged: PagedRows | None) -> Any:
        if paged is None:
            return None
        num_kv_heads = self._pool.shape[4]
        wrapper = self._backend.decode_wrapper(kind, kind.num_heads // num_kv_heads)
        wrapper.plan(
            *map(torch.from_numpy, (paged.page_starts, paged.page_ids, paged.last_page_lens)),
            *(kind.num_heads, num_kv_heads, self._pool.shape[5], self._pool.shape[3]),
            **self._options(kind),
        )
        return wrapper

    def _options(self, kind: LayerKind) -> dict[str, Any]:
        return {
            "sm_scale": kind.scaling,
            "window_left": kind.window_left,
            "logits_soft_cap": kind.softcap,
            "q_data_type": self._pool.dtype,
            "kv_data_type": self._pool.dtype,
        }


def _to_device(device: torch.device, *arrays: Int32Array) -> list[torch.Tensor]:
    """Int32 arrays on the device, in one copy; each begins on 16 bytes."""
    lengths = [len(array) for array in arrays]
    padded = [-(-length // 4) * 4 for length in lengths]
    staged = torch.empty(sum(padded), dtype=torch.int32, pin_memory=device.type == "cuda")
    host, start, starts = staged.numpy(), 0, []
    for array, room in zip(arrays, padded, strict=True):
        host[start : start + len(array)] = array
        starts.append(start)
        start += room
    # The caching host allocator keeps the pinned memory until the copy is done.
    moved = staged.to(device, non_blocking=True)
    return [moved[begin : begin + length] for begin, length in zip(starts, lengths, strict=True)]
