"""Signals that end a benchmark."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGINT and SIGTERM raise KeyboardInterrupt within, so that servers are stopped. Shells start background commands
    with SIGINT ignored, hence the handlers."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    earlier = [signal.signal(number, signal.default_int_handler) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, earlier, strict=True):
            signal.signal(number, handler)
