"""Blocks for sequences: admission with the cached prefix, growth, publication, release. One pool, shared with the
cache.

Three managers differ in how many tokens a sequence gets blocks for when it is admitted; from then on all of them give
blocks as tokens come. `slot_use` measures what each choice wastes (Kwon et al., SOSP 2023, figure 2).
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from kvrelay.kv.ablations import NullCache
from kvrelay.kv.cache import Cache
from kvrelay.kv.hashing import BlockHash
from kvrelay.kv.pool import BlockPool, Owner
from kvrelay.kv.table import blocks_for
from kvrelay.scheduling.copies import BlockCopies
from kvrelay.scheduling.sequence import Sequence
from kvrelay.scheduling.tail_sharing import TailSharing
from kvrelay.scheduling.tails import SharedTails, Tail, num_full_before_tail


@dataclass(frozen=True, slots=True)
class SlotUse:
    """Token slots in the blocks of some sequences; `committed`: those whose K/V is there. A shared one counts twice."""

    allocated: int
    committed: int

    @property
    def wasted(self) -> int:
        """Slots that nobody else can have and that hold nothing."""
        return self.allocated - self.committed


class BlockManager:
    """Gives a sequence the blocks of its whole prompt at admission, and one at a time from then on."""

    def __init__(self, pool: BlockPool, cache: Cache, max_model_len: int) -> None:
        self.pool = pool
        self.cache = cache
        self.max_model_len = max_model_len
        self.copies = BlockCopies(pool)
        self.tails = SharedTails(pool)
        self._replaced: list[int] = []  # that a step in flight reads, and no table names
        self.shares_prefixes = not isinstance(cache, NullCache)
        self.sharing = TailSharing(self.tails, pool, cache, is_on=self.shares_prefixes)

    @property
    def num_available(self) -> int:
        """Blocks that somebody can have: free and evictable ones, and tails that nobody holds. O(tails)."""
        return self.pool.num_available + self.tails.num_idle

    def has_room(self, num_blocks: int) -> bool:
        """Whether so many blocks are available, and from now on in the pool: tails yield."""
        num_short = num_blocks - self.pool.num_available
        return num_short <= 0 or self.tails.free_idle(num_short)

    def cached_prefix(self, sequence: Sequence) -> list[int]:
        """Blocks of the longest cached prefix that leaves at least one token to compute (logits need one)."""
        return self.cache.match(sequence.block_hashes(self._num_reusable(sequence)))

    def num_cached_blocks(self, sequence: Sequence) -> int:
        """How many blocks `cached_prefix` would find; does not count as a use."""
        return self.first_missing(sequence)[0]

    def first_missing(self, sequence: Sequence) -> tuple[int, BlockHash | None]:
        """The number of cached blocks, and the hash of the next one that could be there; not a use. O(log blocks).

        Behind all others that may be the tail, which does not count as cached.
        """
        hashes = sequence.block_hashes(self._num_reusable(sequence))
        num_cached = self.cache.peek(hashes)
        if num_cached < len(hashes):
            return num_cached, hashes[num_cached]
        name = self.sharing.name_of(sequence)
        return num_cached, None if name in self.tails else name

    def num_missing(self, sequence: Sequence, num_computed: int) -> int:
        """Blocks that `readmit` takes at least; not a use. O(log blocks)."""
        size = self.pool.block_size
        return blocks_for(num_computed, size) - self.cache.peek(sequence.block_hashes(num_computed // size))

    def num_at_admission(self, sequence: Sequence) -> int:
        """Blocks that a sequence takes when it is admitted, and its next token. Cached ones count."""
        num_tokens = self._num_at_admission(sequence, sequence.num_tokens)
        num_tokens = max(num_tokens, min(sequence.num_tokens + 1, self.max_model_len))
        return blocks_for(num_tokens, self.pool.block_size)

    def num_own(self, sequence: Sequence, other: Sequence) -> int:
        """Those of them that it will not share with the other when that one is computed."""
        return self.num_at_admission(sequence) - self.num_in_common(sequence, other)

    def num_in_common(self, sequence: Sequence, other: Sequence) -> int:
        """Blocks of the other that a sequence shares, once they are computed. O(log blocks)."""
        if not self.shares_prefixes:
            return 0
        low, high = 0, min(self._num_reusable(sequence), other.num_full_blocks)
        mine, theirs = sequence.block_hashes(high), other.block_hashes(high)
        while low < high:  # a hash stands for all before it
            middle = (low + high + 1) // 2
            if mine[middle - 1] == theirs[middle - 1]:
                low = middle
            else:
                high = middle - 1
        return low

    def _num_reusable(self, sequence: Sequence) -> int:
        if sequence.sampling.prompt_logprobs is not None:
            return 0  # every position's logits are wanted
        return self._num_before(sequence)

    def _num_before(self, sequence: Sequence) -> int:
        """Full blocks before its tail."""
        return num_full_before_tail(sequence.num_tokens, self.pool.block_size)

    # -- admission ----------------------------------------------------------------------------------------------------

    def admit(self, sequence: Sequence, owner: Owner, *, num_next: int | None = None, headroom: int = 0) -> bool:
        """Gives a sequence its first blocks; what the cache holds counts as computed. All or nothing.

        `num_next`: tokens that are cached or computed in the next step; the manager decides how much room it makes
        beyond. Without, there is room for all known tokens and no more (a handoff's slots). A listed tail is shared,
        where there is room to copy it later; `num_computed` counts it but for the token that is to give the logits.
        `headroom`: blocks that must be available besides.
        """
        num_tokens = sequence.num_tokens if num_next is None else self._num_at_admission(sequence, num_next)
        num_reusable, tail = self._num_reusable(sequence), self.tails.get(self.sharing.name_of(sequence))
        taken = tail is not None and self._take(sequence, owner, self._num_before(sequence), num_tokens, headroom, tail)
        # A tail that nobody holds may be a block too many, beside the copy: then it yields to those who would share it.
        if not taken and not self._take(sequence, owner, num_reusable, num_tokens, headroom):
            return False
        sequence.num_computed = sequence.num_published * self.pool.block_size
        if sequence.tail is not None:
            sequence.num_computed = sequence.num_tokens - (0 if sequence.arrives else 1)  # its logits are there, too
            if sequence.arrives:
                self.sharing.drawn(sequence)
        return True

    def readmit(self, sequence: Sequence, owner: Owner, num_computed: int, num_next: int, headroom: int = 0) -> bool:
        """As `admit`, for a sequence whose first `num_computed` tokens' K/V is elsewhere: what the cache still has of
        it is shared (`num_published` says how many blocks), the rest is the caller's to bring. `num_next`: tokens that
        are computed after the next step.
        """
        num_tokens = self._num_at_admission(sequence, num_next)
        if not self._take(sequence, owner, num_computed // self.pool.block_size, num_tokens, headroom):
            return False
        sequence.num_computed = num_computed
        return True

    def _take(
        self,
        sequence: Sequence,
        owner: Owner,
        num_reusable: int,
        num_tokens: int,
        headroom: int,
        tail: Tail | None = None,
    ) -> bool:
        """Blocks for `num_tokens` tokens, up to `num_reusable` of them from the cache; with a tail all of these, and
        that. All or nothing."""
        pool = self.pool
        hashes = sequence.block_hashes(num_reusable + (tail is not None and tail.block is None))
        num_cached = self.cache.peek(hashes)
        if tail is not None and num_cached < len(hashes):
            return False
        shared = [] if tail is None or tail.block is None else [tail.block]
        num_missing = max(0, blocks_for(num_tokens, pool.block_size) - num_cached - len(shared))
        if tail is not None:
            headroom += self.sharing.writes_into_tail(sequence)
        if num_missing + headroom > self.num_available:
            return False
        shared = [*(self.cache.match(hashes[:num_cached]) if num_cached else ()), *shared]
        if shared:
            pool.hold(shared, owner)
        if not self.has_room(num_missing + headroom):  # now that what it shares cannot be evicted
            pool.release(shared, owner)
            return False
        sequence.owner = owner
        sequence.num_published = num_cached
        sequence.table.append(shared + pool.allocate(num_missing, owner))
        if tail is not None:
            self.sharing.take(sequence, tail)
        return True

    def _num_at_admission(self, sequence: Sequence, num_next: int) -> int:
        """Tokens to make room for. `num_next`: how many are computed or in the next step."""
        return sequence.num_tokens

    def adopt(self, sequence: Sequence) -> None:
        """A sequence with blocks for all its tokens joined: makes the room that an admission would, if there is any."""
        self._lengthen(sequence, self._num_at_admission(sequence, sequence.num_tokens))

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Makes the table long enough for `num_tokens` tokens. All or nothing.

        A beam, and a sample that shares its prompt's tail, also get a copy of the block that their next token goes to,
        where others share it.
        """
        if sequence.beams is not None or (sequence.is_forked and not sequence.draws_next):
            return self._grow_forked(sequence, num_tokens)
        return self._lengthen(sequence, num_tokens)

    def _lengthen(self, sequence: Sequence, num_tokens: int) -> bool:
        table = sequence.table
        if num_tokens <= table.num_blocks * table.block_size:
            return True
        num_missing = blocks_for(num_tokens, table.block_size) - table.num_blocks
        if not self.has_room(num_missing):
            return False
        last = table.last if table.num_blocks else None
        table.append(self.pool.allocate(num_missing, sequence.owner, after=last))
        return True

    def grow_each(self, sequences: Seq[Sequence]) -> list[Sequence]:
        """A block more for each of them, in one operation. Returns those that `grow` is still to be asked for: who may
        share the block that it writes, and where there are not enough blocks for the others, all.
        """
        forked = [sequence for sequence in sequences if sequence.beams is not None or sequence.is_forked]
        if len(sequences) - len(forked) > self.pool.num_available:
            return list(sequences)
        by_owner: dict[Owner, list[Sequence]] = {}
        for sequence in sequences:
            if sequence.beams is None and not sequence.is_forked:
                by_owner.setdefault(sequence.owner, []).append(sequence)
        for owner, growing in by_owner.items():
            blocks = self.pool.allocate_each([sequence.table.last for sequence in growing], owner)
            for sequence, block in zip(growing, blocks, strict=True):
                sequence.table.append((block,))
        return forked

    def _grow_forked(self, sequence: Sequence, num_tokens: int) -> bool:
        table = sequence.table
        index = sequence.next_position // table.block_size
        must_copy = index < table.num_blocks and self.copies.must_copy(int(table.ids[index]))
        num_missing = max(0, blocks_for(num_tokens, table.block_size) - table.num_blocks)
        if must_copy and not self.has_room(num_missing + 1):
            self.tails.give_up(int(table.ids[index]))
            must_copy = self.copies.must_copy(int(table.ids[index]))
        if not self.has_room(num_missing + must_copy):
            return False
        if must_copy:
            self.copies.make_own(table, index, sequence.owner)
        if num_missing:
            table.append(self.pool.allocate(num_missing, sequence.owner, after=table.last))
        self.sharing.set_forked(sequence, False)  # beams part and join in their own ways
        return True

    def remaining_output(self, sequence: Sequence) -> int:
        """Tokens that a sequence may still draw here, at most."""
        if sequence.prefill_only:
            return 0
        left = sequence.sampling.max_tokens - sequence.num_output
        return max(0, min(left, self.max_model_len - sequence.num_tokens))

    def publish(self, sequence: Sequence) -> list[BlockHash]:
        """Offers the blocks whose K/V is complete to the cache; returns the hashes of the new ones.

        Where the cache has some of them already, the sequence takes the cached ones for its own. Where that cannot be
        (a transfer uses its own) nothing is published: what is published under others' blocks pins them, and a
        sequence that computed a cached prefix anew would keep it in the pool twice.
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
        sequence.num_published = num_full
        return hashes

    def _share(self, sequence: Sequence, num_known: int) -> bool:
        """Puts cached blocks in the place of the sequence's own copies: `num_known` of them, behind those it published.

        A step that is planned reads the own ones: nobody else may have them before that has landed.
        """
        if sequence.prefill_only:
            return False
        start = sequence.num_published
        cached = self.cache.match(sequence.block_hashes(start + num_known))[start:]
        own = sequence.table.ids[start : start + len(cached)].tolist()
        self.pool.hold(cached, sequence.owner)
        for index, block in enumerate(cached, start):
            sequence.table.replace(index, block)
        if sequence.num_planned:
            self.pool.move(own, sequence.owner, Owner.IN_FLIGHT)
            self._replaced += own
        else:
            self.pool.release(own, sequence.owner)
        return True

    def step_landed(self) -> None:
        """The step that was planned behind the last one committed has landed, or will not run."""
        replaced, self._replaced = self._replaced, []
        self.pool.release(replaced, Owner.IN_FLIGHT)

    def change_owner(self, sequence: Sequence, owner: Owner) -> None:
        """Lets a sequence's blocks count as `owner` from now on."""
        self.pool.move(sequence.table.ids.tolist(), sequence.owner, owner)
        sequence.owner = owner

    def free(self, sequence: Sequence) -> None:
        """Lets go of a sequence's blocks; published ones stay cached. Committed K/V is given up exactly once."""
        self.sharing.lost_blocks(sequence)
        blocks = sequence.table.clear()[sequence.num_borrowed :]
        self.copies.drop(blocks)
        self.pool.release(blocks, sequence.owner)
        sequence.num_borrowed = 0
        sequence.num_computed = 0
        sequence.num_published = 0

    def slot_use(self, sequences: Iterable[Sequence]) -> SlotUse:
        """What these sequences' blocks have room for, and what is there."""
        allocated = committed = 0
        for sequence in sequences:
            allocated += sequence.table.capacity_tokens
            committed += sequence.num_computed
        return SlotUse(allocated, committed)


class OnDemandBlocks(BlockManager):
    """Blocks as tokens come: at admission for the first chunk alone (Kwon et al., SOSP 2023, section 4.3)."""

    def _num_at_admission(self, sequence: Sequence, num_next: int) -> int:
        return min(num_next, sequence.num_tokens)


class WholeSequenceBlocks(BlockManager):
    """Room for the longest sequence that this can become, at once (Yu et al., Orca, OSDI 2022, section 4.2)."""

    def _num_at_admission(self, sequence: Sequence, num_next: int) -> int:
        if sequence.beams is not None:
            return sequence.num_tokens  # a trunk draws nothing; its beams take blocks as tokens come
        # The last token drawn is never computed.
        return max(sequence.num_tokens, sequence.num_tokens + self.remaining_output(sequence) - 1)
