"""How many blocks each sender may write into at a time.

A sender that writes one-sidedly keeps the blocks that were reserved for it until it has proven that no write is under
way. If it stops for good, it never does. The limit keeps such a sender from holding the whole pool.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.protocol.messages import PeerRef
from kvrelay.protocol.sequence_key import SequenceKey

SENDER_SHARE = 0.5
"""Share of the pool that the reservations of one sender may hold, beside its first."""


@dataclass(slots=True)
class _Held:
    num_reservations: int = 0
    num_blocks: int = 0


class SenderLimits:
    """Counts the blocks that are reserved for each sender. Quarantined blocks count until they are released."""

    def __init__(self, num_pool_blocks: int) -> None:
        self._limit = SENDER_SHARE * num_pool_blocks
        self._held: dict[PeerRef, _Held] = {}
        self._reservations: dict[SequenceKey, tuple[PeerRef, int]] = {}

    def __len__(self) -> int:
        return len(self._reservations)

    def allows(self, sender: PeerRef, num_blocks: int) -> bool:
        """Whether `num_blocks` more may be reserved for a sender. Its first reservation may have any size."""
        held = self._held.get(sender)
        return held is None or held.num_blocks + num_blocks <= self._limit

    def reserved(self, key: SequenceKey, sender: PeerRef, num_blocks: int) -> None:
        """The sender may write `num_blocks` blocks of this sequence from now on."""
        assert key not in self._reservations
        self._reservations[key] = sender, num_blocks
        held = self._held.setdefault(sender, _Held())
        held.num_reservations += 1
        held.num_blocks += num_blocks

    def released(self, key: SequenceKey) -> PeerRef | None:
        """The sequence's blocks are no longer written. Returns its sender; None if it had no reservation."""
        sender, num_blocks = self._reservations.pop(key, (None, 0))
        if sender is None:
            return None
        held = self._held[sender]
        held.num_reservations -= 1
        held.num_blocks -= num_blocks
        if not held.num_reservations:
            del self._held[sender]
        return sender
