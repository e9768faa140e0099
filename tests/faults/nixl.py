"""Whether NIXL can be used here."""

from __future__ import annotations

import numpy as np
import pytest

from kvrelay.transfer.nixl_agent import NixlAgent, Region, TransportUnavailable


def needs_nixl() -> None:
    """Skips the test, with the reason, where NIXL does not work."""
    try:
        NixlAgent(Region.of(np.zeros((2, 4096), np.uint8))).close()
    except TransportUnavailable as error:
        pytest.skip(f"NIXL does not work here: {error}")
