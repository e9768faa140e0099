"""Copy-on-write: blocks are copied before a write if others need their content (Kwon et al., PagedAttention, SOSP 2023,
section 4.4).

1. NEEDED   the table has the target already. The source stays held: otherwise it could be allocated and overwritten
            before it is copied.
2. PLANNED  the copy is part of the plan of the step that writes into the target, and of no earlier step: a sequence in
            a step keeps its blocks until the step has ended, but any other may lose its target before the copy is made.
3. DONE     the step was executed, and the hold on the source is released.

If a sequence loses its blocks before 2, its copies are dropped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from kvrelay.kv.pool import BlockPool, BlockState
from kvrelay.kv.table import BlockTable, CopyInstruction, copy_on_write, finish_copy
from kvrelay.step.batch import BlockCopy


class BlockCopies:
    """The copies of one pool that are not done yet."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._needed: dict[int, CopyInstruction] = {}  # key: target block
        self._planned: dict[int, CopyInstruction] = {}
        self._sources: Counter[int] = Counter()  # number of holds of each block that are for copies only

    def __len__(self) -> int:
        return len(self._needed) + len(self._planned)

    def must_copy(self, block: int) -> bool:
        """Returns whether the block is cached or held by more than one sequence. Holds of copies that are under way do
        not count, because those copies read the block before the step writes it."""
        return self._pool.is_cached(block) or self._pool.num_holds(block) - self._sources[block] > 1

    def origin(self, block: int) -> int:
        """Returns the block that has the content of a table's block: its source as long as the copy is NEEDED."""
        copy = self._needed.get(block)
        return block if copy is None else copy.source

    def make_own(self, table: BlockTable, index: int, state: BlockState = BlockState.RUNNING) -> None:
        """Replaces a shared block of a table by a new one, held as `state`. Raises OutOfBlocks."""
        copy = copy_on_write(self._pool, table, index, state)
        assert copy is not None
        self._add(copy)

    def add(self, source: int, target: int, state: BlockState) -> None:
        """Has a block copied into a new one. Both are held as `state`, the source for this copy only."""
        self._add(CopyInstruction(source, target, state))

    def _add(self, copy: CopyInstruction) -> None:
        self._needed[copy.target] = copy
        self._sources[copy.source] += 1

    def drop(self, targets: Iterable[int]) -> None:
        """Drops the copies into these blocks, which are released."""
        if self._needed:
            for target in targets:
                copy = self._needed.pop(target, None)
                if copy is not None:
                    self._finish(copy)

    def plan(self, targets: Iterable[int]) -> tuple[BlockCopy, ...]:
        """Returns the copies that the next step makes. `targets`: all blocks that it writes."""
        if not self._needed:
            return ()
        planned = {target: copy for target in targets if (copy := self._needed.pop(target, None)) is not None}
        self._planned |= planned
        return tuple(BlockCopy(copy.source, copy.target) for copy in planned.values())

    def cancelled(self, copies: Sequence[BlockCopy]) -> None:
        """The step with these copies does not run: the next step makes them."""
        for copy in copies:
            self._needed[copy.target] = self._planned.pop(copy.target)

    def done(self, copies: Sequence[BlockCopy]) -> None:
        """The step with these copies was executed."""
        for copy in copies:
            self._finish(self._planned.pop(copy.target))

    def _finish(self, copy: CopyInstruction) -> None:
        self._sources[copy.source] -= 1
        if not self._sources[copy.source]:
            del self._sources[copy.source]
        finish_copy(self._pool, copy)
