"""A prefill worker's pushes: the transports to offer to each decode worker, and the blocks in flight."""

from __future__ import annotations

from collections.abc import Iterable

from kvrelay.handoff.transports.base import Pushed, SenderEvent
from kvrelay.protocol.messages import PeerRef
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.worker.load_report import PushClock

TRY_AGAIN_AFTER_S = 60.0


class TransportOffers:
    """`names`: this worker's transports, best first."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = list(names)
        self._failed: dict[tuple[PeerRef, str], float] = {}

    def failed(self, peer: PeerRef, name: str, now: float) -> None:
        """A push to this peer did not arrive."""
        self._failed = {pair: at for pair, at in self._failed.items() if now - at < TRY_AGAIN_AFTER_S}
        self._failed[peer, name] = now

    def to(self, peer: PeerRef, now: float) -> list[str]:
        """Those that did not fail with this peer lately, best first; all of them if none is left."""
        long_ago = now - TRY_AGAIN_AFTER_S
        left = [name for name in self._names if self._failed.get((peer, name), long_ago) <= long_ago]
        return left or list(self._names)


class InFlightPushes:
    """The pushes of one worker, by reservation. Times are seconds of the caller's clock."""

    def __init__(self) -> None:
        self._keys: dict[str, SequenceKey] = {}
        self._num_open: dict[str, int] = {}  # blocks in flight
        self._clock = PushClock()

    def register(self, reservation: str, key: SequenceKey) -> None:
        """Maps the reservation to its sequence until `forget`."""
        self._keys[reservation] = key

    def forget(self, reservation: str) -> None:
        """Removes the reservation from `key_of`. Its blocks in flight still count."""
        self._keys.pop(reservation, None)

    def key_of(self, reservation: str) -> SequenceKey | None:
        """Returns the sequence of the reservation; None for an unknown or forgotten one."""
        return self._keys.get(reservation)

    def started(self, reservation: str, num_blocks: int, now: float) -> None:
        """The transport got `num_blocks` blocks."""
        self._num_open[reservation] = self._num_open.get(reservation, 0) + num_blocks
        self._clock.started(num_blocks, now)

    def ended(self, event: SenderEvent, now: float) -> None:
        """Some blocks have left, or the reservation has ended, which ends all of its blocks."""
        num_open = self._num_open.pop(event.reservation, 0)
        num_ended = min(num_open, len(event.blocks)) if isinstance(event, Pushed) else num_open
        if num_ended < num_open:
            self._num_open[event.reservation] = num_open - num_ended
        self._clock.ended(num_ended, now)

    def has_open(self, reservation: str) -> bool:
        """Returns whether blocks of the reservation are in flight."""
        return reservation in self._num_open

    def busy_s(self, now: float) -> float:
        """Seconds during which any block was in flight, since the start."""
        return self._clock.busy_s(now)
