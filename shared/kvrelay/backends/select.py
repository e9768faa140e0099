"""Chooses the attention backend for a device, an element type and a head size."""

from __future__ import annotations

import logging

import torch

from kvrelay.backends.base import AttentionBackend
from kvrelay.backends.cpu import CpuBackend
from kvrelay.backends.cpu_build import KernelBuildError
from kvrelay.backends.flashinfer import FlashInferBackend
from kvrelay.backends.torch_sdpa import TorchBackend

_log = logging.getLogger(__name__)


def select_backend(device: torch.device, dtype: torch.dtype, head_dim: int) -> AttentionBackend:
    """The fastest backend that works; why a faster one does not is logged."""
    if device.type == "cuda":
        return _select_cuda(device, dtype, head_dim)
    if device.type != "cpu":
        return TorchBackend()
    if not CpuBackend.can_hold(dtype, head_dim):
        _log.warning("attention in plain torch: the CPU kernel knows no %s with heads of %d", dtype, head_dim)
        return TorchBackend()
    try:
        return CpuBackend()
    except KernelBuildError as error:
        _log.warning("attention in plain torch, which is slower: the CPU kernel cannot be built: %s", error)
        return TorchBackend()


def _select_cuda(device: torch.device, dtype: torch.dtype, head_dim: int) -> AttentionBackend:
    if not FlashInferBackend.can_hold(dtype, head_dim):
        _log.warning("attention in plain torch: FlashInfer knows no %s with heads of %d", dtype, head_dim)
        return TorchBackend()
    try:
        return FlashInferBackend(device)
    except ImportError as error:
        _log.warning("attention in plain torch, which is much slower: FlashInfer cannot be loaded: %s", error)
        return TorchBackend()
