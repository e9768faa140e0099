"""Attention on a CPU through the kernel in cpu_kernel.c, which reads the pool's blocks in place.

The kernel takes plain pointers through ctypes, which releases the GIL.
"""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvrelay.backends.backend import (
    AttentionParams,
    PackedRows,
    StepAttention,
    computed_in,
    is_eight_bit,
    last_contiguous,
)
from kvrelay.backends.cpu_build import KernelBuildError, load_kernel

_SPLIT_KEYS = 512  # keys per piece of a decoding row; fixed, so that results depend on the row alone
_TILE_ROWS = 96  # query tokens times heads of a group that share a tile of keys
_HEADS_MULTIPLE = 16
_MAX_HEAD_DIM = 256
# The index of a dtype in this tuple is its number in cpu_kernel.c.
_POOL_DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
_DTYPES = _POOL_DTYPES[:2]  # dtypes of queries and outputs

_ITEM = np.dtype(
    [(name, np.int32) for name in ("row", "head_begin", "head_end", "query_begin", "query_end")]
    + [(name, np.int32) for name in ("key_begin", "key_end", "partial")]
)
_SPLIT_ROW = np.dtype([(name, np.int32) for name in ("row", "num_splits", "partial")])


class _PoolStrides(ctypes.Structure):
    _fields_ = [(name, c_int64) for name in ("block", "key_to_value", "token", "head")]


class _Attention(ctypes.Structure):
    """The struct `Attention` of cpu_kernel.c, field by field."""

    _fields_ = [
        ("pool", c_void_p),
        ("stride", _PoolStrides),
        *((name, c_int64) for name in ("pool_type", "query_type", "head_dim", "block_size", "num_kv_heads", "group")),
        *((name, c_int64) for name in ("num_threads", "num_items", "num_split_rows", "max_rows", "max_states")),
        *((name, c_void_p) for name in ("items", "split_rows", "partials")),
        *((name, c_void_p) for name in ("query_starts", "positions", "block_tables")),
        ("table_stride", c_int64),
        ("query", c_void_p),
        ("query_token", c_int64),
        ("query_head", c_int64),
        ("output", c_void_p),
        ("sinks", c_void_p),
        ("window", c_int64),
        ("scaling", c_double),
        ("softcap", c_double),
    ]


class CpuBackend:
    """The compiled kernel: float32 and bfloat16, over a pool of these or of 8 bits; heads of 16, 32, .. up to 256."""

    name = "cpu"

    def __init__(self) -> None:
        """Builds or loads the kernel.

        Raises:
            KernelBuildError: it cannot be built here, or does not fit this module.
        """
        self._kernel = load_kernel()
        self._kernel.kvrelay_struct_bytes.restype = c_int64
        ours = ctypes.sizeof(_Attention) * 10000 + _ITEM.itemsize * 100 + _SPLIT_ROW.itemsize
        if self._kernel.kvrelay_struct_bytes() != ours:
            raise KernelBuildError("the kernel's structs differ from their declarations in Python")
        self._kernel.kvrelay_attend.argtypes = [ctypes.POINTER(_Attention)]
        self._kernel.kvrelay_attend.restype = None
        self._kernel.kvrelay_write.argtypes = [
            *(c_void_p, ctypes.POINTER(_PoolStrides), c_void_p, c_int64, c_int64, c_void_p, c_void_p),
            *(c_int64, c_int64, c_int64, c_int64),
        ]
        self._kernel.kvrelay_write.restype = None

    @staticmethod
    def can_hold(dtype: torch.dtype, head_dim: int) -> bool:
        """Whether the kernel supports queries of this dtype and heads of this size. The pool may have 8 bits."""
        return dtype in _DTYPES and head_dim % _HEADS_MULTIPLE == 0 and 0 < head_dim <= _MAX_HEAD_DIM

    def plan(self, pool: torch.Tensor, rows: PackedRows) -> StepAttention:
        """Cuts the step into pieces for the threads.

        Raises:
            ValueError: the pool's dtype or head size is not one of the kernel's.
        """
        # Beside a pool of 8 bits, the first layer gives the dtype of the queries.
        dtype = torch.float32 if is_eight_bit(pool.dtype) else pool.dtype
        if not self.can_hold(dtype, pool.shape[-1]):
            raise ValueError(f"the CPU kernel cannot hold {pool.dtype} with heads of {pool.shape[-1]}")
        return CpuStep(self._kernel, pool, rows)


@dataclass(frozen=True, slots=True)
class _Work:
    """A step's pieces, for one number of query heads."""

    items: NDArray[np.void]
    split_rows: NDArray[np.void]
    num_partials: int
    max_rows: int
    max_states: int


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Addresses of a step's plan for C code that runs several layers. They are valid while the step is."""

    plan: int  # the struct `Attention`
    pool: int  # the first layer's keys of block 0
    layer_bytes: int  # from a layer's keys to the next layer's
    write_blocks: int  # [tokens] int32: the block that takes each token's K/V
    write_slots: int  # [tokens] int32: its slot there


