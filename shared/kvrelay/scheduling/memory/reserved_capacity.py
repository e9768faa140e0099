"""Capacity that admission leaves free for sequences that come later."""

from __future__ import annotations

from collections.abc import Hashable


class ReservedCapacity:
    """Running slots and blocks that are kept for sequences that come later, the one account of a scheduler: forks,
    samples and handoffs reserve here, each under keys of its own."""

    def __init__(self) -> None:
        self.num_slots = 0
        self.num_blocks = 0
        self._entries: dict[Hashable, tuple[int, int]] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def reserve(self, key: Hashable, num_slots: int, num_blocks: int) -> None:
        """Reserves capacity, in place of what was reserved under this key."""
        self.end(key)
        self._entries[key] = num_slots, num_blocks
        self.num_slots += num_slots
        self.num_blocks += num_blocks

    def end(self, key: Hashable) -> None:
        """Ends a reservation, if there is one under this key."""
        num_slots, num_blocks = self._entries.pop(key, (0, 0))
        self.num_slots -= num_slots
        self.num_blocks -= num_blocks
