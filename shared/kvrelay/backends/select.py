"""Chooses the attention backend for a device."""

from __future__ import annotations

import torch

from kvrelay.backends.base import AttentionBackend
from kvrelay.backends.torch_sdpa import TorchBackend


def select_backend(device: torch.device) -> AttentionBackend:
    """The fastest backend that works on `device`."""
    return TorchBackend()
