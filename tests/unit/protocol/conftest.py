"""A network of links without sockets or a clock of its own."""

from __future__ import annotations

import pytest

from tests.unit.protocol.link_network import Network


@pytest.fixture
def network() -> Network:
    return Network()
