"""What rank 0 tells the other ranks of its configuration."""

from __future__ import annotations

from typing import Literal

import pytest

from kvrelay.config.worker import WorkerConfig
from kvrelay.ranks.messages import Start, encode, published_decoder
from kvrelay.worker.divided_model import _settings

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize(
    "sizes", [{}, {"kv_memory_bytes": "64MiB", "swap_space": "16MiB"}, {"memory_utilization": 0.5}]
)
def test_sizes_of_pools_reach_the_ranks(role: Literal["prefill", "decode"], sizes: dict[str, object]) -> None:
    config = WorkerConfig.model_validate({"role": role, "model": "model", "tensor_parallel_size": 2} | sizes)
    settings = _settings(config, 7000, hands_over=True)
    sent = published_decoder().decode(encode(Start(settings)))
    assert sent == Start(settings)
    if "kv_memory_bytes" in sizes:
        assert settings.kv_memory_bytes == 64 << 20
        assert settings.swap_bytes == (0 if role == "prefill" else 16 << 20)
