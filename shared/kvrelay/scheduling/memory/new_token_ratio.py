"""How much room admission leaves for the tokens that running sequences will draw (SGLang's new-token ratio).

Too little, and sequences are preempted later; too much, and blocks lie idle. So the estimate starts careful, relaxes
with every step that goes well, and after a retraction becomes what the running sequences have really drawn.
"""

from __future__ import annotations

from collections.abc import Collection

from kvrelay.kv.table import blocks_for
from kvrelay.scheduling.memory.block_manager import BlockManager
from kvrelay.scheduling.sequence import Sequence

FLOOR_SHARE = 0.14  # of the initial ratio
RELAX_STEPS = 600  # from the initial ratio to the floor
RETRACTION_HORIZON = 20  # tokens that each sequence shall be able to draw after a retraction


class NewTokenRatio:
    """The share of their remaining `max_tokens` that running sequences are expected to draw; off if it starts at 0."""

    def __init__(self, initial: float) -> None:
        self.initial = initial
        self.floor = initial * FLOOR_SHARE
        self.value = initial

    def relax(self) -> None:
        """A step went well."""
        if self.value > self.floor:
            self.value = max(self.floor, self.value - (self.initial - self.floor) / RELAX_STEPS)

    def retracted(self, running: Collection[Sequence]) -> None:
        """Somebody lost its blocks: the estimate becomes what these have drawn and the horizon, never less than now."""
        most = sum(sequence.sampling.max_tokens for sequence in running)
        if self.initial and most:
            drawn = sum(sequence.num_output + RETRACTION_HORIZON for sequence in running)
            self.value = max(self.value, min(1.0, drawn / most))

    def idle(self) -> None:
        """Nothing runs: what was learnt is about sequences that are gone."""
        self.value = self.initial

    def headroom(self, running: Collection[Sequence], blocks: BlockManager) -> int:
        """Blocks that the running sequences are expected to take beyond those they have. O(running)."""
        if not self.value:
            return 0
        num_tokens = 0
        for sequence in running:
            expected = sequence.num_tokens + int(self.value * blocks.remaining_output(sequence))
            num_tokens += max(0, expected - sequence.table.capacity_tokens)
        return blocks_for(num_tokens, blocks.pool.block_size)
