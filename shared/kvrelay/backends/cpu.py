"""Attention on a CPU through the kernel in cpu_kernel.c, which reads the pool's blocks in place.

The kernel takes plain pointers through ctypes, which releases the GIL.
"""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvrelay.backends.backend import (
    AttentionBackend,
    AttentionParams,
    PackedRows,
    PoolShape,
    StepAttention,
    computed_in,
    is_eight_bit,
    last_contiguous,
)
from kvrelay.backends.cpu_build import KernelBuildError, load_kernel

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
        ("output_in_tiles", c_int64),
    ]


class _WorkSize(ctypes.Structure):
    _fields_ = [(name, c_int64) for name in ("num_items", "num_split_rows", "num_partials", "max_rows", "max_states")]


class CpuBackend(AttentionBackend):
    """The compiled kernel: float32 and bfloat16, over a pool of these or of 8 bits; heads of 16, 32, .. up to 256."""

    name = "cpu"
    batch_invariant = True

    def __init__(self) -> None:
        """Builds or loads the kernel. Raises KernelBuildError if it cannot be built here, or does not fit this
        module."""
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
        """Cuts the step into pieces for the threads. Raises ValueError if the pool's dtype or head size is not one of
        the kernel's."""
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
        block_size = PoolShape(*pool.shape).block_size
        self._write_blocks = rows.token_blocks(block_size)
        self._write_slots = rows.token_positions % block_size
        self._call = _Attention()
        self._keep: tuple[Any, ...] = ()  # keeps the memory alive that the call's pointers refer to

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """See `StepAttention.attend`. Raises ValueError if the kernel does not support this dtype of queries beside a
        pool of 8 bits."""
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
        _, _, _, num_kv_heads, block_size, head_dim = pool.shape
        num_threads = torch.get_num_threads()
        work = cut_work(rows, num_kv_heads, num_heads // num_kv_heads, num_threads)
        partials = np.empty(work.num_partials * (head_dim + 2), np.float32)
        block, _, key_to_value, head, token, _ = pool.stride()
        call.stride = _PoolStrides(block=block, key_to_value=key_to_value, token=token, head=head)
        call.pool_type, call.query_type = _POOL_DTYPES.index(pool.dtype), _POOL_DTYPES.index(dtype)
        call.head_dim, call.block_size = head_dim, block_size
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
            to,
            ctypes.byref(self._call.stride),
            tokens.data_ptr(),
            tokens.stride(0),
            tokens.stride(1),
            self._write_blocks.ctypes.data,
            self._write_slots.ctypes.data,
            num_tokens,
            num_kv_heads,
            head_dim * element_bytes,
            element_bytes,
        )


def cut_work(rows: PackedRows, num_kv_heads: int, group: int, num_threads: int) -> _Work:
    """Cuts rows into items: tiles of a chunk's queries per KV head, pieces of a decoding row's keys."""
    cut, size = _cut_function(), _WorkSize()
    lens, positions = (np.ascontiguousarray(array, np.int32) for array in (rows.query_lens, rows.positions))
    shape = (lens.ctypes.data, positions.ctypes.data, len(lens), num_kv_heads, group, num_threads)
    cut(*shape, None, None, ctypes.byref(size))
    items, split_rows = np.empty(size.num_items, _ITEM), np.empty(size.num_split_rows, _SPLIT_ROW)
    if not cut(*shape, items.ctypes.data, split_rows.ctypes.data, ctypes.byref(size)):
        raise MemoryError("no memory to sort the pieces of a step's attention")
    return _Work(items, split_rows, size.num_partials, size.max_rows, size.max_states)


@cache
def _cut_function() -> Any:
    function = load_kernel().kvrelay_cut_work
    pointer, number = c_void_p, c_int64
    function.argtypes = [pointer, pointer, number, number, number, number, pointer, pointer, ctypes.POINTER(_WorkSize)]
    function.restype = number
    return function
