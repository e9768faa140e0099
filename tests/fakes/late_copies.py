"""Copies to the host that are not there before they are waited for, as those from a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from kvrelay.engine.run import device

_NOT_THERE_YET = -(2.0**40)


class LateCopies:
    """Takes the place of `device.start_copy`. Before a copy lands, the host's memory holds what is no result."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, on_wait: Callable[[], None] = lambda: None) -> None:
        """`on_wait` is called whenever somebody waits for a copy."""
        self.num_started = 0
        self.landed: list[int] = []
        """Numbers of the copies, from 0 in the order in which they were started, that were waited for."""
        self.on_wait = on_wait
        monkeypatch.setattr(device, "start_copy", self._start)

    def _start(self, source: torch.Tensor) -> tuple[torch.Tensor, _Landing]:
        host = torch.full_like(source, _NOT_THERE_YET)
        self.num_started += 1
        return host, _Landing(self, self.num_started - 1, source.clone(), host)


@dataclass(frozen=True, slots=True)
class _Landing:
    """In place of a CUDA event."""

    copies: LateCopies
    number: int
    source: torch.Tensor  # as it was when the copy was asked for: on a stream, what comes later does not change it
    host: torch.Tensor

    def synchronize(self) -> None:
        self.copies.on_wait()
        self.host.copy_(self.source)
        self.copies.landed.append(self.number)
