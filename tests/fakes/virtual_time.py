"""An event loop whose clock stands still while anything happens, and jumps to the next timer when nothing does.

Runs on it do not depend on how fast the machine is; so they are repeatable as long as no thread or socket takes part.
"""

from __future__ import annotations

import asyncio
import selectors


class _Selector(selectors.DefaultSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now += max(0.0, timeout or 0.0)
        return super().select(0)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now

    def advance(self, seconds: float) -> None:
        """As if something had kept the loop busy so long."""
        self._virtual.now += seconds
