"""Tiny models, built once per session, and runners over them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
import torch

from kvrelay.engine.make import make_runner
from kvrelay.engine.run.transformers_runner import TransformersRunner
from tests.fakes.pretended_cuda import Machine, pretend_cuda
from tests.tiny_models import build_model


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a tiny model by architecture."""
    root = tmp_path_factory.mktemp("tiny-models")
    return lambda name: root / name if (root / name).exists() else build_model(name, root / name)


@pytest.fixture(scope="session")
def runner_of(model_dir: Callable[[str], Path]) -> Callable[[str], TransformersRunner]:
    """A runner by architecture, with 96 blocks of 16 tokens, shared by the tests."""
    runners: dict[str, TransformersRunner] = {}

    def get(name: str) -> TransformersRunner:
        if name not in runners:
            runners[name] = make_runner(str(model_dir(name)), dtype="float32", num_blocks=96)
        return runners[name]

    return get


@pytest.fixture(params=["late", "any time"])
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    """Two pretended GPUs, on which things run as late as can be, or whenever they may."""
    with pretend_cuda(Machine(2, random=None if request.param == "late" else Random(0))) as found:
        yield found


@pytest.fixture
def late() -> Iterator[Machine]:
    """Two pretended GPUs, on which things run as late as can be."""
    with pretend_cuda(Machine(2)) as found:
        yield found
