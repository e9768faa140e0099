"""Attention in plain torch: gathers each row's blocks and attends in float32.

Works on any device and with any head size. It is the fallback if no kernel can be built, and the oracle of the tests.
"""

from __future__ import annotations

import numpy as np
import torch

from kvrelay.backends.backend import (
    AttentionBackend,
    AttentionParams,
    PackedRows,
    PoolShape,
    StepAttention,
    as_stored,
    bits,
)


class TorchBackend(AttentionBackend):
    """Gathers and attends row by row."""

    name = "torch"

    def plan(self, pool: torch.Tensor, rows: PackedRows) -> StepAttention:
        """Copies the step's indices to the pool's device."""
        return TorchStep(pool, rows)


class TorchStep:
    """One step of `TorchBackend`."""

    def __init__(self, pool: torch.Tensor, rows: PackedRows) -> None:
        block_size = PoolShape(*pool.shape).block_size
        self._pool = pool
        self._block_size = block_size
        self._rows = rows
        self._write_blocks = _to_index(rows.token_blocks(block_size), pool.device)
        self._write_offsets = _to_index(rows.token_positions % block_size, pool.device)
        self._tables = _to_index(rows.block_tables, pool.device)
        self._token_positions = _to_index(rows.token_positions, pool.device)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        cache = self._pool[:, layer]
        for kind, new in enumerate((key, value)):
            stored = as_stored(new, cache.dtype)
            bits(cache)[:, kind][self._write_blocks, :, self._write_offsets] = bits(stored)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        starts = self._rows.query_starts
        for row in range(len(self._rows.query_lens)):
            tokens = slice(int(starts[row]), int(starts[row + 1]))
            out[tokens] = self._attend_row(cache, row, query[tokens], self._token_positions[tokens], params)
        return out

    def _attend_row(
        self,
        cache: torch.Tensor,
        row: int,
        query: torch.Tensor,
        query_positions: torch.Tensor,
        params: AttentionParams,
    ) -> torch.Tensor:
        """Attention of one row. `cache` is `[num_blocks, 2, num_kv_heads, block_size, head_dim]`."""
        num_keys = int(self._rows.positions[row] + self._rows.query_lens[row])
        first = 0
        if params.sliding_window is not None:
            first = max(0, int(self._rows.positions[row]) + 1 - params.sliding_window) // self._block_size
        blocks = self._tables[row, first : -(-num_keys // self._block_size)]
        stored = bits(cache)[blocks].view(cache.dtype)
        gathered = stored.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : num_keys - first * self._block_size]
        keys, values = gathered.float().unbind(0)
        key_positions = torch.arange(first * self._block_size, num_keys, device=query.device)
        distance = query_positions[:, None] - key_positions[None, :]
        visible = distance >= 0
        if params.sliding_window is not None:
            visible &= distance < params.sliding_window
        return _softmax_attention(query.float(), keys, values, visible, params).to(query.dtype)


def _softmax_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor, params: AttentionParams
) -> torch.Tensor:
    """`[queries, num_heads, head_dim]` from keys and values `[num_kv_heads, keys, head_dim]`, all float32."""
    num_kv_heads = len(keys)
    if params.softcap is None and params.sinks is None:
        attended = torch.nn.functional.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            keys[None],
            values[None],
            attn_mask=visible[None, None],
            scale=params.scaling,
            enable_gqa=query.shape[1] != num_kv_heads,
        )
        return attended[0].transpose(0, 1)
    grouped = query.unflatten(1, (num_kv_heads, -1))
    scores = torch.einsum("qhgd,hkd->qhgk", grouped, keys) * params.scaling
    if params.softcap is not None:
        scores = torch.tanh(scores / params.softcap) * params.softcap
    scores = scores.masked_fill(~visible[:, None, None, :], float("-inf"))
    if params.sinks is not None:
        sinks = params.sinks.float().view(1, num_kv_heads, -1, 1).expand(len(query), -1, -1, 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    return torch.einsum("qhgk,hkd->qhgd", weights, values).flatten(1, 2)


def _to_index(array: np.ndarray[tuple[int, ...], np.dtype[np.int32]], device: torch.device) -> torch.Tensor:
    index = torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64))
    # A copy from pinned memory does not wait. The caching host allocator keeps the memory until it is done.
    return index.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else index.to(device)