class CpuStep:
    """One step of `CpuBackend`. The work is cut at the first layer, which gives the number of query heads."""

    def __init__(self, kernel: ctypes.CDLL, pool: torch.Tensor, rows: PackedRows) -> None:
        self._kernel = kernel
        self._pool = pool
        self._rows = rows
        block_size = pool.shape[3]
        self._write_blocks = rows.token_blocks(block_size)
        self._write_slots = rows.token_positions % block_size
        self._call = _Attention()
        self._keep: tuple[Any, ...] = ()  # keeps the memory alive that the call's pointers refer to

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """See `StepAttention.attend`.

        Raises:
            ValueError: the kernel does not support this dtype of queries beside a pool of 8 bits.
        """
        call = self._call
        if not self._keep:
            self._prepare(query.shape[1], computed_in(self._pool, key))
        query = last_contiguous(query, computed_in(self._pool, key))
        key, value = (last_contiguous(tensor, self._pool.dtype) for tensor in (key, value))
        element_bytes = self._pool.element_size()
        keys = self._pool.data_ptr() + layer * self._pool.stride(1) * element_bytes
        self._write(keys, key)
        self._write(keys + call.stride.key_to_value * element_bytes, value)
        output = torch.empty(query.shape, dtype=query.dtype)
        sinks = None if params.sinks is None else params.sinks.detach().float().contiguous()
        call.pool = keys
        call.query, call.query_token, call.query_head = query.data_ptr(), query.stride(0), query.stride(1)
        call.output = output.data_ptr()
        call.sinks = None if sinks is None else sinks.data_ptr()
        call.window = params.sliding_window or 0
        call.scaling, call.softcap = params.scaling, params.softcap or 0.0
        self._kernel.kvrelay_attend(ctypes.byref(call))
        return output

    def call_from_c(self, num_heads: int, dtype: torch.dtype) -> AttentionCall | None:
        """The plan for C code that attends by itself; None if the pool stores keys and values in another type."""
        if self._pool.dtype != dtype:
            return None
        if not self._keep:
            self._prepare(num_heads, dtype)
        return AttentionCall(
            plan=ctypes.addressof(self._call),
            pool=self._pool.data_ptr(),
            layer_bytes=self._pool.stride(1) * self._pool.element_size(),
            write_blocks=self._write_blocks.ctypes.data,
            write_slots=self._write_slots.ctypes.data,
        )

    def _prepare(self, num_heads: int, dtype: torch.dtype) -> None:
        """Fills the fields that are the same for all layers."""
        if dtype not in _DTYPES:
            raise ValueError(f"the CPU kernel knows no queries of {dtype}")
        pool, rows, call = self._pool, self._rows, self._call
        num_kv_heads, head_dim = pool.shape[4], pool.shape[5]
        num_threads = torch.get_num_threads()
        work = cut_work(rows, num_kv_heads, num_heads // num_kv_heads, num_threads)
        partials = np.empty(work.num_partials * (head_dim + 2), np.float32)
        call.stride = _PoolStrides(pool.stride(0), pool.stride(2), pool.stride(3), pool.stride(4))
        call.pool_type, call.query_type = _POOL_DTYPES.index(pool.dtype), _POOL_DTYPES.index(dtype)
        call.head_dim, call.block_size = head_dim, pool.shape[3]
        call.num_kv_heads, call.group = num_kv_heads, num_heads // num_kv_heads
        call.num_threads, call.num_items, call.num_split_rows = num_threads, len(work.items), len(work.split_rows)
        call.max_rows, call.max_states = work.max_rows, work.max_states
        arrays = (work.items, work.split_rows, partials, rows.query_starts, rows.positions, rows.block_tables)
        self._keep = tuple(np.ascontiguousarray(array) for array in arrays)
        pointers = [array.ctypes.data for array in self._keep]
        call.items, call.split_rows, call.partials = pointers[:3]
        call.query_starts, call.positions, call.block_tables = pointers[3:]
        call.table_stride = rows.block_tables.shape[1]

    def _write(self, to: int, tokens: torch.Tensor) -> None:
        num_tokens, num_kv_heads, head_dim = tokens.shape
        element_bytes = tokens.element_size()
        self._kernel.kvrelay_write(
            *(to, ctypes.byref(self._call.stride), tokens.data_ptr(), tokens.stride(0), tokens.stride(1)),
            *(self._write_blocks.ctypes.data, self._write_slots.ctypes.data),
            *(num_tokens, num_kv_heads, head_dim * element_bytes, element_bytes),
        )


def cut_work(rows: PackedRows, num_kv_heads: int, group: int, num_threads: int) -> _Work:
    """Cuts rows into items: tiles of a chunk's queries per KV head, pieces of a decoding row's keys.

    The cut of a row depends on the row alone, with one exception: heads are taken together if there is enough work, so
    that a block is read from end to end.
    """
    num_keys = (rows.positions + rows.query_lens).astype(np.int64)
    decoding = np.flatnonzero((rows.query_lens == 1) & (group <= _TILE_ROWS))
    chunks = np.flatnonzero((rows.query_lens > 1) | (group > _TILE_ROWS))
    tile_tokens = max(1, _TILE_ROWS // group)
    chunk_items = _cut_chunks(rows, chunks, num_keys, num_kv_heads, tile_tokens)
    num_splits = -(-num_keys[decoding] // _SPLIT_KEYS)
    heads = _heads_together(num_kv_heads, int(num_splits.sum()), num_threads)
    decode_items, split_rows, num_partials = _cut_decodes(decoding, num_splits, num_keys, num_kv_heads, group, heads)
    items = np.concatenate([chunk_items, decode_items])
    # The longest items first, so that no thread begins a long one while the others are done.
    cost = (items["key_end"] - items["key_begin"]) * (items["query_end"] - items["query_begin"])
    items = items[np.argsort(-cost * (items["head_end"] - items["head_begin"]), kind="stable")]
    item_rows = -(-(items["query_end"] - items["query_begin"]) * group // 8) * 8
    states = item_rows * (items["head_end"] - items["head_begin"])
    return _Work(items, split_rows, num_partials, int(item_rows.max()), int(states.max()))


def _heads_together(num_kv_heads: int, num_pieces: int, num_threads: int) -> int:
    """KV heads that an item takes: as many as leave two items for each thread."""
    groups = (each for each in range(1, num_kv_heads + 1) if num_kv_heads % each == 0)
    return num_kv_heads // next((each for each in groups if num_pieces * each >= 2 * num_threads), num_kv_heads)


def _cut_chunks(
    rows: PackedRows, chunks: NDArray[np.int64], num_keys: NDArray[np.int64], num_kv_heads: int, tile_tokens: int
) -> NDArray[np.void]:
    """Yields every tile of queries of every chunk, once per KV head."""
    num_tiles = -(-rows.query_lens[chunks] // tile_tokens)
    row = np.repeat(chunks, num_tiles)
    tile = _count_up(num_tiles)
    items = np.zeros((len(row), num_kv_heads), _ITEM)
    items["row"] = row[:, None]
    items["head_begin"] = np.arange(num_kv_heads)
    items["head_end"] = items["head_begin"] + 1
    items["query_begin"] = (tile * tile_tokens)[:, None]
    items["query_end"] = np.minimum((tile + 1) * tile_tokens, rows.query_lens[row])[:, None]
    items["key_end"] = rows.positions[row][:, None] + items["query_end"]
    items["partial"] = -1
    return items.reshape(-1)


def _cut_decodes(
    decoding: NDArray[np.int64],
    num_splits: NDArray[np.int64],
    num_keys: NDArray[np.int64],
    num_kv_heads: int,
    group: int,
    heads: int,
) -> tuple[NDArray[np.void], NDArray[np.void], int]:
    """Yields every piece of every decoding row, `heads` KV heads at a time, and the rows whose pieces are joined."""
    row, split = np.repeat(decoding, num_splits), _count_up(num_splits)
    wide = num_kv_heads * group  # partial results of a piece
    several = num_splits > 1
    starts = np.cumsum(np.where(several, num_splits * wide, 0))
    first_partial = starts - np.where(several, num_splits * wide, 0)
    items = np.zeros((len(row), num_kv_heads // heads), _ITEM)
    items["row"] = row[:, None]
    items["head_begin"] = np.arange(0, num_kv_heads, heads)
    items["head_end"] = items["head_begin"] + heads
    items["query_end"] = 1
    items["key_begin"] = (split * _SPLIT_KEYS)[:, None]
    items["key_end"] = np.minimum((split + 1) * _SPLIT_KEYS, num_keys[row])[:, None]
    partial = (np.repeat(first_partial, num_splits) + split * wide)[:, None] + items["head_begin"] * group
    items["partial"] = np.where(np.repeat(several, num_splits)[:, None], partial, -1)
    joined = np.zeros(int(several.sum()), _SPLIT_ROW)
    joined["row"], joined["num_splits"] = decoding[several], num_splits[several]
    joined["partial"] = first_partial[several]
    return items.reshape(-1), joined, int(starts[-1]) if len(starts) else 0


def _count_up(counts: NDArray[Any]) -> NDArray[np.int64]:
    """0, 1, .. counts[0] - 1, 0, 1, .. counts[1] - 1, and so on."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total, dtype=np.int64) - np.repeat(ends - counts, counts).astype(np.int64)
