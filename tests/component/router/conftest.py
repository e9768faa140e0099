from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import uvloop

from kvrelay.text.service import TextService
from tests.component.router.rig import Router, running_router
from tests.component.router.tools import TEMPLATE
from tests.fakes.text_model import write_text_model


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The loop that routers run on."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TextService]:
    model = write_text_model(tmp_path_factory.mktemp("text-model"))
    service = TextService.load(str(model), max_grammar_cpu_s=60.0)  # a slow machine refuses nothing
    yield service
    service.close()


@pytest.fixture(scope="session")
def tools_text(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TextService]:
    """Of a model that calls tools and reasons."""
    model = write_text_model(tmp_path_factory.mktemp("tools-model"), TEMPLATE)
    service = TextService.load(str(model), max_grammar_cpu_s=60.0)
    yield service
    service.close()


@pytest.fixture
async def router(text: TextService) -> AsyncIterator[Router]:
    assert isinstance(asyncio.get_running_loop(), uvloop.Loop)
    async with running_router(text) as running:
        yield running


@pytest.fixture
def make_router(text: TextService) -> Callable[..., Any]:
    """Makes routers with other settings."""
    return lambda **settings: running_router(text, **settings)
