"""Blocks that are copied before a write, because somebody else needs what is in them (copy-on-write; Kwon et al.,
PagedAttention, SOSP 2023, section 4.4).

1. NEEDED   the table names the target already; the source stays held, or whoever gets it next could overwrite it before
            it is copied.
2. PLANNED  part of the plan of the step that writes into the target. Not of an earlier one: who is in a step keeps its
            blocks until that has landed, anybody else may lose its target before the copy is made.
3. DONE     the step was executed: the source is let go of.

A sequence that loses its blocks before 2 takes its copies with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from kvrelay.engine.batch import BlockCopy
from kvrelay.kv.pool import BlockPool, BlockState
from kvrelay.kv.table import BlockTable, CopyInstruction, copy_on_write, finish_copy


class BlockCopies:
    """The copies of one pool that are not done yet. See the module's text."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._needed: dict[int, CopyInstruction] = {}  # by target
        self._planned: dict[int, CopyInstruction] = {}
        self._sources: Counter[int] = Counter()  # how often each is held for a copy alone

    def __len__(self) -> int:
        return len(self._needed) + len(self._planned)

    def must_copy(self, block: int) -> bool:
        """Whether somebody beside its one holder relies on a block's content; copies on their way do not count: they
        read it before the step writes."""
        return self._pool.is_cached(block) or self._pool.num_holds(block) - self._sources[block] > 1

    def origin(self, block: int) -> int:
        """Where the content of a block lies that a table names: elsewhere, as long as its copy is NEEDED."""
        copy = self._needed.get(block)
        return block if copy is None else copy.source

    def make_own(self, table: BlockTable, index: int, state: BlockState = BlockState.RUNNING) -> None:
        """Gives a table a block of its own in the place of a shared one, held as `state`. Raises OutOfBlocks."""
        copy = copy_on_write(self._pool, table, index, state)
        assert copy is not None
        self._needed[copy.target] = copy
        self._sources[copy.source] += 1

    def drop(self, targets: Iterable[int]) -> None:
        """These blocks are let go of: what was to be copied into them need not be."""
        if self._needed:
            for target in targets:
                copy = self._needed.pop(target, None)
                if copy is not None:
                    self._finish(copy)

    def plan(self, targets: Iterable[int]) -> tuple[BlockCopy, ...]:
        """What the next step copies; `targets`: blocks that it writes into, whether they need it or not."""
        if not self._needed:
            return ()
        planned = {target: copy for target in targets if (copy := self._needed.pop(target, None)) is not None}
        self._planned |= planned
        return tuple(BlockCopy(copy.source, copy.target) for copy in planned.values())

    def cancelled(self, copies: Sequence[BlockCopy]) -> None:
        """The step with these copies is not executed: the next one makes them."""
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
