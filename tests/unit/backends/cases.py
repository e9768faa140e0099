"""Random steps over scattered blocks, and what a backend makes of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from kvrelay.backends.backend import AttentionBackend, AttentionParams, KVLayout, PackedRows, allocate_pool

CPU = torch.device("cpu")


@dataclass
class AttentionCase:
    """A step: rows as (position, new tokens), the layer's shape, and what its attention asks for."""

    rows: list[tuple[int, int]]
    num_kv_heads: int = 2
    group: int = 2
    head_dim: int = 32
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    window: int | None = None
    softcap: float | None = None
    with_sinks: bool = False
    stored: torch.dtype | None = None  # of the pool; None: dtype
    seed: int = 0
    num_layers: int = 2
    layer: int = 1
    pool: torch.Tensor = field(init=False)
    packed: PackedRows = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        num_blocks = [-(-(position + tokens) // self.block_size) for position, tokens in self.rows]
        order = np.random.default_rng(self.seed).permutation(sum(num_blocks) + 3).astype(np.int32)
        tables = np.zeros((len(self.rows), max(num_blocks) + 1), np.int32)
        for row, blocks in enumerate(np.split(order[:-3], np.cumsum(num_blocks)[:-1])):
            tables[row, : len(blocks)] = blocks
        layout = KVLayout(self.num_layers, self.num_kv_heads, self.head_dim, self.block_size, self.dtype, self.stored)
        self.pool = allocate_pool(layout, len(order), CPU)
        self.pool.copy_(torch.randn(self.pool.shape))
        positions, lengths = zip(*self.rows, strict=True)
        self.packed = PackedRows(np.array(lengths, np.int32), np.array(positions, np.int32), tables)
        num_tokens, num_heads = sum(lengths), self.num_kv_heads * self.group
        self.query = torch.randn(num_tokens, num_heads, self.head_dim).to(self.dtype)
        self.key, self.value = torch.randn(2, num_tokens, self.num_kv_heads, self.head_dim).to(self.dtype)
        self.params = AttentionParams(
            scaling=1.3 * self.head_dim**-0.5,
            sliding_window=self.window,
            softcap=self.softcap,
            sinks=torch.randn(num_heads) if self.with_sinks else None,
        )

    def run(self, backend: AttentionBackend) -> tuple[torch.Tensor, torch.Tensor]:
        """The output, and the pool afterwards; the case itself stays as it is."""
        pool = self.pool.clone()
        step = backend.plan(pool, self.packed)
        return step.attend(self.layer, self.query, self.key, self.value, self.params), pool


def dense_attention(case: AttentionCase) -> torch.Tensor:
    """The same in float64, written out token by token from contiguous keys and values."""
    out = []
    for row, (position, tokens) in enumerate(case.rows):
        start = int(case.packed.query_starts[row])
        slots = [(case.packed.block_tables[row, at // case.block_size], at % case.block_size) for at in range(position)]
        old = [case.pool[block, case.layer, :, :, slot].double() for block, slot in slots]
        new = [torch.stack([case.key[start + i], case.value[start + i]]) for i in range(tokens)]
        new = [each.to(case.pool.dtype).double() for each in new]  # those of the step itself are seen as stored, too
        keys, values = torch.stack(old + new).unbind(1)
        for i in range(tokens):
            at = position + i
            first = 0 if case.window is None else max(0, at + 1 - case.window)
            out.append(
                _attend_token(case, case.query[start + i].double(), keys[first : at + 1], values[first : at + 1])
            )
    return torch.stack(out)


def _attend_token(case: AttentionCase, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    heads = []
    for head in range(len(query)):
        scores = keys[:, head // case.group] @ query[head] * case.params.scaling
        if case.softcap is not None:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        weights = torch.exp(scores)
        total = weights.sum()
        if case.params.sinks is not None:
            total = total + torch.exp(case.params.sinks[head].double())
        heads.append(weights @ values[:, head // case.group] / total)
    return torch.stack(heads)
