"""The interface between a model and its paged KV: allocate a pool, plan a step, attend in each layer.

A backend is chosen once per process. `plan` does everything about a step that does not depend on the layer, so that
layers only write and attend.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kvrelay.backends.host_pages import huge_page_memory

Int32Array = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The shape of a block: `[num_layers, 2, num_kv_heads, block_size, head_dim]`, keys before values.

    The tokens of a head are adjacent, so a range of heads is one run of memory for each layer's keys, and one for its
    values.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype  # dtype of queries, keys and values as the model computes them
    stored: torch.dtype | None = None  # 8-bit dtype of keys and values in the pool; None: as computed

    @property
    def pool_dtype(self) -> torch.dtype:
        return self.stored or self.dtype

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """The shape of one block of all layers."""
        return (self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim)

    @property
    def block_bytes(self) -> int:
        """The bytes of one block of all layers, which are contiguous."""
        elements = self.num_layers * 2 * self.block_size * self.num_kv_heads * self.head_dim
        return elements * self.pool_dtype.itemsize


class PoolShape(NamedTuple):
    """The dimensions of a pool: `PoolShape(*pool.shape)`."""

    num_blocks: int
    num_layers: int
    num_kinds: int  # 2: keys, values
    num_kv_heads: int
    block_size: int
    head_dim: int


def allocate_pool(layout: KVLayout, num_blocks: int, device: torch.device) -> torch.Tensor:
    """Returns a pool of zeros, `[num_blocks, *layout.block_shape]`. On a CPU, pages take memory only once written or
    populated."""
    if device.type != "cpu":
        return torch.zeros((num_blocks, *layout.block_shape), dtype=layout.pool_dtype, device=device)
    # A step reads blocks all over the pool. Huge pages save address translations (5 percent of a decode step measured).
    memory = huge_page_memory(num_blocks * layout.block_bytes)
    return memory.view(layout.pool_dtype).view(num_blocks, *layout.block_shape)


@dataclass(frozen=True)
class PackedRows:
    """The layout of a step's rows in the packed batch and in the pool. Row r's tokens follow those of row r - 1."""

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
        """`[tokens]`: the block that each packed token's K/V is written to (at `token_positions % block_size`)."""
        blocks: Int32Array = self.block_tables[self.token_rows, self.token_positions // block_size]
        return blocks


def split_rows(rows: PackedRows, num_tokens: int = 1) -> PackedRows:
    """The step with its rows cut at the positions that are multiples of `num_tokens`: by default, a row for each token.
    If a layer's keys and values are written before its attention reads any, each token attends to the same keys as
    before."""
    if len(rows.query_lens) == rows.query_starts[-1]:
        return rows
    positions = rows.token_positions
    begins = positions % num_tokens == 0
    begins[rows.query_starts[:-1]] = True
    first = np.flatnonzero(begins)
    lens = np.diff(first, append=len(positions)).astype(np.int32)
    return PackedRows(lens, positions[first], rows.block_tables[rows.token_rows[first]])


def pad_rows(rows: PackedRows, num_tokens: int, block: int) -> PackedRows:
    """`rows`, followed by padding rows of one token at position 0 in `block`, `num_tokens` tokens in total."""
    count, width = rows.block_tables.shape
    num_rows = count + num_tokens - int(rows.query_starts[-1])
    query_lens = np.ones(num_rows, np.int32)
    positions = np.zeros(num_rows, np.int32)
    tables = np.full((num_rows, max(width, 1)), block, np.int32)
    query_lens[:count] = rows.query_lens
    positions[:count] = rows.positions
    tables[:count, :width] = rows.block_tables
    return PackedRows(query_lens, positions, tables)


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """The inputs of one layer's attention beside q, k and v."""

    scaling: float  # multiplies q . k
    sliding_window: int | None = None  # keys at position - window and before are masked
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)
    sinks: torch.Tensor | None = None  # [num_heads], one more logit per head that takes weight and gives no value


