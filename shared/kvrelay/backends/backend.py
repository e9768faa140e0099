"""The one interface between a model and its paged KV: allocate a pool, plan a step, attend in each layer.

A backend is chosen once per process. `plan` does everything about a step that does not depend on the layer, so that the
layers only write, attend, and go on.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The shape of a block: `[num_layers, 2, block_size, num_kv_heads, head_dim]`, keys before values."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype  # of queries, keys and values as the model computes them
    stored: torch.dtype | None = None  # of keys and values in the pool, an 8-bit float; None: as computed

    @property
    def pool_dtype(self) -> torch.dtype:
        """The type of the pool's elements."""
        return self.stored or self.dtype

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """The shape of one block of all layers."""
        return (self.num_layers, 2, self.block_size, self.num_kv_heads, self.head_dim)

    @property
    def block_bytes(self) -> int:
        """The bytes of one block of all layers, one contiguous run."""
        elements = self.num_layers * 2 * self.block_size * self.num_kv_heads * self.head_dim
        return elements * self.pool_dtype.itemsize


def allocate_pool(layout: KVLayout, num_blocks: int, device: torch.device) -> torch.Tensor:
    """A pool of zeros, `[num_blocks, *layout.block_shape]`. On a CPU, pages take memory only once written."""
    if device.type != "cpu" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros((num_blocks, *layout.block_shape), dtype=layout.pool_dtype, device=device)
    # A step reads blocks all over the pool; huge pages save address translations (5 percent of a decode step measured).
    memory = mmap.mmap(-1, num_blocks * layout.block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # not every kernel has huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=layout.pool_dtype).view(num_blocks, *layout.block_shape)


@dataclass(frozen=True)
class PackedRows:
    """How the rows of a step lie in the packed batch and in the pool; row r's tokens follow those of row r - 1."""

    query_lens: Int32Array  # [rows], tokens of each row in this step, at least 1
    positions: Int32Array  # [rows], the position in its sequence of each row's first token
    block_tables: Int32Array  # [rows, longest table], padded with any valid block

    @cached_property
    def query_starts(self) -> Int32Array:
        """`[rows + 1]`: row r holds the packed tokens from `query_starts[r]` up to `query_starts[r + 1]`."""
        starts = np.zeros(len(self.query_lens) + 1, np.int32)
        np.cumsum(self.query_lens, out=starts[1:])
        return starts

    @cached_property
    def token_rows(self) -> Int32Array:
        """`[tokens]`: the row of each packed token."""
        return np.repeat(np.arange(len(self.query_lens), dtype=np.int32), self.query_lens)

    @cached_property
    def token_positions(self) -> Int32Array:
        """`[tokens]`: the position of each packed token in its sequence."""
        offsets = np.arange(self.query_starts[-1], dtype=np.int32)
        return offsets + np.repeat(self.positions - self.query_starts[:-1], self.query_lens)

    def token_blocks(self, block_size: int) -> Int32Array:
        """`[tokens]`: the block that takes each packed token's K/V (at `token_positions % block_size`)."""
        blocks: Int32Array = self.block_tables[self.token_rows, self.token_positions // block_size]
        return blocks


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """What one layer asks of its attention beside q, k and v."""

    scaling: float  # multiplies q . k
    sliding_window: int | None = None  # keys at position - window and before are out of sight
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)
    sinks: torch.Tensor | None = None  # [num_heads], one more logit per head that takes weight and gives no value


class LayerKind(NamedTuple):
    """What sets layers of a model apart for a kernel, beside their numbers. Most models have one kind or two."""

    num_heads: int
    scaling: float
    sliding_window: int | None
    softcap: float | None

    @property
    def window_left(self) -> int:
        """Keys in sight before the query's own; -1: all."""
        return -1 if self.sliding_window is None else self.sliding_window - 1

    def sees_all(self, num_keys: int) -> bool:
        """Whether the last of so many tokens has all of them in sight."""
        return self.sliding_window is None or num_keys <= self.sliding_window

    @property
    def params(self) -> AttentionParams:
        """What a layer of this kind asks of its attention."""
        return AttentionParams(self.scaling, self.sliding_window, self.softcap)


KV_DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
"""Types that the pool may have beside the one that the model computes in, by the names that users know."""


def dtype_name(dtype: torch.dtype) -> str:
    """What users call it: bfloat16, fp8_e4m3."""
    names = {known: name for name, known in KV_DTYPES.items()}
    return names.get(dtype, str(dtype).removeprefix("torch."))


def is_eight_bit(dtype: torch.dtype) -> bool:
    """Whether it is one of the `KV_DTYPES`."""
    return dtype in KV_DTYPES.values()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, 8-bit floats as plain bytes: ops that only move elements know those on every device."""
    return tensor.view(torch.uint8) if is_eight_bit(tensor.dtype) else tensor


def as_stored(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Keys or values in the pool's type. An 8-bit float takes what is beyond its reach as its largest number.

    Rounds to nearest, ties to even; NaN stays NaN. Attention sees keys and values as they are stored, those of its own
    step too, so that it does not matter in which step they were written.
    """
    if not is_eight_bit(dtype):
        return tensor.to(dtype)
    limit = torch.finfo(dtype).max  # casts make NaN or infinity of what lies beyond, or not, from release to release
    return tensor.clamp(-limit, limit).to(dtype)


def last_contiguous(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor in this dtype with elements of its last dimension side by side; itself, where that is so."""
    tensor = as_stored(tensor, dtype)
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def computed_in(pool: torch.Tensor, key: torch.Tensor) -> torch.dtype:
    """The type of queries and outputs beside a pool and this key: the pool's, or if that has 8 bits the key's."""
    return key.dtype if is_eight_bit(pool.dtype) else pool.dtype


class StepAttention(Protocol):
    """One step's plan over one pool."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Writes this step's K/V into the pool's blocks of `layer`, then attends causally over the block tables.

        Keys and values are those of the pool, as it stores them, this step's too: see `as_stored`.
        `query` is `[tokens, num_heads, head_dim]`, `key` and `value` are `[tokens, num_kv_heads, head_dim]`, all of any
        strides. The result is contiguous, shaped as `query`.
        """
        ...


class AttentionBackend(Protocol):
    """Attention over a paged pool on one kind of device."""

    @property
    def name(self) -> str:
        """What logs and reports call it."""
        ...

    def plan(self, pool: torch.Tensor, rows: PackedRows) -> StepAttention:
        """Prepares a step over `pool`; the plan is good for all layers of this step, and for no other step.

        The next plan may take the memory of this one: it is made when this step's layers have been asked for.
        """
        ...


class NotCapturable(Exception):
    """A layer asks for attention that a CUDA graph cannot hold here; the message names it."""


class FixedStep(StepAttention, Protocol):
    """A step of a fixed number of rows, one token each, that may be captured in a CUDA graph.

    All that its `attend` reads of the step lies in buffers that stay where they are. Before each replay `replan` fills
    them. Its first `attend` of a kind of layer may allocate and wait, so a forward comes before the capture.
    """

    def replan(self, rows: PackedRows) -> None:
        """From now on, in the stream's order, the step is over these rows. The host waits for nothing.

        Every `attend`, captured or not, comes after a `replan`.
        """
        ...


class FixedSteps(Protocol):
    """Makes fixed steps over one pool. They share their buffers: a replan of one is the end of the others' plans."""

    def __call__(self, num_rows: int) -> FixedStep:
        """A step of `num_rows` rows."""
        ...


@runtime_checkable
class CapturableBackend(AttentionBackend, Protocol):
    """A backend whose decoding steps may be captured in CUDA graphs."""

    def fixed_steps(self, pool: torch.Tensor, max_rows: int, max_row_blocks: int) -> FixedSteps:
        """Steps of up to `max_rows` rows over `pool`, each of up to `max_row_blocks` blocks."""
        ...


@runtime_checkable
class SharingBackend(AttentionBackend, Protocol):
    """A backend that reads together what rows share, in steps that are no CUDA graphs."""

    def prefers_launches(self, pool: torch.Tensor, rows: PackedRows) -> bool:
        """Whether so much is shared that a step is worth more launched kernel by kernel than as a CUDA graph."""
        ...
