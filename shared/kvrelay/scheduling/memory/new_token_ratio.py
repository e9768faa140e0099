"""Blocks that admission leaves free for the tokens that running sequences will sample (SGLang's new-token ratio).

If the ratio leaves too few blocks, sequences are preempted later; if it leaves too many, blocks are idle. So it starts
high, falls with every step, and is raised to the observed output lengths after a preemption.
"""

from __future__ import annotations

from collections.abc import Collection

from kvrelay.kv.table import blocks_for
from kvrelay.scheduling.memory.block_manager import BlockManager
from kvrelay.scheduling.sequence import Sequence

FLOOR_SHARE = 0.14  # the lowest ratio, as a share of the initial one
RELAX_STEPS = 600  # from the initial ratio to the floor
RETRACTION_HORIZON = 20  # margin after a preemption, in tokens of each sequence


class NewTokenRatio:
    """The share of their remaining `max_tokens` that running sequences are expected to sample. Off if it starts at
    0."""

    def __init__(self, initial: float) -> None:
        self.initial = initial
        self.floor = initial * FLOOR_SHARE
        self.value = initial

    def relax(self) -> None:
        """A step succeeded: lowers the ratio a little."""
        if self.value > self.floor:
            self.value = max(self.floor, self.value - (self.initial - self.floor) / RELAX_STEPS)

    def retracted(self, running: Collection[Sequence]) -> None:
        """A sequence was preempted: raises the ratio to the observed output length plus a margin. Never lowers it."""
        most = sum(sequence.sampling.max_tokens for sequence in running)
        if self.initial and most:
            drawn = sum(sequence.num_output + RETRACTION_HORIZON for sequence in running)
            self.value = max(self.value, min(1.0, drawn / most))

    def idle(self) -> None:
        """No sequence runs: resets the ratio, because it was learnt from sequences that have ended."""
        self.value = self.initial

    def headroom(self, running: Collection[Sequence], blocks: BlockManager) -> int:
        """Returns the number of blocks that the running sequences are expected to need beyond those they have.
        O(running)."""
        if not self.value:
            return 0
        num_tokens = 0
        for sequence in running:
            expected = sequence.num_tokens + int(self.value * blocks.remaining_output(sequence))
            num_tokens += max(0, expected - sequence.table.capacity_tokens)
        return blocks_for(num_tokens, blocks.pool.block_size)
