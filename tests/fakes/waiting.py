"""Waiting for what must come, for as long as the slowest machine may need for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

PATIENCE_S = 120.0
"""What has not come by then does not come. Tests wait for events, never for time; this only ends a wait in vain."""
POLL_S = 0.005


async def until(condition: Callable[[], object], patience_s: float = PATIENCE_S) -> None:
    """Returns once the condition holds. Raises AssertionError after `patience_s`."""
    try:
        async with asyncio.timeout(patience_s):
            while not condition():
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise AssertionError(f"not within {patience_s:g} s") from None


def wait_until(condition: Callable[[], object]) -> None:
    """As `until`, where there is no event loop."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {PATIENCE_S:g} s"
        time.sleep(POLL_S)
