"""What several files share: small models, and one running system with the demo model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.open_ports import HEALTH_PAGES
from tests.fakes.stack import Stack
from tests.tiny_models import build_model

DEMO_MODEL = Path(__file__).parents[2] / "models" / "demo"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Random small models by architecture, built once."""
    built: dict[str, Path] = {}

    def build(architecture: str) -> Path:
        if architecture not in built:
            built[architecture] = build_model(architecture, tmp_path_factory.mktemp(architecture))
        return built[architecture]

    return build


@pytest.fixture(scope="session")
def demo_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One prefill and one decode worker with the demo model, for the files of `demo_stack`, which leave nothing behind.
    One process runs them all (`tests/time_limit.py`): a start takes 15 seconds of a core."""
    flags = ("--dtype", "float32", "--token-budget", "512", "--threads", "1")
    with Stack(DEMO_MODEL, tmp_path_factory.mktemp("stack"), *flags, environ=HEALTH_PAGES) as stack:
        yield stack
