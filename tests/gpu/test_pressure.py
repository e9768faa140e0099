"""Preemption on a GPU: sequences lose their blocks, by force and for want of room, and their tokens stay the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from kvrelay.engine.load.causal_model import CausalModel, load_model
from kvrelay.engine.load.model_source import open_source
from kvrelay.scheduling.scheduler_settings import SchedulerSettings
from tests.component.engine import test_parity_under_schedulers as parity
from tests.component.engine.conftest import BLOCK_SIZE
from tests.gpu.reference import greedy, read_model
from tests.tiny_models import build_model

Expected = Callable[[tuple[int, ...], int], list[int]]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model("qwen3", tmp_path_factory.mktemp("model"))


@pytest.fixture
def model(device: torch.device, model_dir: Path) -> CausalModel:
    return load_model(open_source(str(model_dir), "float32", device), BLOCK_SIZE)


@pytest.fixture
def expected(device: torch.device, model_dir: Path) -> Expected:
    reference = read_model(model_dir, torch.float32, device)
    return cache(lambda prompt, max_tokens: greedy(reference, prompt, max_tokens))


def test_by_recomputation_while_steps_overlap(model: CausalModel, expected: Expected) -> None:
    scheduler = parity.check(
        model, expected, "sarathi", SchedulerSettings(), with_cache=True, overlap=True, launches_ahead=False
    )
    assert scheduler.num_preemptions > 0


def test_by_recomputation_while_steps_are_launched_ahead(model: CausalModel, expected: Expected) -> None:
    scheduler = parity.check(
        model, expected, "sarathi", SchedulerSettings(), with_cache=True, overlap=True, launches_ahead=True
    )
    assert scheduler.num_preemptions > 0


def test_by_swapping_to_pinned_memory(model: CausalModel, expected: Expected) -> None:
    parity.test_preemption_by_swapping(model, expected, "sarathi", 100, with_cache=True)
