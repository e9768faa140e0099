"""How much of the pool each sender may write into, counted as reservations come and go. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.protocol.messages import PeerRef
from kvrelay.protocol.sequence_key import SequenceKey

PEER_SHARE = 0.5
"""Of the pool: what one sender's one-sided reservations may hold at a time, beside its first."""


@dataclass(slots=True)
class _Held:
    num_reservations: int = 0
    num_blocks: int = 0


class Shares:
    """A sender that is stopped for good keeps what it may write into: that must not be the whole pool."""

    def __init__(self, num_pool_blocks: int) -> None:
        self._limit = PEER_SHARE * num_pool_blocks
        self._held: dict[PeerRef, _Held] = {}
        self._reservations: dict[SequenceKey, tuple[PeerRef, int]] = {}

    def __len__(self) -> int:
        return len(self._reservations)

    def allows(self, peer: PeerRef, num_blocks: int) -> bool:
        """Whether it may get so many more. Its first reservation is always fine."""
        held = self._held.get(peer)
        return held is None or held.num_blocks + num_blocks <= self._limit

    def granted(self, key: SequenceKey, peer: PeerRef, num_blocks: int) -> None:
        """From now on it may write so many blocks of this sequence."""
        assert key not in self._reservations
        self._reservations[key] = peer, num_blocks
        held = self._held.setdefault(peer, _Held())
        held.num_reservations += 1
        held.num_blocks += num_blocks

    def settled(self, key: SequenceKey) -> None:
        """Nothing is written for this sequence any more. One that is not known is fine."""
        peer, num_blocks = self._reservations.pop(key, (None, 0))
        if peer is None:
            return
        held = self._held[peer]
        held.num_reservations -= 1
        held.num_blocks -= num_blocks
        if not held.num_reservations:
            del self._held[peer]
