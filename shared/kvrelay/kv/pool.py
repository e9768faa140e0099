"""The block pool: state and holds of each of a worker's blocks (Kwon et al., PagedAttention, SOSP 2023, section 4).

A block can have several holds at once, because sequences share prefixes, and of several kinds, because a running
sequence's block may also be in flight. Its state is the strongest kind of its holds, else `cached`, else `free`. The
numbers of blocks in each state add up to the number of blocks. Cached and held blocks share the pool: no part is set
aside for either, and the cache evicts when an allocation needs room (Zheng et al., SGLang, NeurIPS 2024, section 3).

Every operation checks all its blocks before it changes any, so an operation that raises has changed nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvrelay.kv.cache import BlockError, IntegrityError, OutOfBlocks
from kvrelay.kv.free_runs import FreeRuns

BlockIds = Sequence[int] | NDArray[np.int32]
"""Block ids, each at most once."""


class BlockState(StrEnum):
    """A block's state. The order is from weakest to strongest; the last five are kinds of hold."""

    FREE = "free"  # neither held nor cached
    CACHED = "cached"  # in the prefix cache, not held
    RUNNING = "running"  # a sequence reads it, or writes its next tokens into it
    COMPUTING = "computing"  # a prompt is being computed into it
    RESERVED = "reserved"  # granted to a handoff; the peer may write into it
    IN_FLIGHT = "in_flight"  # a transfer, or a planned step's copy to or from the host, reads it or writes into it
    QUARANTINED = "quarantined"  # its handoff is over, but a write may still land


_STATES = tuple(BlockState)
_FREE, _CACHED, _FIRST_HELD = 0, 1, 2

