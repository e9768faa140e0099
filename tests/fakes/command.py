"""Commands of kvrelay in the process of a test."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvrelay.cli.main import main


def command(name: str) -> Callable[[Sequence[str]], int]:
    """`kvrelay NAME`: takes its arguments and returns its exit status."""
    return lambda arguments: main([name, *arguments])
