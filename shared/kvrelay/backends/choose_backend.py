"""Chooses the attention backend for a device and a model's layers."""

from __future__ import annotations

import logging
from collections.abc import Collection

import torch

from kvrelay.backends.backend import AttentionBackend, KVLayout, LayerKind, is_eight_bit
from kvrelay.backends.cpu import CpuBackend
from kvrelay.backends.cpu_build import KernelBuildError
from kvrelay.backends.flashinfer import FlashInferBackend
from kvrelay.backends.torch_sdpa import TorchBackend
from kvrelay.backends.trial import try_layers

_log = logging.getLogger(__name__)


def select_backend(device: torch.device, layout: KVLayout, kinds: Collection[LayerKind] = ()) -> AttentionBackend:
    """Returns the fastest backend that works, and logs why a faster one does not.

    On a GPU, a small step with each of `kinds` of layers is run and compared with plain torch first.
    """
    if device.type == "cuda":
        return select_flashinfer(device, layout, kinds)
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


def select_flashinfer(device: torch.device, layout: KVLayout, kinds: Collection[LayerKind]) -> AttentionBackend:
    """Returns FlashInfer if it is installed, supports the layout and passes the trial, else plain torch."""
    if not FlashInferBackend.can_hold(layout):
        heads = f"{layout.num_kv_heads} heads of {layout.head_dim}"
        _log.warning("attention in plain torch: FlashInfer knows no %s with %s", layout.dtype, heads)
        return TorchBackend()
    # Its parts look for a compiler, libraries and a driver, and raise errors of many kinds, so this catches more than
    # ImportError.
    try:
        backend = FlashInferBackend(device)
    except Exception as error:
        _log.warning("attention in plain torch, which is much slower: FlashInfer cannot be loaded: %s", _reason(error))
        return TorchBackend()
    version = getattr(backend.kernels.flashinfer, "__version__", "of unknown version")
    _log.info("trying FlashInfer %s; kernels that are not built yet are compiled now, which takes minutes", version)
    failure = _trial_failure(backend, layout, kinds, device)
    if failure is not None and _has_kernels_of_its_own(device) and not is_eight_bit(layout.pool_dtype):
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
