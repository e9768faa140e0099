"""Blocks whose reservation has ended but which the sender may still write into. Time and proofs are passed in.

States of an entry:

1. AWAITED  the sender is alive and will send Drained.
2. LOST     the sender is silent, or has lost its state. Silence does not prove that it has ended: a stopped process
            resumes in the middle of a copy. Released is sent again, less and less often, so that a sender that resumes
            answers. If the sender runs on this machine, its processes are also watched.
3. PROVEN   the sender has sent Drained, or each of its processes has ended. A newer incarnation that replaced the
            sender proves the end of a process that cannot be seen from here (a worker id, and a rank's number in it,
            belong to one process at a time). If a process can be seen, only its end counts: it may be stopped while a
            second process uses its id. After `SETTLE_TICKS`, time for data that sockets still hold to arrive, the
            blocks are free.

Without a proof the blocks stay in quarantine as long as this process runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Set
from dataclasses import dataclass
from enum import StrEnum

from kvrelay.protocol.messages import PeerRef
from kvrelay.protocol.sequence_key import SequenceKey

SETTLE_TICKS = 5
FIRST_ASK_S = 1.0
ASK_AT_MOST_EVERY_S = 60.0
OVERDUE_AFTER_S = 10.0
"""A sender that lives and has sent no Drained for this long counts as stalled."""


class QuarantineState(StrEnum):
    AWAITED = "awaited"
    LOST = "lost"
    PROVEN = "proven"


@dataclass(slots=True, eq=False)
class QuarantinedReservation:
    peer: PeerRef
    processes: frozenset[str]  # not proven to have ended
    since: float
    state: QuarantineState = QuarantineState.AWAITED
    ticks_left: int = 0  # once PROVEN
    ask_at: float = math.inf
    ask_again_s: float = FIRST_ASK_S


@dataclass(frozen=True, slots=True)
class Due:
    """The result of a tick: `safe` sequences, whose blocks may be freed, and those whose sender to `ask` again."""

    safe: tuple[SequenceKey, ...]
    ask: tuple[SequenceKey, ...]


class Quarantine:
    """`has_ended` tells of a process identity whether that process has provably ended. `can_be_seen` tells whether its
    end would be known. An empty identity is that of an unknown process."""

    def __init__(self, has_ended: Callable[[str], bool], can_be_seen: Callable[[str], bool]) -> None:
        self._has_ended = has_ended
        self._can_be_seen = can_be_seen
        self._entries: dict[SequenceKey, QuarantinedReservation] = {}

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_lost(self) -> int:
        """Reservations whose sender is silent and not proven to have stopped."""
        return sum(entry.state is QuarantineState.LOST for entry in self._entries.values())

    def overdue(self, now: float) -> frozenset[SequenceKey]:
        """Sequences whose blocks may stay here for ever: their sender is lost, or has stalled."""
        return frozenset(
            key
            for key, entry in self._entries.items()
            if entry.state is QuarantineState.LOST
            or (entry.state is QuarantineState.AWAITED and now - entry.since > OVERDUE_AFTER_S)
        )

    def add(self, key: SequenceKey, peer: PeerRef, processes: Collection[str], now: float) -> None:
        """A reservation ended while `peer` may still write. `processes`: the identities of the sender's processes, at
        least one."""
        self._entries[key] = QuarantinedReservation(peer, frozenset(processes), now)

    def drained(self, key: SequenceKey) -> None:
        """The sender says that no write is in flight and none will follow."""
        self._prove(self._entries[key])

    def lost(self, peer: PeerRef, now: float, *, replaced: bool) -> None:
        """The link to a sender is lost. `replaced`: a newer incarnation of the sender has connected."""
        for entry in self._entries.values():
            if entry.peer != peer:
                continue
            if entry.state is QuarantineState.AWAITED:
                entry.state = QuarantineState.LOST
                entry.ask_at = now + entry.ask_again_s
            if replaced:
                self._ended(entry, {process for process in entry.processes if not self._can_be_seen(process)})

    def tick(self, now: float) -> Due:
        """Call this several times a second. Forgets the sequences that it returns as `safe`."""
        lost = {
            process
            for entry in self._entries.values()
            if entry.state is QuarantineState.LOST
            for process in entry.processes
        }
        ended = {process for process in lost if self._has_ended(process)}
        safe, ask = [], []
        for key, entry in list(self._entries.items()):
            if entry.state is QuarantineState.LOST:
                self._ended(entry, ended)
            if entry.state is QuarantineState.PROVEN:
                entry.ticks_left -= 1
                if entry.ticks_left <= 0:
                    del self._entries[key]
                    safe.append(key)
            elif now >= entry.ask_at:
                entry.ask_again_s = min(2 * entry.ask_again_s, ASK_AT_MOST_EVERY_S)
                entry.ask_at = now + entry.ask_again_s
                ask.append(key)
        return Due(tuple(safe), tuple(ask))

    def _ended(self, entry: QuarantinedReservation, processes: Set[str]) -> None:
        """These processes of a lost sender will write no more."""
        entry.processes -= processes
        if not entry.processes:
            self._prove(entry)

    @staticmethod
    def _prove(entry: QuarantinedReservation) -> None:
        if entry.state is not QuarantineState.PROVEN:
            entry.state = QuarantineState.PROVEN
            entry.ticks_left = SETTLE_TICKS
