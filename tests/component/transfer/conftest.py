"""Fixtures over all implementations."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.component.transfer.rig import Rig
from tests.component.transfer.transports import TRANSPORTS, Transport


@pytest.fixture(params=list(TRANSPORTS.values()), ids=list(TRANSPORTS))
def transport(request: pytest.FixtureRequest) -> Transport:
    """One implementation after the other."""
    implementation = request.param
    assert isinstance(implementation, Transport)
    if implementation.why_not:
        pytest.skip(implementation.why_not)
    return implementation


@pytest.fixture
def rig(transport: Transport) -> Iterator[Rig]:
    """Ends that are closed when the test is over."""
    made = Rig(transport)
    yield made
    made.close()


@pytest.fixture
def random() -> np.random.Generator:
    """The same numbers in every run."""
    return np.random.default_rng(20)
