"""Which device is taken, and what is said where it is not there."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvrelay.engine.device import find_device, to_host

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("name", "num_gpus", "expected"),
    [("auto", 2, "cpu"), ("cpu", 2, "cpu"), ("cuda", 2, "cuda:0"), ("cuda", 1, "cuda:0"), ("cuda:1", 2, "cuda:1")],
)
def test_what_a_name_stands_for(name: str, num_gpus: int, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    assert find_device(name) == torch.device(expected)


@pytest.mark.parametrize(("name", "num_gpus"), [("cuda", 0), ("cuda:0", 0), ("cuda:2", 2)])
def test_a_gpu_that_is_not_there_is_refused(name: str, num_gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    with pytest.raises(ValueError, match=f"device = {name}: torch finds .*allowed: auto, cpu"):
        find_device(name)


def test_columns_come_back_exactly() -> None:
    ids, peaks = to_host(torch.tensor([2**52, 7]), torch.tensor([0.1, float("nan")]))
    assert ids.astype(np.int64).tolist() == [2**52, 7]
    assert peaks[0] == np.float32(0.1)
    assert np.isnan(peaks[1])