# A block's holds are one integer with a field per kind, the strongest kind highest: its bit length tells the state.
_FIELD_BITS = 32
_FIELD_MASK = (1 << _FIELD_BITS) - 1
_SHIFTS = {state: _FIELD_BITS * index for index, state in enumerate(_STATES[_FIRST_HELD:])}
_STATE_BY_BIT_LENGTH = (
    _FREE,
    *(_FIRST_HELD + bit // _FIELD_BITS for bit in range(_FIELD_BITS * len(_SHIFTS))),
)


class CacheHooks(Protocol):
    """What the pool asks of the cache that shares its blocks.

    Called in the middle of an operation: calls nothing back.
    """

    @property
    def num_evictable(self) -> int:
        """Cached blocks that can be evicted, one after the other."""
        ...

    def evict_blocks(self, num_blocks: int) -> list[int]:
        """Removes up to `num_blocks` blocks without holds from the cache; more if the cache evicts in larger units."""
        ...

    def pin(self, blocks: Sequence[int]) -> None:
        """Called when cached blocks got their first hold."""
        ...

    def unpin(self, blocks: Sequence[int]) -> None:
        """Called when cached blocks lost their last hold."""
        ...

    def check_integrity(self) -> None:
        """Recounts the cache. Raises IntegrityError."""
        ...


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens, all free at first."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 0 or block_size < 1:
            raise ValueError(f"no pool of {num_blocks} blocks of {block_size} tokens")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._holds = [0] * num_blocks
        self._cached = bytearray(num_blocks)  # 1: the attached cache has it
        self._state_counts = [num_blocks] + [0] * (len(_STATES) - 1)
        self._free_runs = FreeRuns(num_blocks)
        self._cache: CacheHooks | None = None

    def attach(self, cache: CacheHooks) -> None:
        """Lets a cache share the blocks. Raises ValueError when there is one already."""
        if self._cache is not None:
            raise ValueError("the pool has a cache already")
        self._cache = cache

    @property
    def num_free(self) -> int:
        """Blocks that are neither held nor cached."""
        return self._free_runs.num_free

    @property
    def num_evictable(self) -> int:
        """Cached blocks that an allocation can take."""
        return self._cache.num_evictable if self._cache is not None else 0

    @property
    def num_available(self) -> int:
        """Blocks that an allocation can have: free and evictable ones."""
        return self.num_free + self.num_evictable

    def counts(self) -> dict[BlockState, int]:
        """Returns the number of blocks in each state. The numbers add up to `num_blocks`. O(1)."""
        return dict(zip(_STATES, self._state_counts, strict=True))

    def state_of(self, block: int) -> BlockState:
        self._check_ids((block,))
        if holds := self._holds[block]:
            return _STATES[_STATE_BY_BIT_LENGTH[holds.bit_length()]]
        return BlockState.CACHED if self._cached[block] else BlockState.FREE

    def num_holds(self, block: int, state: BlockState | None = None) -> int:
        """Returns the number of holds on the block: all of them, or those of kind `state`."""
        self._check_ids((block,))
        holds = self._holds[block]
        if state is not None:
            return holds >> _shift(state) & _FIELD_MASK
        return sum(holds >> shift & _FIELD_MASK for shift in _SHIFTS.values())

    def is_held(self, block: int) -> bool:
        """Returns whether the block has a hold."""
        return bool(self._holds[block])

    def is_shared(self, block: int) -> bool:
        """Returns whether the block is cached or has more than one hold, so that it must not be overwritten."""
        return bool(self._cached[block]) or self.num_holds(block) > 1

    def allocate(self, num_blocks: int, state: BlockState, *, after: int | None = None) -> list[int]:
        """Takes free blocks, in runs of neighbours where there are any, and evicts from the cache what is missing.

        With `after` (a block that is not free, say a sequence's last) its free neighbours are taken first.
        Raises OutOfBlocks.
        """
        shift = _shift(state)
        if num_blocks < 0:
            raise ValueError(f"cannot allocate {num_blocks} blocks")
        if num_blocks > self._free_runs.num_free:
            blocks = self._take_evicting(num_blocks, after)
        else:
            blocks = self._take_free(num_blocks, after)
        self._hold_first(blocks, shift)
        return blocks

    def allocate_each(self, after: Sequence[int], state: BlockState) -> list[int]:
        """Allocates one block for each block of `after` (the last blocks of tables): the next block id if it is free.

        Raises OutOfBlocks. All or nothing.
        """
        shift = _shift(state)
        if len(after) > self._free_runs.num_free:
            taken = set(self._take_evicting(len(after), None))
            neighbours = taken.intersection(block + 1 for block in after)
            others = sorted(taken - neighbours, reverse=True)
            blocks = []
            for block in after:
                if block + 1 in neighbours:
                    neighbours.remove(block + 1)  # used once: several entries of `after` may be the same block
                    blocks.append(block + 1)
                else:
                    blocks.append(others.pop())
        else:
            blocks = [block for last in after for block in self._take_free(1, last)]
        self._hold_first(blocks, shift)
        return blocks

    def _hold_first(self, blocks: Sequence[int], shift: int) -> None:
        """Blocks that were taken get their first hold."""
        one = 1 << shift
        holds = self._holds
        for block in blocks:
            holds[block] = one
        self._state_counts[_FREE] -= len(blocks)
        self._state_counts[_STATE_BY_BIT_LENGTH[shift + 1]] += len(blocks)

    def _take_free(self, num_blocks: int, after: int | None) -> list[int]:
        free = self._free_runs
        blocks: list[int] = []
        if after is not None and self._is_used(after):
            blocks = free.take_at(after + 1, num_blocks)
        return blocks + free.take(num_blocks - len(blocks))

    def _take_evicting(self, num_blocks: int, after: int | None) -> list[int]:
        """Takes all free blocks, and evicts the rest."""
        if num_blocks > self.num_available:
            raise OutOfBlocks(num_blocks, self.num_available)
        free, cached = self._free_runs, self._cached
        assert self._cache is not None
        # Evicted blocks bypass the free runs: in a busy pool the cache holds all blocks that are not in use, and every
        # allocation evicts.
        evicted = self._cache.evict_blocks(num_blocks - free.num_free)
        for block in evicted:
            cached[block] = 0
        self._state_counts[_CACHED] -= len(evicted)
        self._state_counts[_FREE] += len(evicted)
        blocks = sorted(free.take(free.num_free) + evicted)  # neighbours beside each other
        first = bisect_right(blocks, after) if after is not None else 0
        blocks = blocks[first:] + blocks[:first]
        free.give_back(blocks[num_blocks:])
        return blocks[:num_blocks]

    def hold(self, blocks: BlockIds, state: BlockState) -> None:
        """Adds a hold to blocks that are held or cached. Raises BlockError for a free one."""
        ids = self._check_ids(blocks)
        befores = self._befores(ids)
        if 0 in befores:
            for block, before in zip(ids, befores, strict=True):
                if not before and not self._cached[block]:
                    raise BlockError(f"block {block} is free and cannot be held as {state}")
        self._change(ids, befores, 1 << _shift(state))
        if 0 in befores and self._cache is not None:
            self._cache.pin([block for block, before in zip(ids, befores, strict=True) if not before])

    def hold_or_allocate(self, blocks: BlockIds, state: BlockState) -> None:
        """Adds a hold to blocks in any state. Free blocks are allocated. O(free runs) if any is free."""
        _shift(state)
        ids = self._check_ids(blocks)
        free = [block for block in ids if not self._holds[block] and not self._cached[block]]
        if free:
            one = 1 << _shift(state)
            self._free_runs.take_named(free)
            for block in free:
                self._holds[block] = one
            self._state_counts[_FREE] -= len(free)
            self._state_counts[_STATE_BY_BIT_LENGTH[one.bit_length()]] += len(free)
        taken = set(free)
        self.hold([block for block in ids if block not in taken], state)

    def release(self, blocks: BlockIds, state: BlockState) -> None:
        """Drops one hold of each block; the last one leaves it cached if the cache has it, else free.

        Raises BlockError for a block that is not held as `state`.
        """
        ids = self._check_ids(blocks)
        befores = self._check_held(ids, state)
        one = 1 << _shift(state)
        self._change(ids, befores, -one)
        if one not in befores:
            return
        let_go = [block for block, before in zip(ids, befores, strict=True) if before == one]
        cached = self._cached
        unpinned = [block for block in let_go if cached[block]]
        if len(unpinned) < len(let_go):
            freed = [block for block in let_go if not cached[block]]
            self._state_counts[_CACHED] -= len(freed)
            self._state_counts[_FREE] += len(freed)
            self._free_runs.give_back(freed)
        if unpinned and self._cache is not None:
            self._cache.unpin(unpinned)

    def move(self, blocks: BlockIds, from_state: BlockState, to_state: BlockState) -> None:
        """Turns one hold of each block into another kind. Raises BlockError for a block not held as `from_state`."""
        ids = self._check_ids(blocks)
        befores = self._check_held(ids, from_state)
        self._change(ids, befores, (1 << _shift(to_state)) - (1 << _shift(from_state)))

    def check_all_held(self, blocks: BlockIds) -> None:
        """Raises BlockError unless each block has a hold."""
        ids = self._check_ids(blocks)
        befores = self._befores(ids)
        if 0 in befores:
            raise BlockError(f"block {ids[befores.index(0)]} is not held")

    def cache(self, blocks: Sequence[int]) -> None:
        """Called by the cache when it adds held blocks."""
        for block in blocks:
            self._cached[block] = 1

    def uncache(self, blocks: Sequence[int]) -> None:
        """Called by the cache when it removes blocks. Those without a hold become free."""
        holds, cached = self._holds, self._cached
        for block in blocks:
            cached[block] = 0
        freed = [block for block in blocks if not holds[block]]
        self._state_counts[_CACHED] -= len(freed)
        self._state_counts[_FREE] += len(freed)
        self._free_runs.give_back(freed)

    def is_cached(self, block: int) -> bool:
        """Returns whether the block is in the cache, held or not."""
        return bool(self._cached[block])

    def check_integrity(self) -> None:
        """Recounts everything from the holds, the cache and the free runs. O(num_blocks). Raises IntegrityError."""
        counts = [0] * len(_STATES)
        free = self._free_runs.check_integrity()
        for block, holds in enumerate(self._holds):
            if holds < 0 or holds.bit_length() >= len(_STATE_BY_BIT_LENGTH):
                raise IntegrityError(f"block {block}: impossible holds {holds:#x}")
            state = _STATE_BY_BIT_LENGTH[holds.bit_length()] or (_CACHED if self._cached[block] else _FREE)
            counts[state] += 1
            if (state == _FREE) != (block in free):
                raise IntegrityError(f"block {block} counts as {_STATES[state]}, the free runs say otherwise")
        if counts != self._state_counts:
            raise IntegrityError(f"states recounted as {counts}, kept as {self._state_counts}")
        if self._cache is not None:
            self._cache.check_integrity()
        elif any(self._cached):
            raise IntegrityError("blocks are cached, but there is no cache")

    def _is_used(self, block: int) -> bool:
        return 0 <= block < self.num_blocks and bool(self._holds[block] or self._cached[block])

    def _check_ids(self, blocks: BlockIds) -> Sequence[int]:
        ids: Sequence[int] = blocks.tolist() if isinstance(blocks, np.ndarray) else blocks
        if ids:
            if min(ids) < 0 or max(ids) >= self.num_blocks:
                raise BlockError(f"block ids from {min(ids)} to {max(ids)}, but the pool has {self.num_blocks}")
            if len(set(ids)) != len(ids):
                raise BlockError("a block is named twice in one operation")
        return ids

    def _befores(self, ids: Sequence[int]) -> list[int]:
        """The blocks' holds, before they change."""
        holds = self._holds
        return [holds[block] for block in ids]

    def _check_held(self, ids: Sequence[int], state: BlockState) -> list[int]:
        """Their holds, all of which have one of this kind."""
        befores = self._befores(ids)
        shift = _shift(state)
        for before in set(befores):  # few: blocks of one sequence are held alike
            if not before >> shift & _FIELD_MASK:
                raise BlockError(f"block {ids[befores.index(before)]} is not held as {state}")
        return befores

    def _change(self, ids: Sequence[int], befores: list[int], change: int) -> None:
        """Adds `change` to the holds of blocks and updates the counts of states. A block without holds counts as cached
        here, before and after: the callers correct the count if it is free."""
        holds = self._holds
        for block, before in zip(ids, befores, strict=True):
            holds[block] = before + change
        counts = self._state_counts
        for before in set(befores):
            num_blocks = befores.count(before)
            counts[_STATE_BY_BIT_LENGTH[before.bit_length()] or _CACHED] -= num_blocks
            counts[_STATE_BY_BIT_LENGTH[(before + change).bit_length()] or _CACHED] += num_blocks


def _shift(state: BlockState) -> int:
    """Returns the first bit of the state's field. Raises ValueError for `free` and `cached`, which are not holds."""
    if state not in _SHIFTS:
        raise ValueError(f"{state} is not a kind of hold")
    return _SHIFTS[state]
