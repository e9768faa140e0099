"""One small random model for the module's tests, as files and loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvrelay.engine.load.causal_model import CausalModel, load_model
from kvrelay.engine.load.model_source import open_source
from tests.tiny_models import build_model

BLOCK_SIZE = 8


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model("qwen3", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(model_dir: Path) -> CausalModel:
    torch.set_num_threads(1)
    return load_model(open_source(str(model_dir), "float32"), BLOCK_SIZE)