class LayerKind(NamedTuple):
    """The properties by which a kernel distinguishes layers, except their numbers. Most models have one or
    two kinds."""

    num_heads: int
    scaling: float
    sliding_window: int | None
    softcap: float | None

    @property
    def window_left(self) -> int:
        """Keys that are visible before the query's own; -1: all."""
        return -1 if self.sliding_window is None else self.sliding_window - 1

    @property
    def params(self) -> AttentionParams:
        return AttentionParams(self.scaling, self.sliding_window, self.softcap)


KV_DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
"""Dtypes that the pool may have beside the model's own, by their names in the configuration."""


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype for display, such as bfloat16 or fp8_e4m3."""
    names = {known: name for name, known in KV_DTYPES.items()}
    return names.get(dtype, str(dtype).removeprefix("torch."))


def is_eight_bit(dtype: torch.dtype) -> bool:
    """Returns whether the dtype is one of the 8-bit `KV_DTYPES`."""
    return dtype in KV_DTYPES.values()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, with 8-bit floats as plain bytes: every device has ops to move bytes."""
    return tensor.view(torch.uint8) if is_eight_bit(tensor.dtype) else tensor


def as_stored(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Converts keys or values to the pool's dtype. An 8-bit float saturates at its largest number.

    Rounds to nearest, ties to even; NaN stays NaN. Attention reads keys and values as they are stored, including those
    of its own step, so that results do not depend on the step in which they were written.
    """
    if not is_eight_bit(dtype):
        return tensor.to(dtype)
    limit = torch.finfo(dtype).max  # whether casts saturate or give NaN or infinity differs between releases of torch
    return tensor.clamp(-limit, limit).to(dtype)


def last_contiguous(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor in this dtype with its last dimension contiguous. No copy if it is so already."""
    tensor = as_stored(tensor, dtype)
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def computed_in(pool: torch.Tensor, key: torch.Tensor) -> torch.dtype:
    """The dtype of queries and outputs beside a pool and this key: the pool's, or the key's if the pool has 8 bits."""
    return key.dtype if is_eight_bit(pool.dtype) else pool.dtype


class StepAttention(Protocol):
    """One step's plan over one pool."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Writes this step's K/V into the pool's blocks of `layer`, then attends causally over the block tables.

        Attention reads all keys and values as the pool stores them, including this step's; see `as_stored`. `query` is
        `[tokens, num_heads, head_dim]`, `key` and `value` are `[tokens, num_kv_heads, head_dim]`, all with any strides.
        The result is contiguous and shaped as `query`.
        """
        ...


class NotCapturable(Exception):
    """A layer needs attention that cannot be captured in a CUDA graph here. The message names it."""


class FixedStep(StepAttention, Protocol):
    """A step with a fixed number of rows, one token each, that can be captured in a CUDA graph.

    Everything that its `attend` reads about the step lies in fixed buffers, which `replan` fills before each replay.
    The first `attend` of a kind of layer may allocate and wait, so run a forward before the capture.
    """

    def replan(self, rows: PackedRows) -> None:
        """Makes the step run over these rows from now on, in the stream's order. The host does not wait.

        Call it before every `attend`, captured or not.
        """
        ...


class AttentionBackend(Protocol):
    """Attention over a paged pool on one kind of device."""

    name: str
    """The name in logs and reports."""
    batch_invariant: bool = False
    """Whether the bits of a token's result depend on its sequence alone, not on the steps in which this is computed."""

    def plan(self, pool: torch.Tensor, rows: PackedRows) -> StepAttention:
        """Prepares a step over `pool`. The plan is valid for all layers of this step, and for no other step.

        The next plan may reuse the memory of this one, so make it after all layers of this step have been launched.
        """
        ...

    def fixed_steps(self, pool: torch.Tensor, max_rows: int, max_row_blocks: int) -> Callable[[int], FixedStep]:
        """Makes steps of a number of rows, up to `max_rows`, over `pool`, each of up to `max_row_blocks` blocks. They
        share their buffers, so replanning one invalidates the plans of the others. Raises NotCapturable if the
        backend's decoding steps cannot be captured in CUDA graphs."""
        raise NotCapturable(f"attention by the {self.name} backend depends on the host at each step")
