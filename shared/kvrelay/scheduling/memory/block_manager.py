"""Blocks for sequences: admission with the cached prefix, growth, publication and release.

The managers differ in the number of tokens that a sequence gets blocks for at admission. From then on all give blocks
as tokens come. `slot_use` measures the waste of each (Kwon et al., SOSP 2023, figure 2). A tail is the part of a scored
prompt behind its last full block; others with the same one get a copy.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from kvrelay.kv.ablations import NullCache
from kvrelay.kv.hashing import BlockHash, num_in_common
from kvrelay.kv.pool import BlockPool, BlockState
from kvrelay.kv.prefix_cache import PrefixCache
from kvrelay.kv.session_blocks import SessionBlocks
from kvrelay.kv.table import blocks_for
from kvrelay.scheduling.memory.copy_on_write import BlockCopies
from kvrelay.scheduling.memory.prefixes_in_progress import BlockTails
from kvrelay.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class SlotUse:
    """Token slots in the blocks of sequences. `committed`: slots with computed KV. A shared slot counts once per
    sequence."""

    allocated: int
    committed: int

    @property
    def wasted(self) -> int:
        """Number of slots that are allocated and empty."""
        return self.allocated - self.committed


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


class BlockManager:
    """Gives a sequence the blocks of its whole prompt at admission, and one at a time from then on."""

    def __init__(self, pool: BlockPool, cache: PrefixCache, max_model_len: int) -> None:
        self.pool = pool
        self.cache = cache
        self.max_model_len = max_model_len
        self.copies = BlockCopies(pool)
        self.capacity = ReservedCapacity()
        self.withheld: frozenset[int] = frozenset()
        """Blocks that a silent sender may still write into: they may never be released."""
        # Blocks that steps in flight read and that are in no table, each with the number of these steps.
        self._replaced: list[tuple[int, list[int]]] = []
        self._num_uncommitted = 0
        self._sessions = SessionBlocks(most_blocks=2 * pool.num_blocks)
        self.tails = BlockTails(pool, cache, self.copies, self._sessions)
        self.shares_prefixes = not isinstance(cache, NullCache)

    @property
    def num_available(self) -> int:
        """Free and evictable blocks."""
        return self.pool.num_available

    @property
    def num_usable(self) -> int:
        """The pool's blocks without the withheld ones."""
        return self.pool.num_blocks - len(self.withheld)

    def may_ever_fit(self, sequence: Sequence) -> bool:
        """Returns whether a waiting sequence could be admitted if no other sequence held a block, except for the
        withheld ones. Those of its cached prefix are no loss, because it can share them."""
        num_tokens = sequence.num_tokens
        if sequence.remote is None:
            num_tokens = self._num_at_admission(sequence, num_tokens)
        num_blocks = blocks_for(num_tokens, self.pool.block_size)
        num_blocks += sequence.num_fork_blocks
        if num_blocks <= self.num_usable:
            return True
        return num_blocks - len(self.withheld.intersection(self.cached_prefix(sequence))) <= self.num_usable

    def cached_prefix(self, sequence: Sequence) -> list[int]:
        """Returns the blocks of the longest cached prefix that leaves at least one token to compute, because logits
        need one."""
        return self.cache.match(sequence.block_hashes(self._num_reusable(sequence)))

    def num_cached_blocks(self, sequence: Sequence) -> int:
        """Returns the number of blocks that `cached_prefix` would find. Does not count as a use."""
        return self.first_missing(sequence)[0]

    def first_missing(self, sequence: Sequence) -> tuple[int, BlockHash | None]:
        """The number of cached blocks, and the hash of the next one that could be there, which may be the sequence's
        tail; not a use. O(log blocks)."""
        hashes = sequence.block_hashes(self._num_reusable(sequence))
        num_cached = self.cache.peek(hashes)
        if num_cached < len(hashes):
            return num_cached, hashes[num_cached]
        tail = self.tails.usable(sequence)
        return num_cached, None if tail is None or self.tails.is_cached(tail) else tail

    def num_cached_tokens(self, sequence: Sequence) -> int:
        """Returns the number of tokens that an admission would find, with its tail. Does not count as a use."""
        num_cached, missing = self.first_missing(sequence)
        if missing is None and self.tails.usable(sequence) is not None:
            return self.tails.end_of(sequence)
        return num_cached * self.pool.block_size

    def first_stop(self, sequence: Sequence, position: int) -> int:
        """Returns where the first chunks end of a sequence that is admitted with `position` tokens computed."""
        if self.tails.to_compute(sequence, position) is not None:
            return self.tails.end_of(sequence)
        return sequence.num_tokens - sequence.num_unneeded

    def num_before_stop(self, sequence: Sequence) -> int:
        """Returns the number of tokens that the next chunks may compute: up to the end of its tail if it computes that
        for others, and what follows once that step is committed."""
        end = self.tails.computing.get(sequence)
        return sequence.num_remaining if end is None else end - sequence.next_position

    def num_missing(self, sequence: Sequence, num_computed: int) -> int:
        """Returns the least number of blocks that `readmit` takes. Does not count as a use. O(log blocks)."""
        size = self.pool.block_size
        return blocks_for(num_computed, size) - self.cache.peek(sequence.block_hashes(num_computed // size))

    def num_at_admission(self, sequence: Sequence) -> int:
        """Returns the number of blocks for admission and the next token, cached ones included."""
        num_tokens = self._num_at_admission(sequence, sequence.num_tokens)
        num_tokens = max(num_tokens, min(sequence.num_tokens + 1, self.max_model_len))
        return blocks_for(num_tokens, self.pool.block_size)

    def num_own(self, sequence: Sequence, other: Sequence) -> int:
        """Returns the blocks of `num_at_admission` that the sequence will not share with `other` once that is
        computed."""
        return self.num_at_admission(sequence) - self.num_in_common(sequence, other)

    def num_in_common(self, sequence: Sequence, other: Sequence) -> int:
        """Returns the number of blocks of `other` that the sequence will share once they are computed. O(log
        blocks)."""
        if not self.shares_prefixes:
            return 0
        most = min(self._num_reusable(sequence), other.num_full_blocks)
        return num_in_common([sequence.block_hashes(most), other.block_hashes(most)])

    def num_shared(self, sequence: Sequence) -> int:
        """Returns the number of its first full blocks that are cached and that other sequences hold too. A sequence
        that holds a block holds those before it, so this bisects."""
        pool, table = self.pool, sequence.table.ids
        low, high = 0, sequence.num_computed // pool.block_size
        while low < high:
            middle = (low + high) // 2
            block = int(table[middle])
            if pool.is_cached(block) and pool.num_holds(block) > 1:
                low = middle + 1
            else:
                high = middle
        return low

    def _num_reusable(self, sequence: Sequence) -> int:
        num_blocks = blocks_for(sequence.num_tokens, self.pool.block_size) - 1
        if sequence.sampling.prompt_logprobs is not None:
            # The logits of the position before the first scored token are needed, and those of all that follow.
            num_blocks = min(num_blocks, (sequence.sampling.logprob_start_len - 1) // self.pool.block_size)
        return num_blocks

    # -- admission ----------------------------------------------------------------------------------------------------

    def admit(self, sequence: Sequence, state: BlockState, *, num_next: int | None = None, headroom: int = 0) -> bool:
        """Gives a sequence its first blocks; what the cache holds counts as computed. All or nothing.

        `num_next`: tokens that are cached or computed in the next step; the manager decides how much room it makes
        beyond. Without, there is room for all known tokens and no more (a handoff's slots). `headroom`: blocks that
        must be available besides.
        """
        num_tokens = sequence.num_tokens if num_next is None else self._num_at_admission(sequence, num_next)
        tail = self.tails.usable(sequence)
        return self._take(sequence, state, self._num_reusable(sequence), num_tokens, headroom, tail)

    def readmit(
        self, sequence: Sequence, state: BlockState, num_computed: int, num_next: int, headroom: int = 0
    ) -> bool:
        """As `admit`, for a sequence whose first `num_computed` tokens' K/V is elsewhere: what the cache still has of
        it is shared (`num_published` says how many blocks), the rest is the caller's to bring. `num_next`: tokens that
        are computed after the next step.
        """
        num_tokens = self._num_at_admission(sequence, num_next)
        if not self._take(sequence, state, num_computed // self.pool.block_size, num_tokens, headroom):
            return False
        sequence.num_computed = num_computed
        return True

    def _take(
        self,
        sequence: Sequence,
        state: BlockState,
        num_reusable: int,
        num_tokens: int,
        headroom: int,
        tail: BlockHash | None = None,
    ) -> bool:
        """Blocks for `num_tokens` tokens, up to `num_reusable` of them from the cache, and behind these a copy of the
        block with this tail if that is cached. All or nothing. What the cache has counts as computed."""
        pool = self.pool
        hashes = sequence.block_hashes(num_reusable)
        num_cached = self.cache.peek(hashes)
        num_missing = max(0, blocks_for(num_tokens, pool.block_size) - num_cached)
        if num_missing + headroom > pool.num_available:
            return False
        found = hashes[:num_cached]
        if has_tail := tail is not None and num_cached == num_reusable and self.tails.is_cached(tail):
            found.append(tail)
        shared = list(self.cache.match(found)) if found else []
        if shared:
            pool.hold(shared, state)
            self._sessions.matched(sequence.origin.session, found)
        if num_missing + headroom > pool.num_available:  # again, now that shared blocks are held and cannot be evicted
            pool.release(shared, state)
            return False
        sequence.block_state = state
        sequence.num_published = num_cached
        sequence.num_computed = num_cached * pool.block_size
        own = pool.allocate(num_missing, state)
        if has_tail:
            self.copies.add(shared.pop(), own[0], state)
            sequence.num_computed = self.tails.end_of(sequence)
        sequence.table.append(shared + own)
        return True

    def _num_at_admission(self, sequence: Sequence, num_next: int) -> int:
        """Returns the number of tokens to make room for. `num_next`: tokens computed by the end of the next step."""
        return sequence.num_tokens

    def adopt(self, sequence: Sequence, headroom: int) -> None:
        """A sequence with blocks for all its tokens joined: takes the blocks that an admission would give it, if they
        and `headroom` more are available."""
        self._lengthen(sequence, self._num_at_admission(sequence, sequence.num_tokens), headroom)

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Makes the table long enough for `num_tokens` tokens. All or nothing.

        A fork also gets a copy of the block that its next token goes to, if others share that block.
        """
        if sequence.forks is not None:
            return self._grow_fork(sequence, num_tokens)
        return self._lengthen(sequence, num_tokens)

    def _lengthen(self, sequence: Sequence, num_tokens: int, headroom: int = 0) -> bool:
        table = sequence.table
        if num_tokens <= table.num_blocks * table.block_size:
            return True
        num_missing = blocks_for(num_tokens, table.block_size) - table.num_blocks
        if num_missing + headroom > self.num_available:
            return False
        last = table.last if table.num_blocks else None
        table.append(self.pool.allocate(num_missing, sequence.block_state, after=last))
        return True

    def grow_each(self, sequences: Seq[Sequence]) -> list[Sequence]:
        """Gives each sequence one more block, in one operation. Returns the sequences that still need `grow`: forks,
        which may share the block that they write, or all if there are not enough blocks for the others.
        """
        forks = [sequence for sequence in sequences if sequence.forks is not None]
        if len(sequences) - len(forks) > self.pool.num_available:
            return list(sequences)
        by_state: dict[BlockState, list[Sequence]] = {}
        for sequence in sequences:
            if sequence.forks is None:
                by_state.setdefault(sequence.block_state, []).append(sequence)
        for state, growing in by_state.items():
            blocks = self.pool.allocate_each([sequence.table.last for sequence in growing], state)
            for sequence, block in zip(growing, blocks, strict=True):
                sequence.table.append((block,))
        return forks

    def _grow_fork(self, sequence: Sequence, num_tokens: int) -> bool:
        table = sequence.table
        index = sequence.next_position // table.block_size
        must_copy = index < table.num_blocks and self.copies.must_copy(int(table.ids[index]))
        num_missing = max(0, blocks_for(num_tokens, table.block_size) - table.num_blocks)
        if num_missing + must_copy > self.num_available:
            return False
        if must_copy:
            self.copies.make_own(table, index, sequence.block_state)
        if num_missing:
            table.append(self.pool.allocate(num_missing, sequence.block_state, after=table.last))
        return True

    def remaining_output(self, sequence: Sequence) -> int:
        """Returns the number of tokens that a sequence may still sample here at most."""
        if sequence.prefill_only:
            return 0
        left = sequence.sampling.max_tokens - sequence.num_output
        return max(0, min(left, self.max_model_len - sequence.num_tokens))

    def publish(self, sequence: Sequence) -> list[BlockHash]:
        """Offers newly computed blocks to the cache and returns the hashes of the published ones.

        If the cache has some of them already, the sequence takes the cached ones instead of its own. If that is not
        possible, because a transfer reads its own, nothing is published: blocks published behind cached ones would pin
        these, and the pool would keep the same prefix twice.
        """
        num_full = sequence.num_computed // self.pool.block_size
        start = sequence.num_published
        if num_full <= start:
            return []
        hashes = sequence.block_hashes(num_full, start)
        num_known = self.cache.peek(hashes)
        if num_known and not self._share(sequence, num_known):
            return []
        parent = sequence.hashes[start - 1] if start else None
        self.cache.extend(parent, hashes, sequence.table.ids[start:num_full].tolist())
        if self.shares_prefixes:
            self._sessions.published(sequence.origin.session, hashes[num_known:])
        sequence.num_published = num_full
        return hashes

    def _share(self, sequence: Sequence, num_known: int) -> bool:
        """Replaces the sequence's own copies of blocks by `num_known` cached ones, behind those it published.

        Planned steps read its own copies, so they stay held until these steps have ended.
        """
        if sequence.prefill_only:
            return False
        start = sequence.num_published
        hashes = sequence.block_hashes(start + num_known)
        cached = self.cache.match(hashes)[start:]
        self._sessions.matched(sequence.origin.session, hashes)
        own = sequence.table.ids[start : start + len(cached)].tolist()
        self.pool.hold(cached, sequence.block_state)
        for index, block in enumerate(cached, start):
            sequence.table.replace(index, block)
        if sequence.num_planned:
            self.pool.move(own, sequence.block_state, BlockState.IN_FLIGHT)
            self._replaced.append((self._num_uncommitted, own))
        else:
            self.pool.release(own, sequence.block_state)
        return True

    def step_landed(self, num_uncommitted: int) -> None:
        """A step has ended, or will not run. So many others are still planned or in flight."""
        self._num_uncommitted = num_uncommitted
        replaced, self._replaced = self._replaced, []
        for num_steps, blocks in replaced:
            if num_steps > 1 and num_uncommitted:
                self._replaced.append((num_steps - 1, blocks))
            else:
                self.pool.release(blocks, BlockState.IN_FLIGHT)

    def change_block_state(self, sequence: Sequence, state: BlockState) -> None:
        """Moves the holds on a sequence's blocks to another state."""
        self.pool.move(sequence.table.ids.tolist(), sequence.block_state, state)
        sequence.block_state = state

    def free(self, sequence: Sequence) -> None:
        """Releases a sequence's blocks. Published ones stay cached. Drops its computed length with them."""
        blocks = sequence.table.clear()
        self.copies.drop(blocks)
        self.pool.release(blocks, sequence.block_state)
        self.tails.stopped(sequence)
        sequence.num_computed = 0
        sequence.num_published = 0

    def end_session(self, session: str) -> None:
        """No request of this session will come. Cached blocks that no other request has used are evicted first."""
        self.cache.demote(self._sessions.end(session))

    def slot_use(self, sequences: Iterable[Sequence]) -> SlotUse:
        """Returns the use of these sequences' blocks."""
        allocated = committed = 0
        for sequence in sequences:
            allocated += sequence.table.capacity_tokens
            committed += sequence.num_computed
        return SlotUse(allocated, committed)


class OnDemandBlocks(BlockManager):
    """Gives blocks as tokens come: at admission for the first chunk only (Kwon et al., SOSP 2023, section 4.3)."""

    def _num_at_admission(self, sequence: Sequence, num_next: int) -> int:
        return min(num_next, sequence.num_tokens)


class WholeSequenceBlocks(BlockManager):
    """Allocates blocks for the longest possible output at admission (Yu et al., Orca, OSDI 2022, section 4.2)."""

    def _num_at_admission(self, sequence: Sequence, num_next: int) -> int:
        if sequence.forks is not None:
            return sequence.num_tokens  # a common prefix samples nothing; its forks take blocks as tokens come
        # The KV of the last sampled token is never computed.
        return max(sequence.num_tokens, sequence.num_tokens + self.remaining_output(sequence) - 1)
