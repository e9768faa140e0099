"""What an error of a step is for the requests in it."""

from __future__ import annotations

import pytest
import torch

from kvrelay.engine.sample.logprobs import BadLogits
from kvrelay.protocol.failure_kind import FailureKind
from kvrelay.step.batch import DeviceLost, RowsFailed, failure_kind

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (BadLogits([("r", 1, 0)]), FailureKind.BAD_LOGITS),
        (RowsFailed("no", [("r", 1, 0)]), FailureKind.ENGINE_ERROR),
        (DeviceLost("GPU 0"), FailureKind.DEVICE_LOST),
        (torch.OutOfMemoryError("no memory"), FailureKind.OUT_OF_MEMORY),
        (MemoryError(), FailureKind.OUT_OF_MEMORY),
        (RuntimeError("anything else"), FailureKind.ENGINE_ERROR),
    ],
)
def test_kinds(error: Exception, kind: FailureKind) -> None:
    assert failure_kind(error) is kind


def test_memory_that_torch_finds_too_little_of_on_a_cpu() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50, dtype=torch.uint8)
    assert failure_kind(caught.value) is FailureKind.OUT_OF_MEMORY
