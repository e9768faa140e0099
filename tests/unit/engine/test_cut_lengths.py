"""A maximum length that is cut is reported with both lengths and the reason."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import LlamaConfig

from kvrelay.engine.load.support import resolve_max_model_len
from kvrelay.engine.make import make_runner
from tests.tiny_models import build_model


def test_longer_than_the_model_s_positions(caplog: pytest.LogCaptureFixture) -> None:
    config = LlamaConfig(max_position_embeddings=512)
    assert resolve_max_model_len(config, 512) == 512
    assert caplog.messages == []
    assert resolve_max_model_len(config, 600) == 512
    assert caplog.messages == ["max_model_len is cut from 600 to 512 tokens, the model's max_position_embeddings"]


def test_longer_than_the_pool(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = str(build_model("llama", tmp_path))
    assert make_runner(model, num_blocks=128, num_threads=1).spec.max_model_len == 2048
    assert not [message for message in caplog.messages if "is cut" in message]
    assert make_runner(model, num_blocks=10, num_threads=1).spec.max_model_len == 160
    (message,) = [message for message in caplog.messages if "is cut" in message]
    assert message.startswith("max_model_len is cut from 2048 to 160 tokens, which the pool's 10 blocks of 16 hold")
    assert "raise kv_memory_bytes" in message
