"""A step waits for its device once: what would make the host wait is counted, op by op."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvrelay.engine import device
from kvrelay.engine.sampler import Sampler
from kvrelay.protocol.sampling import Sampling

pytestmark = pytest.mark.unit
ATEN = torch.ops.aten
ASKS_THE_DEVICE = {ATEN._local_scalar_dense, ATEN.nonzero, ATEN.masked_select, ATEN.equal, ATEN.is_nonzero}


class Waits(TorchDispatchMode):
    """Ops that need a value, or a shape, from the device before the next one can be asked for."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func.overloadpacket
        indices = [index for arg in args if isinstance(arg, list | tuple) for index in arg]
        by_mask = packet in (ATEN.index, ATEN.index_put, ATEN.index_put_) and any(
            isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8) for index in indices
        )
        if packet in ASKS_THE_DEVICE or by_mask:
            self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "batch",
    [
        [Sampling(temperature=0.0)] * 4,
        [Sampling(temperature=0.0), Sampling(temperature=0.8, seed=1), Sampling(temperature=1.0, top_p=0.9, seed=2)],
        [Sampling(temperature=1.0, top_k=20, min_p=0.05, seed=index) for index in range(3)],
        [
            Sampling(temperature=0.7, presence_penalty=1.0, logit_bias={3: 1.0}, min_tokens=2, seed=5),
            Sampling(temperature=0.0, repetition_penalty=1.3),
        ],
    ],
    ids=["greedy", "mixed", "limited", "penalised"],
)
def test_a_draw_waits_once(batch: list[Sampling], monkeypatch: pytest.MonkeyPatch) -> None:
    copies = 0
    copy_to_host = device.to_host

    def counting(*columns: torch.Tensor) -> tuple[np.ndarray[Any, Any], ...]:
        nonlocal copies
        copies += 1
        with torch.utils._python_dispatch._disable_current_modes():
            return copy_to_host(*columns)

    monkeypatch.setattr("kvrelay.engine.sampler.to_host", counting)
    sampler = Sampler(500, (498, 499), torch.device("cpu"))
    keys = [(f"request-{index}", 0, 0) for index in range(len(batch))]
    for key, sampling in zip(keys, batch, strict=True):
        sampler.add(key, sampling, [1, 2, 3], 2)
    logits = torch.randn(len(batch), 500, generator=torch.Generator().manual_seed(0)) * 3
    with Waits() as waits:
        sampler.sample(keys, np.full(len(batch), 3), logits)
    assert waits.ops == []
    assert copies == 1
