"""What the tests of the FlashInfer backend have in common."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvrelay.backends.backend import KV_DTYPES, KVLayout, LayerKind
from tests.fakes import fake_flashinfer

LAYOUT = KVLayout(num_layers=4, num_kv_heads=2, head_dim=64, block_size=16, dtype=torch.bfloat16)
KINDS = {LayerKind(8, 0.125, None, None), LayerKind(8, 0.125, 20, None), LayerKind(6, 0.3, None, 30.0)}
E5M2 = KV_DTYPES["fp8_e5m2"]
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3}  # outputs are means of unit normals, rounded to 8 or 11 bits


def install(monkeypatch: pytest.MonkeyPatch, **parts: Any) -> None:
    """A FlashInfer that is the fake but for `parts`."""
    known = {name: part for name, part in vars(fake_flashinfer).items() if not name.startswith("_")}
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(**known | parts))
