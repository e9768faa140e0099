"""Transfers of a simulated device: small stand-ins for blocks travel by a real transport after the profile's time.

A worker has one link, and pushes use it one after the other, in pieces. A piece's blocks are read from the pool when
its time has passed, so a block that was reused too early has wrong contents and the stream's tokens differ.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from kvrelay.device_profiles import Profile
from kvrelay.handoff.transports.base import BlockPush, Pushed, SenderEvent, TransferSender
from kvrelay.handoff.transports.outbox import Copies
from kvrelay.handoff.transports.pool_memory import PartCopy
from kvrelay.step.batch import ModelSpec

PIECE_S = 5e-3
"""Approximate time of a piece, and so the delay of an abort."""


@dataclass(frozen=True, slots=True)
class _Piece:
    reservation: str
    endpoint: dict[str, str]
    copies: Sequence[BlockPush]
    part: PartCopy | None


class PacedSender:
    """Delays another `TransferSender`. `block_bytes` is the size of a block of the simulated model, `num_blocks` that
    of the pool."""

    def __init__(self, inner: TransferSender, bytes_s: float, block_bytes: int, num_blocks: int) -> None:
        self.name = inner.name
        self.counters = inner.counters
        self._inner = inner
        self._block_bytes = block_bytes
        self._num_blocks = num_blocks
        self._block_s = block_bytes / bytes_s
        self._waiting: deque[_Piece] = deque()
        self._timer: asyncio.TimerHandle | None = None  # end of the first piece
        self._free_at = 0.0

    def start(self, on_event: Callable[[SenderEvent], None]) -> None:
        self._on_event = on_event
        self._loop = asyncio.get_running_loop()
        self._inner.start(self._told)

    def push(
        self, reservation: str, endpoint: dict[str, str], copies: Sequence[BlockPush], part: PartCopy | None = None
    ) -> None:
        Copies.of(copies, self._num_blocks)  # raises the inner sender's errors in the call
        step = max(1, int(PIECE_S / self._block_s))
        for first in range(0, len(copies), step):
            self._waiting.append(_Piece(reservation, endpoint, copies[first : first + step], part))
        self._begin()

    def abort(self, reservation: str) -> None:
        """Also drops the piece in flight: none of it has been read."""
        if self._waiting and self._waiting[0].reservation == reservation:
            self._stop_timer()
            self._free_at = self._loop.time()
        self._waiting = deque(piece for piece in self._waiting if piece.reservation != reservation)
        self._inner.abort(reservation)
        self._begin()

    def close(self) -> None:
        self._stop_timer()
        self._waiting.clear()
        self._inner.close()

    def _begin(self) -> None:
        if self._timer is None and self._waiting:
            self._free_at = max(self._free_at, self._loop.time()) + len(self._waiting[0].copies) * self._block_s
            self._timer = self._loop.call_at(self._free_at, self._leave)

    def _leave(self) -> None:
        self._timer = None
        piece = self._waiting.popleft()
        self._inner.push(piece.reservation, piece.endpoint, piece.copies, piece.part)
        self._begin()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _told(self, event: SenderEvent) -> None:
        if isinstance(event, Pushed):
            event = replace(event, num_bytes=len(event.blocks) * self._block_bytes)
        self._on_event(event)


def paced(senders: Mapping[str, TransferSender], profile: Profile, spec: ModelSpec) -> dict[str, TransferSender]:
    """The same transports, delayed to the profile's speed."""
    return {
        name: PacedSender(sender, profile.transfer_bytes_s, spec.block_bytes, spec.num_blocks)
        for name, sender in senders.items()
    }
