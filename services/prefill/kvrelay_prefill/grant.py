"""A reservation that decode granted, as prefill keeps it: which of its blocks were pushed, are in flight, and are asked
for again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvrelay.protocol.messages import PeerRef
from kvrelay.transfer.base import BlockCopy


@dataclass(slots=True)
class Grant:
    """Blocks are named by their index in the prompt; `slots` are decode's for those from `first_block` on."""

    decode: PeerRef
    reservation: str
    first_block: int
    slots: list[int]
    transport: str
    endpoint: dict[str, str]
    num_pushed: int = 0  # blocks from first_block on that were given to the transport
    in_flight: set[int] = field(default_factory=set)
    resend: int = 0  # the last question for blocks
    answered: int = 0
    asked_for: set[int] = field(default_factory=set)  # by it, and not known to have left since
    again: set[int] = field(default_factory=set)  # came corrupted while still in flight: to be pushed once more

    def take_ready(self, num_complete: int) -> list[int]:
        """Those of the first `num_complete` blocks that were not pushed so far, which counts as done now."""
        start = self.first_block + self.num_pushed
        ready = list(range(start, min(num_complete, self.first_block + len(self.slots))))
        self.num_pushed += len(ready)
        return ready

    def copies(self, indices: Iterable[int], blocks: Sequence[int]) -> tuple[BlockCopy, ...]:
        """Of these blocks of a sequence's, which are in flight from now on."""
        made = tuple(BlockCopy(index, blocks[index], self.slots[index - self.first_block]) for index in indices)
        self.in_flight.update(copy.index for copy in made)
        return made

    def left(self, indices: Iterable[int]) -> list[int]:
        """These are not in flight any more. Returns those that are to be pushed once more."""
        left = set(indices)
        again = left & self.again
        self.again -= again
        self.in_flight -= left
        self.asked_for -= left - again
        return sorted(again)

    def ask(self, indices: Iterable[int], number: int, *, corrupted: bool) -> list[int]:
        """Question `number` for blocks that did not come, or came corrupted. Returns those to push now.

        What is in flight is not pushed beside itself: the network is slow, it did not lose it.
        """
        last = self.first_block + self.num_pushed
        missing = [index for index in indices if self.first_block <= index < last]
        self.resend = max(self.resend, number)
        self.asked_for.update(missing)
        if corrupted:
            self.again.update(self.in_flight.intersection(missing))
        return [index for index in missing if index not in self.in_flight]

    def take_answer(self) -> bool:
        """Whether the last question can be answered, for the first time: all that was asked for has left."""
        if self.asked_for or self.answered == self.resend:
            return False
        self.answered = self.resend
        return True
