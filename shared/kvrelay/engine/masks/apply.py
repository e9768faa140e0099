"""Applies token masks to logits. The bits go to the device packed, and a CPU and Triton read them so."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from ctypes import c_int64, c_void_p
from functools import cache
from importlib.util import find_spec

import numpy as np
import torch
from numpy.typing import NDArray

from kvrelay.backends.cpu_build import KernelBuildError, load_kernel
from kvrelay.engine.run.device import to_device
from kvrelay.grammar.grammar_compiler import TokenMask, address_of


def apply_masks(logits: torch.Tensor, rows: Sequence[int], masks: Sequence[TokenMask]) -> None:
    """Sets the logits, `[rows, vocab]` float32, of tokens that the masks of `rows` do not allow to minus infinity, in
    place."""
    kernel = _kernel_for(logits)
    if kernel is None:
        packed = to_device(np.stack([mask[: -(-logits.shape[1] // 32)] for mask in masks]), logits.device)
        _find_kernel(logits.device.type)(logits, to_device(np.array(rows, np.int64), logits.device), packed)
        return
    where = np.array(rows, np.int64)
    addresses = np.array([address_of(mask) for mask in masks], np.uintp)
    kernel.kvrelay_forbid_tokens(
        logits.data_ptr(),
        logits.stride(0),
        where.ctypes.data,
        addresses.ctypes.data,
        len(rows),
        logits.shape[1],
    )


def most_likely(
    logits: torch.Tensor, masks: Mapping[int, TokenMask] | None = None
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The allowed token with the greatest logit, `[rows]` int64, and the greatest logit of all tokens, `[rows]`
    float32, NaN if one is NaN. None if the logits, `[rows, vocab]`, are not float32 on a CPU that has the kernel.

    `masks`: the allowed tokens by row; rows without a mask allow all. One pass over the logits, which are not changed.
    """
    kernel = _kernel_for(logits)
    if kernel is None:
        return None
    addresses = np.zeros(len(logits), np.uintp)
    for row, mask in (masks or {}).items():
        addresses[row] = address_of(mask)
    token_ids, peaks = np.empty(len(logits), np.int64), np.empty(len(logits), np.float32)
    kernel.kvrelay_most_likely(
        logits.data_ptr(),
        logits.stride(0),
        addresses.ctypes.data,
        *logits.shape,
        token_ids.ctypes.data,
        peaks.ctypes.data,
        torch.get_num_threads(),
    )
    return torch.from_numpy(token_ids), torch.from_numpy(peaks)


def to_weights(logits: torch.Tensor, scales: NDArray[np.float32]) -> bool:
    """Replaces `logits`, `[rows, vocab]`, by `exp((logit - the row's greatest) * scale)`. `scales` is `[rows]`. False,
    and nothing is changed, if the logits are not float32 on a CPU that has the kernel."""
    kernel = _kernel_for(logits)
    if kernel is None:
        return False
    kernel.kvrelay_weights(
        logits.data_ptr(), logits.stride(0), scales.ctypes.data, *logits.shape, torch.get_num_threads()
    )
    return True


@cache
def _find_kernel(device_type: str) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]:
    """Triton's kernel on a GPU if Triton is installed, else plain torch."""
    if device_type != "cuda" or find_spec("triton") is None:
        return apply_by_torch
    from kvrelay.engine.fused import triton_kernels

    return triton_kernels.apply_masks


def apply_by_torch(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
    """Sets logits, `[rows, vocab]`, to minus infinity in place, in the rows `rows`, `[masks]` int64, where the bits of
    `masks`, `[masks, words]` int32, are 0."""
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    forbidden = (((masks[:, :, None] >> shifts) & 1) == 0).flatten(1)[:, : logits.shape[1]]
    logits.index_copy_(0, rows, logits.index_select(0, rows).masked_fill_(forbidden, -torch.inf))


def _kernel_for(logits: torch.Tensor) -> ctypes.CDLL | None:
    """The kernel, if the logits are float32 on a CPU and those of a row lie side by side."""
    fits = logits.device.type == "cpu" and logits.dtype == torch.float32 and logits.stride(1) == 1
    return _kernel() if fits else None


@cache
def _kernel() -> ctypes.CDLL | None:
    """None if it cannot be built, which the choice of the attention backend logs."""
    try:
        kernel = load_kernel()
    except KernelBuildError:
        return None
    kernel.kvrelay_forbid_tokens.argtypes = [c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_int64]
    kernel.kvrelay_forbid_tokens.restype = None
    kernel.kvrelay_most_likely.argtypes = [c_void_p, c_int64, c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_int64]
    kernel.kvrelay_most_likely.restype = None
    kernel.kvrelay_weights.argtypes = [c_void_p, c_int64, c_void_p, c_int64, c_int64, c_int64]
    kernel.kvrelay_weights.restype = None
    return kernel
