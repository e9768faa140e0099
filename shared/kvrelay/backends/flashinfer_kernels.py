"""FlashInfer's kernels for one device: a wrapper for each kind of layer, and the memory that they share.

A step (flashinfer.py, or flashinfer_graphs.py for a captured one) takes its wrappers from here, plans them once and
runs them in each layer. Block tables are their input as compressed rows.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch

from kvrelay.backends.backend import Int32Array, LayerKind, PackedRows, last_contiguous

_LEAST_WORKSPACE_BYTES = 256 * 2**20  # twice FlashInfer's recommendation: prefill of 8192 tokens splits long rows
_TENSOR_CORE_GROUP = 4  # from this many query heads per KV head on, decoding on tensor cores is faster
_LAYOUT = "HND"  # head dimension before tokens, as in the pool
_FIRST_INVARIANT = (0, 7, 1)  # before, graphs without split rows ran programs without a plan


def workspace_bytes(num_sms: int, group: int, head_dim: int) -> int:
    """Bytes that the kernels need for partial results, with `group` query heads per KV head.

    Long rows are split over the GPU, two tiles of at most 128 queries on each of its processors (64 queries from heads
    of 256 on), and each tile writes its output and one score per query in float32. FlashInfer before 0.7.2 reserves as
    much for every query head of a group, although the tile's queries are of all of them; there the plans of some steps
    use it to the last byte.
    """
    tiles = 2 * num_sms * 128 * (min(head_dim, 128) + 1) * 4
    return max(_LEAST_WORKSPACE_BYTES, tiles * group)


class FlashInferKernels:
    """The wrappers of one device.

    A wrapper keeps its plan, and on the device the plan's arrays: one per kind of layer, for all steps. The workspace
    holds what a kernel leaves for the next kernel on the stream to merge, so wrappers share it; those made before it
    grew keep the smaller one, which is enough for them.
    """

    def __init__(self, device: torch.device, module: Any = None, *, batch_invariant: bool = False) -> None:
        """`module` replaces `flashinfer` in tests; `batch_invariant`: see FlashInferBackend. Raises ImportError if
        FlashInfer is not installed, or too old."""
        self.flashinfer: Any = import_module("flashinfer") if module is None else module
        self.batch_invariant = batch_invariant
        version = self.flashinfer.__version__ if batch_invariant else ""
        if batch_invariant and tuple(map(int, re.findall(r"\d+", version)[:3])) < _FIRST_INVARIANT:
            raise ImportError(f"batch_invariant needs FlashInfer {'.'.join(map(str, _FIRST_INVARIANT))}, not {version}")
        self._device = device
        self._workspace = torch.empty(0, dtype=torch.uint8, device=device)
        self._prefill: dict[LayerKind, Any] = {}
        self._decode: dict[LayerKind, Any] = {}
        self._prefill_kernels = "auto"
        self._planned = torch.cuda.Event() if device.type == "cuda" else None

    def await_planned(self) -> None:
        """Returns once new plans may be made, which is at once if the previous step has been waited for.

        A wrapper copies its plan to the device from pinned memory of its own, which its next plan overwrites.
        """
        if self._planned is not None:
            self._planned.synchronize()

    def note_planned(self) -> None:
        """Notes that the copies of all plans so far have been launched."""
        if self._planned is not None:
            self._planned.record(torch.cuda.current_stream(self._device))

    def prefill_as_on_older_gpus(self) -> None:
        """From the next step on, uses the prefill kernels that every GPU has instead of those of newer ones."""
        self._prefill_kernels = "fa2"
        self._prefill.clear()

    def prefill_wrapper(self, kind: LayerKind, num_kv_heads: int, head_dim: int, *, eight_bit: bool) -> Any:
        """The prefill kernel's wrapper for this kind of layer."""
        if kind not in self._prefill:
            # Hopper's own kernels (fa3) read 8-bit keys for 8-bit queries only, and cut rows by the batch.
            kernels = "fa2" if eight_bit or self.batch_invariant else self._prefill_kernels
            self._prefill[kind] = self.make_prefill(kind, num_kv_heads, head_dim, backend=kernels)
        return self._prefill[kind]

    def make_prefill(self, kind: LayerKind, num_kv_heads: int, head_dim: int, **options: Any) -> Any:
        """A new wrapper of the prefill kernel."""
        workspace = self.workspace_for(kind.num_heads // num_kv_heads, head_dim)
        return self.flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, _LAYOUT, **options)

    def decode_wrapper(self, kind: LayerKind, num_kv_heads: int, head_dim: int) -> Any:
        """The decode kernel's wrapper for this kind of layer."""
        if kind not in self._decode:
            self._decode[kind] = self.make_decode(kind, num_kv_heads, head_dim)
        return self._decode[kind]

    def make_decode(self, kind: LayerKind, num_kv_heads: int, head_dim: int, **options: Any) -> Any:
        """A new wrapper of the decode kernel."""
        make, group = self.flashinfer.BatchDecodeWithPagedKVCacheWrapper, kind.num_heads // num_kv_heads
        return make(
            self.workspace_for(group, head_dim),
            _LAYOUT,
            use_tensor_cores=group >= _TENSOR_CORE_GROUP,
            backend="fa2",  # the one that splits long rows
            **options,
        )

    def write(
        self, pool: torch.Tensor, layer: int, key: torch.Tensor, value: torch.Tensor, where: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes a step's keys and values. `where`: each token's row and position, then the rows' pages as in
        `PagedRows`: ids, starts and lengths of the last. Returns all of the layer's keys and values."""
        # The kernel copies bytes, so both must have the pool's dtype.
        key, value = (last_contiguous(tensor, pool.dtype) for tensor in (key, value))
        pages = pool[:, layer, 0], pool[:, layer, 1]
        rows, positions, *tables = where
        self.flashinfer.append_paged_kv_cache(key, value, rows, positions, pages, *tables, _LAYOUT)
        return pages

    def workspace_for(self, group: int, head_dim: int, least_bytes: int = 0) -> torch.Tensor:
        """The workspace, large enough for `group` query heads per KV head, and at least `least_bytes`."""
        num_bytes = 1 << 16  # enough for the fake FlashInfer on CPUs
        if self._device.type == "cuda":
            num_sms = torch.cuda.get_device_properties(self._device).multi_processor_count
            num_bytes = max(workspace_bytes(num_sms, group, head_dim), least_bytes)
        if self._workspace.numel() < num_bytes:
            self._workspace = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
        return self._workspace


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Some adjacent rows of a step. Row r's pages are `page_ids[page_starts[r] : page_starts[r + 1]]`."""

    query_starts: Int32Array  # [rows + 1], from 0
    page_starts: Int32Array  # [rows + 1], from 0
    page_ids: Int32Array  # [page_starts[-1]]
    last_page_lens: Int32Array  # [rows], tokens in each row's last page including this step's; 1 to the page's size

    @property
    def num_rows(self) -> int:
        return len(self.last_page_lens)

    def take(self, first: int, last: int) -> PagedRows:
        """The rows from `first` up to `last`, as views if possible."""
        query_starts, page_starts = self.query_starts[first : last + 1], self.page_starts[first : last + 1]
        return PagedRows(
            query_starts=query_starts - query_starts[0],
            page_starts=page_starts - page_starts[0],
            page_ids=self.page_ids[page_starts[0] : page_starts[-1]],
            last_page_lens=self.last_page_lens[first:last],
        )


def page_rows(rows: PackedRows, block_size: int) -> PagedRows:
    """The step's rows, with pages up to the last token that it writes."""
    num_keys = rows.positions + rows.query_lens
    num_pages = -(-num_keys // block_size)
    used = np.arange(rows.block_tables.shape[1], dtype=np.int32) < num_pages[:, None]
    page_starts = np.zeros(len(num_pages) + 1, np.int32)
    np.cumsum(num_pages, out=page_starts[1:])
    return PagedRows(
        query_starts=rows.query_starts,
        page_starts=page_starts,
        page_ids=rows.block_tables[used],
        last_page_lens=(num_keys - (num_pages - 1) * block_size).astype(np.int32),
    )


def invariant_row_tokens(kind: LayerKind, num_kv_heads: int) -> int:
    """The number of tokens at whose multiples rows are cut, so that the kernel adds up the same for each token whatever
    its step has.

    FlashInfer chooses a tile of 16, 64 or 128 queries (tokens times heads of a group) by the mean of a plan's rows: the
    smallest that holds a token holds every row. A tile reads keys in tiles of a multiple of 16 from the first on, and a
    further one, all masked, may change the last bit; so the tokens of a row have their last keys in the same tile. With
    a window, the first tile begins at the first key of the row's first token: a row has one token.
    """
    if kind.sliding_window is not None:
        return 1
    group = kind.num_heads // num_kv_heads
    num_tokens = next((tile for tile in (16, 64) if group <= tile), group) // group
    return 1 << (num_tokens.bit_length() - 1)


def num_chunk_rows(rows: PackedRows) -> int:
    """The number of leading rows up to the last one with several tokens. The rows behind decode one token each."""
    chunks = np.flatnonzero(rows.query_lens > 1)
    return int(chunks[-1]) + 1 if len(chunks) else 0
