"""Chooses the attention backend for a device and a model's layers."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import replace

import numpy as np
import torch

from kvrelay.backends.backend import (
    AttentionBackend,
    KVLayout,
    LayerKind,
    PackedRows,
    allocate_pool,
    bits,
    is_eight_bit,
)
from kvrelay.backends.cpu import CpuBackend
from kvrelay.backends.cpu_build import KernelBuildError
from kvrelay.backends.flashinfer import FlashInferBackend
from kvrelay.backends.torch_sdpa import TorchBackend

_log = logging.getLogger(__name__)


def select_backend(
    device: torch.device, layout: KVLayout, kinds: Collection[LayerKind] = (), *, batch_invariant: bool = False
) -> AttentionBackend:
    """Returns the fastest backend that works, and logs why a faster one does not.

    On a GPU, a small step with each of `kinds` of layers is run and compared with plain torch first. `batch_invariant`:
    as of FlashInferBackend; plain torch is not.
    """
    if device.type == "cuda":
        return select_flashinfer(device, layout, kinds, batch_invariant=batch_invariant)
    if device.type != "cpu":
        return TorchBackend()
    if not CpuBackend.can_hold(layout.dtype, layout.head_dim):
        _log.warning(
            "attention in plain torch: the CPU kernel knows no %s with heads of %d", layout.dtype, layout.head_dim
        )
        return TorchBackend()
    try:
        return CpuBackend()
    except KernelBuildError as error:
        _log.warning("attention in plain torch, which is slower: the CPU kernel cannot be built: %s", error)
        return TorchBackend()


def select_flashinfer(
    device: torch.device, layout: KVLayout, kinds: Collection[LayerKind], *, batch_invariant: bool = False
) -> AttentionBackend:
    """Returns FlashInfer if it is installed, supports the layout and passes the trial, else plain torch."""
    if not FlashInferBackend.can_hold(layout):
        heads = f"{layout.num_kv_heads} heads of {layout.head_dim}"
        _log.warning("attention in plain torch: FlashInfer knows no %s with %s", layout.dtype, heads)
        return TorchBackend()
    # Its parts look for a compiler, libraries and a driver, and raise errors of many kinds, so this catches more than
    # ImportError.
    try:
        backend = FlashInferBackend(device, batch_invariant=batch_invariant)
    except Exception as error:
        _log.warning("attention in plain torch, which is much slower: FlashInfer cannot be loaded: %s", _reason(error))
        return TorchBackend()
    version = getattr(backend.kernels.flashinfer, "__version__", "of unknown version")
    _log.info("trying FlashInfer %s; kernels that are not built yet are compiled now, which takes minutes", version)
    failure = _trial_failure(backend, layout, kinds, device)
    tried_newer = not (batch_invariant or is_eight_bit(layout.pool_dtype))
    if failure is not None and _has_kernels_of_its_own(device) and tried_newer:
        _log.warning("chunks of prompts go through FlashInfer's kernels for older GPUs: newer ones fail: %s", failure)
        backend.kernels.prefill_as_on_older_gpus()
        failure = _trial_failure(backend, layout, kinds, device)
    if failure is not None:
        _log.warning("attention in plain torch, which is much slower: FlashInfer does not work: %s", failure)
        return TorchBackend()
    return backend


def _trial_failure(
    backend: FlashInferBackend, layout: KVLayout, kinds: Collection[LayerKind], device: torch.device
) -> str | None:
    """Returns why the kernels failed the trial, or None if they passed."""
    try:
        try_layers(backend, layout, kinds, device)
    except Exception as error:
        return _reason(error)
    return None


def _has_kernels_of_its_own(device: torch.device) -> bool:
    """Returns whether FlashInfer has prefill kernels of its own for this GPU, as it has for Hopper."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def _reason(error: Exception) -> str:
    """The error on one line. Compiler logs are cut to their last part, which says what is wrong."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 600 else f"{text[:200]} ... {text[-400:]}"


# Limits of |difference| / (1 + |expected|). Both results are rounded to 8 or 11 bits, and merged parts once more: up to
# four times 2^-9 or 2^-12. A wrong key or scale is off by tenths.
_TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 4e-3}
_CAPPED_TOLERANCE = 3e-2  # GPUs' fast tanh is off by 2^-11 of a logit, and a weight by as much as its logit
_LONGEST_WINDOW = 8192  # tokens; a longer window is tried without reaching its edge


class WrongAttention(Exception):
    """The kernels ran and computed something else."""


def try_layers(backend: AttentionBackend, layout: KVLayout, kinds: Collection[LayerKind], device: torch.device) -> None:
    """Runs chunks and single tokens over scattered blocks of a small pool. Raises WrongAttention if the result is not
    that of plain torch, and any error of the kernels."""
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
