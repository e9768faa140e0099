"""Checks whether a backend's kernels run here and compute attention: a small step for each kind of layer, against
torch.

Kernels may be compiled at their first call, for one kind of layer at a time, and can fail then: without a compiler, or
on a GPU that is too old or too new. If that is found at the start, another backend can be used instead.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np
import torch

from kvrelay.backends.backend import AttentionBackend, KVLayout, LayerKind, PackedRows, allocate_pool, bits
from kvrelay.backends.torch_sdpa import TorchBackend

# Limits of |difference| / (1 + |expected|). Both results are rounded to 8 or 11 bits, and merged parts once more: up to
# four times 2^-9 or 2^-12. A wrong key or scale is off by tenths.
_TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 4e-3}
_CAPPED_TOLERANCE = 3e-2  # GPUs' fast tanh is off by 2^-11 of a logit, and a weight by as much as its logit
_LONGEST_WINDOW = 8192  # tokens; a longer window is tried without reaching its edge


class WrongAttention(Exception):
    """The kernels ran and computed something else."""


def try_layers(backend: AttentionBackend, layout: KVLayout, kinds: Collection[LayerKind], device: torch.device) -> None:
    """Runs chunks and single tokens over scattered blocks of a small pool.

    Raises:
        WrongAttention: the result is not that of plain torch.
        Exception: any error of the kernels.
    """
    small = replace(layout, num_layers=2)
    for kind in sorted(kinds, key=str):
        rows = trial_rows(layout.block_size, kind)
        generator = torch.Generator(device).manual_seed(0)

        def draw(*shape: int, generator: torch.Generator = generator) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device).to(layout.dtype)

        pool = allocate_pool(small, int(rows.block_tables.max()) + 1, device)
        pool.copy_(draw(*pool.shape))
        num_tokens = int(rows.query_starts[-1])
        # Scaled, so that some keys weigh more than all others together.
        query = 4 * draw(num_tokens, kind.num_heads, layout.head_dim)
        key, value = draw(2, num_tokens, layout.num_kv_heads, layout.head_dim)
        expected_pool = pool.clone()
        expected = TorchBackend().plan(expected_pool, rows).attend(1, query, key, value, kind.params)
        given = backend.plan(pool, rows).attend(1, query, key, value, kind.params)
        if not torch.equal(bits(pool), bits(expected_pool)):
            raise WrongAttention(f"keys and values of {kind} were written to other places")
        expected = expected.float()
        error = ((given.float() - expected).abs() / (1 + expected.abs())).max().item()
        tolerance = _TOLERANCE[layout.dtype] if kind.softcap is None else _CAPPED_TOLERANCE
        if not error <= tolerance:
            raise WrongAttention(f"{kind} is off by {error:.2g}")


def trial_rows(block_size: int, kind: LayerKind) -> PackedRows:
    """The step for the trial of a kind of layer, over the blocks from 0 on: two chunks, a prompt's first and a later
    one, then single tokens: the first, one in a new block, one far on.

    If the layers have a window, the later ones do not see their first keys.
    """
    reach = min(kind.sliding_window or 0, _LONGEST_WINDOW)
    query_lens = np.array([block_size + 3, 5, 1, 1, 1], np.int32)
    positions = np.array([0, max(block_size - 2, reach), 0, block_size, 5 * block_size + reach + 1], np.int32)
    num_blocks = -(-(positions + query_lens) // block_size)
    tables = np.zeros((len(positions), int(num_blocks.max())), np.int32)
    used = np.arange(tables.shape[1]) < num_blocks[:, None]
    tables.T[used.T] = np.arange(num_blocks.sum(), dtype=np.int32)[::-1]  # rows alternate, from the pool's end
    return PackedRows(query_lens, positions, tables)
