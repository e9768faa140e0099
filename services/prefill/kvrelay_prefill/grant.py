"""A granted reservation on prefill: which of its blocks were pushed, are in flight, or were requested again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvrelay.protocol.messages import PeerRef
from kvrelay.transfer.base import BlockPush


@dataclass(slots=True)
class Grant:
    """Blocks are named by their index in the prompt. `slots` are decode's slots of the blocks from `first_block` on."""

    decode: PeerRef
    reservation: str
    first_block: int
    slots: list[int]
    transport: str
    endpoint: dict[str, str]
    rank_endpoints: tuple[dict[str, str], ...] = ()  # decode's ranks from 1 on
    num_stages: int = 1  # decode's pipeline stages
    num_pushed: int = 0  # blocks from first_block on that the transport has got
    in_flight: set[int] = field(default_factory=set)
    resend: int = 0  # the number of the last resend request
    answered: int = 0
    requested: set[int] = field(default_factory=set)  # blocks of the last resend request that have not left yet
    # Blocks corrupted while still in flight: pushed once more when they have left.
    again: set[int] = field(default_factory=set)

    def take_ready(self, num_complete: int) -> list[int]:
        """Returns the blocks below `num_complete` that were not pushed yet, and counts them as pushed."""
        start = self.first_block + self.num_pushed
        ready = list(range(start, min(num_complete, self.first_block + len(self.slots))))
        self.num_pushed += len(ready)
        return ready

    def copies(self, indices: Iterable[int], blocks: Sequence[int]) -> tuple[BlockPush, ...]:
        """Returns the copies to push for these blocks of the sequence, and counts them as in flight."""
        made = tuple(BlockPush(index, blocks[index], self.slots[index - self.first_block]) for index in indices)
        self.in_flight.update(copy.index for copy in made)
        return made

    def note_left(self, indices: Iterable[int]) -> list[int]:
        """These blocks have left. Returns those that must be pushed once more."""
        left = set(indices)
        again = left & self.again
        self.again -= again
        self.in_flight -= left
        self.requested -= left - again
        return sorted(again)

    def request_resend(self, indices: Iterable[int], number: int, *, corrupted: bool) -> list[int]:
        """Records resend request `number` for missing or corrupted blocks. Returns the blocks to push now.

        Blocks in flight are not pushed a second time: the network is slow and has not lost them.
        """
        last = self.first_block + self.num_pushed
        missing = [index for index in indices if self.first_block <= index < last]
        self.resend = max(self.resend, number)
        self.requested.update(missing)
        if corrupted:
            self.again.update(self.in_flight.intersection(missing))
        return [index for index in missing if index not in self.in_flight]

    def take_resend_answer(self) -> bool:
        """Returns True once for each resend request, when all requested blocks have left."""
        if self.requested or self.answered == self.resend:
            return False
        self.answered = self.resend
        return True
