"""Slots that a sender may still write into although their reservation is given up. Pure: time and proofs are passed in.

States of an entry:

1. AWAITED  the sender is alive and owes its Drained.
2. LOST     the sender fell silent, or forgot us. Silence is no proof of death: a stopped process wakes up in the middle
            of a copy. It is told Released again and again, less and less often, so that one that wakes up answers; and
            its process is looked for, where it ran on this machine.
3. PROVEN   it drained, its process has ended, or a newer start of it took its place where its process cannot be seen
            from here (a worker's id belongs to one process at a time). Where it can be seen, only its end counts: it
            may have been stopped, and a second one started under its name. What sockets still held of it gets
            `SETTLE_TICKS` to come in. Then the slots are free.

Without a proof they stay here as long as this process lives. How many that can be is bounded, see `shares.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvrelay.protocol.messages import PeerRef
from kvrelay.protocol.sequence_key import SequenceKey

SETTLE_TICKS = 5
FIRST_ASK_S = 1.0
ASK_AT_MOST_EVERY_S = 60.0


@dataclass(slots=True, eq=False)
class _Entry:
    peer: PeerRef
    process: str
    lost: bool = False
    ticks_left: int | None = None  # set once proven
    ask_at: float = 0.0
    ask_again_s: float = FIRST_ASK_S


@dataclass(frozen=True, slots=True)
class Due:
    """What a tick brought: slots that are safe, and senders to be told Released again."""

    safe: tuple[SequenceKey, ...]
    ask: tuple[SequenceKey, ...]


class Quarantine:
    """See the module's text. `has_ended` says of a process's identity whether it provably is no more, `can_be_seen`
    whether that could be known."""

    def __init__(self, has_ended: Callable[[str], bool], can_be_seen: Callable[[str], bool]) -> None:
        self._has_ended = has_ended
        self._can_be_seen = can_be_seen
        self._entries: dict[SequenceKey, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_lost(self) -> int:
        """Reservations whose sender fell silent, without a proof so far."""
        return sum(entry.lost and entry.ticks_left is None for entry in self._entries.values())

    def add(self, key: SequenceKey, peer: PeerRef, process: str) -> None:
        """A reservation was given up."""
        self._entries[key] = _Entry(peer, process)

    def drained(self, key: SequenceKey) -> None:
        """Its sender says that no write is or will be in flight."""
        self._prove(self._entries[key])

    def lost(self, peer: PeerRef, now: float, *, replaced: bool) -> None:
        """The link to this sender is gone; `replaced`: a newer start of it is there."""
        for entry in self._entries.values():
            if entry.peer != peer:
                continue
            if replaced and not self._can_be_seen(entry.process):
                self._prove(entry)
            elif not entry.lost:
                entry.lost = True
                entry.ask_at = now + entry.ask_again_s

    def tick(self, now: float) -> Due:
        """To be called several times a second. What is `safe` is forgotten."""
        ended = {
            process
            for process in {entry.process for entry in self._entries.values() if entry.lost}
            if self._has_ended(process)
        }
        safe, ask = [], []
        for key, entry in list(self._entries.items()):
            if entry.lost and entry.process in ended:
                self._prove(entry)
            if entry.ticks_left is not None:
                entry.ticks_left -= 1
                if entry.ticks_left <= 0:
                    del self._entries[key]
                    safe.append(key)
            elif entry.lost and now >= entry.ask_at:
                entry.ask_again_s = min(2 * entry.ask_again_s, ASK_AT_MOST_EVERY_S)
                entry.ask_at = now + entry.ask_again_s
                ask.append(key)
        return Due(tuple(safe), tuple(ask))

    @staticmethod
    def _prove(entry: _Entry) -> None:
        if entry.ticks_left is None:
            entry.ticks_left = SETTLE_TICKS
