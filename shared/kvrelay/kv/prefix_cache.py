"""The prefix cache: a radix tree over blocks (Zheng et al., RadixAttention, NeurIPS 2024, section 3).

A node of the tree *is* a block of the pool: block ids index flat arrays, and one index leads from a block's hash to
its id. As a hash names the whole prefix up to its block, no edge needs walking to match, and no node is ever split.

Two invariants carry everything:

1. **The tree is closed under prefixes.** A node's parent is in the tree. So presence is monotone along a chain of
   hashes: a bisection finds where it ends, here and in an index fed from the events.
2. **A pinned node's ancestors are pinned.** A node is pinned while its block is held or a child is pinned. The others
   are evictable, and form one list by their last use, in which every node comes before its parent: whatever uses a
   node uses its ancestors with it, and the chain joins the list's end leaf first. So the list's head is the least
   recently used leaf, and eviction pops it: O(1), with neither heap nor timestamps.

A use is a match, an insertion of the whole chain, or the end of the last hold. What `demote` names goes to the list's
head: it is evicted first, whenever it was used.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from kvrelay.kv.block_index import BlockIndex
from kvrelay.kv.cache import BlockError, CacheEvent, IntegrityError, Removed, Stored
from kvrelay.kv.hashing import BlockHash
from kvrelay.kv.pool import BlockPool

_NO_PARENT = -1


class PrefixCache:
    """The radix tree over a pool's blocks; see the module's text. With `record_events`, changes wait in a list."""

    def __init__(self, pool: BlockPool, *, record_events: bool = False) -> None:
        self._pool = pool
        self._block_of = BlockIndex()
        self._hash: list[BlockHash | None] = [None] * pool.num_blocks
        self._parent = array("i", [_NO_PARENT]) * pool.num_blocks
        self._pins = array("i", [0]) * pool.num_blocks  # own holds (0 or 1) + pinned children
        # The evictable nodes by last use, as a ring through the extra slot `num_blocks`.
        self._end = pool.num_blocks
        self._older = array("i", [self._end]) * (pool.num_blocks + 1)
        self._newer = array("i", [self._end]) * (pool.num_blocks + 1)
        self._num_evictable = 0
        self._record_events = record_events
        self._events: list[CacheEvent] = []
        pool.attach(self)

    @property
    def num_cached(self) -> int:
        """Blocks in the tree, held or not."""
        return len(self._block_of)

    @property
    def num_evictable(self) -> int:
        """Blocks that repeated eviction can free: those that no held block stands on."""
        return self._num_evictable

    def match(self, hashes: Sequence[BlockHash]) -> list[int]:
        """The blocks of the longest cached prefix, which counts as used now. O(its length).

        No hold is taken: hold them before the next allocation, or it may evict them.
        """
        matched = self._blocks_of(hashes[: self.peek(hashes)])
        self._touch(matched)
        return matched

    def peek(self, hashes: Sequence[BlockHash]) -> int:
        """The length in blocks of the longest prefix that `match` finds. O(log len(hashes))."""
        return self._num_present(hashes)

    def _num_present(self, hashes: Sequence[BlockHash]) -> int:
        """How many of the first hashes are in the tree. O(log len(hashes))."""
        shards = self._block_of.shards
        low, high = 0, len(hashes)
        while low < high:
            middle = (low + high) // 2
            block_hash = hashes[middle]
            if block_hash in shards[block_hash[0]]:
                low = middle + 1
            else:
                high = middle
        return low

    def block_of(self, block_hash: BlockHash) -> int | None:
        """The block that holds this prefix's last tokens, if cached."""
        return self._block_of.get(block_hash)

    def insert(self, hashes: Sequence[BlockHash], blocks: Sequence[int]) -> list[int]:
        """Publishes a chain from its first block on; hashes[i] names the content of blocks[i], computed and complete.

        Returns the cached block for each hash: the caller's own, or one that was there before. Then the caller's is a
        duplicate that the cache does not know; it may go on using it, or hold the cached one and release its own.
        O(its length). Raises BlockError if a block is not held, or is cached under another hash.
        """
        stored = self._publish(None, hashes, blocks)
        self._touch(stored)
        return stored

    def extend(self, parent_hash: BlockHash | None, hashes: Sequence[BlockHash], blocks: Sequence[int]) -> list[int]:
        """Publishes the blocks behind `parent_hash` (None: a chain starts here). Returns as `insert`.

        If the parent is not cached any more, nothing is inserted. O(their number).

        Blocks that were cached already do not count as used: that would have to reach up to the root.
        """
        if parent_hash is not None and parent_hash not in self._block_of:
            return list(blocks)
        if len(hashes) == len(blocks) == 1 and hashes[0] not in self._block_of:
            self._publish_one(parent_hash, hashes[0], blocks[0])
            return list(blocks)
        return self._publish(parent_hash, hashes, blocks)

    def evict(self, num_blocks: int) -> list[int]:
        """Frees the least recently used leaves, one after the other. O(their number)."""
        evicted = self.evict_blocks(num_blocks)
        self._pool.uncache(evicted)
        return evicted

    def evict_blocks(self, num_blocks: int) -> list[int]:
        """Called by the pool. Removes the least recently used leaves and returns them. O(their number)."""
        newer, hash_of = self._newer, self._hash
        evicted: list[int] = []
        removed: list[BlockHash] = []
        block = newer[self._end]
        for _ in range(min(num_blocks, self._num_evictable)):
            block_hash = hash_of[block]
            assert block_hash is not None
            hash_of[block] = None
            removed.append(block_hash)
            evicted.append(block)
            block = newer[block]
        newer[self._end] = block
        self._older[block] = self._end
        self._num_evictable -= len(evicted)
        self._forgotten(removed)
        return evicted

    def demote(self, hashes: Sequence[BlockHash]) -> None:
        """Moves evictable nodes to the list's head. O(their number).

        Each of `hashes` stands behind its parent, and no node outside of them stands on one of them, so every node
        still comes before its parent.
        """
        older, newer, end, pins = self._older, self._newer, self._end, self._pins
        for block_hash in hashes:
            node = self._block_of.get(block_hash)
            if node is None or pins[node]:
                continue
            before, after = older[node], newer[node]
            newer[before] = after
            older[after] = before
            first = newer[end]
            older[first] = node
            newer[node] = first
            newer[end] = node
            older[node] = end

    def remove(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Removes these blocks and all that follow them. Holds stay. Ignores unknown hashes. O(cached)."""
        doomed = {self._block_of[block_hash] for block_hash in hashes if block_hash in self._block_of}
        if not doomed:
            return []
        return self._withdraw(self._with_descendants(doomed))

    def clear(self) -> list[int]:
        """Removes all blocks from the tree. Held blocks become free when they are released."""
        return self._withdraw(self._with_descendants(set(self._block_of.blocks())))

    def drain_events(self) -> list[CacheEvent]:
        """Returns the changes since the last call, in order. Empty unless events are recorded."""
        events, self._events = self._events, []
        return events

    def pin(self, blocks: Sequence[int]) -> None:
        """Called by the pool when these nodes got their first hold. O(1) a node for a chain from the root on."""
        pins, parent, older, newer = self._pins, self._parent, self._older, self._newer
        num_pinned = 0
        for block in blocks:
            node = block
            while node >= 0:
                num_pins = pins[node] = pins[node] + 1
                if num_pins > 1:
                    break
                # A node that had no pin leaves the list and pins its parent in turn.
                before, after = older[node], newer[node]
                newer[before] = after
                older[after] = before
                num_pinned += 1
                node = parent[node]
        self._num_evictable -= num_pinned

    def unpin(self, blocks: Sequence[int]) -> None:
        """Called by the pool when these nodes lost their last hold. Amortised O(1) a node for a chain."""
        pins, parent, older, newer, end = self._pins, self._parent, self._older, self._newer, self._end
        num_unpinned = 0
        last = older[end]
        for block in blocks:
            node = block
            while node >= 0:
                num_pins = pins[node] = pins[node] - 1
                if num_pins:
                    break
                newer[last] = node
                older[node] = last
                last = node
                num_unpinned += 1
                node = parent[node]
        newer[last] = end
        older[end] = last
        self._num_evictable += num_unpinned

    def check_integrity(self) -> None:
        """Recounts the tree from the hashes, the parents and the pool's holds. O(num_blocks). Raises IntegrityError."""
        pool, parent = self._pool, self._parent
        for block in range(pool.num_blocks):
            block_hash = self._hash[block]
            if pool.is_cached(block) != (block_hash is not None):
                raise IntegrityError(f"block {block}: pool and tree differ on whether it is cached")
            if block_hash is not None and self._block_of.get(block_hash) != block:
                raise IntegrityError(f"block {block}: its hash leads elsewhere")
            if block_hash is not None and parent[block] >= 0 and self._hash[parent[block]] is None:
                raise IntegrityError(f"block {block}: its parent {parent[block]} is not cached")
        num_entries = sum(1 for _ in self._block_of.blocks())
        if not num_entries == len(self._block_of) == sum(block_hash is not None for block_hash in self._hash):
            raise IntegrityError("the index has entries that lead nowhere")
        self._check_pins()
        self._check_list()

    def _check_pins(self) -> None:
        nodes = list(self._block_of.blocks())
        pins = dict.fromkeys(nodes, 0)
        for node in nodes:
            if self._pool.is_held(node):
                pins[node] += 1
        for node in nodes:
            if self._pins[node] and self._parent[node] >= 0:
                pins[self._parent[node]] += 1
        for node, count in pins.items():
            if self._pins[node] != count:
                raise IntegrityError(f"block {node}: {self._pins[node]} pins kept, {count} counted")

    def _check_list(self) -> None:
        unpinned = {node for node in self._block_of.blocks() if not self._pins[node]}
        if len(unpinned) != self._num_evictable:
            raise IntegrityError(f"{len(unpinned)} blocks are evictable, counted as {self._num_evictable}")
        seen: set[int] = set()
        node, before = self._newer[self._end], self._end
        while node != self._end:
            if node in seen or node not in unpinned or self._older[node] != before:
                raise IntegrityError(f"block {node}: the list by last use is broken here")
            if self._parent[node] in seen:
                raise IntegrityError(f"block {node} would be evicted after its parent")
            seen.add(node)
            node, before = self._newer[node], node
        if seen != unpinned or self._older[self._end] != before:
            raise IntegrityError("the list by last use lacks evictable blocks")

    def _publish(self, parent_hash: BlockHash | None, hashes: Sequence[BlockHash], blocks: Sequence[int]) -> list[int]:
        """Adds the new blocks of a chain below the cached `parent_hash`. They are held, so the chain is pinned."""
        num_known = self._check_chain(parent_hash, hashes, blocks)
        stored = self._blocks_of(hashes[:num_known])
        if num_known == len(hashes):
            return stored
        above = hashes[num_known - 1] if num_known else parent_hash
        node = _NO_PARENT if above is None else self._block_of[above]
        new_blocks = list(blocks[num_known:])
        new_hashes = hashes[num_known:]
        first = node
        hash_of, parent, pins = self._hash, self._parent, self._pins
        for block_hash, block in zip(new_hashes, new_blocks, strict=True):
            hash_of[block] = block_hash
            parent[block] = node
            pins[block] = 2  # its hold, and the next block's pin
            node = block
        pins[node] = 1
        if first >= 0:
            self.pin((first,))
        self._block_of.add(new_hashes, new_blocks)
        self._pool.cache(new_blocks)
        if self._record_events:
            self._events.append(Stored(above, tuple(new_hashes)))
        return stored + new_blocks

    def _publish_one(self, parent_hash: BlockHash | None, block_hash: BlockHash, block: int) -> None:
        """`_publish` for one new block, as sequences fill them while they decode."""
        self._pool.check_all_held((block,))
        if self._hash[block] is not None:
            raise BlockError(f"block {block} is cached under another hash")
        node = _NO_PARENT if parent_hash is None else self._block_of[parent_hash]
        self._hash[block] = block_hash
        self._parent[block] = node
        self._pins[block] = 1
        if node >= 0:
            self.pin((node,))
        self._block_of.add((block_hash,), (block,))
        self._pool.cache((block,))
        if self._record_events:
            self._events.append(Stored(parent_hash, (block_hash,)))

    def _check_chain(self, parent_hash: BlockHash | None, hashes: Sequence[BlockHash], blocks: Sequence[int]) -> int:
        """How many of the hashes are cached already. Raises BlockError, ValueError when this is no chain."""
        if len(hashes) != len(blocks):
            raise ValueError(f"{len(hashes)} hashes for {len(blocks)} blocks")
        self._pool.check_all_held(blocks)
        num_known = self._num_present(hashes)
        above = None if parent_hash is None else self._block_of[parent_hash]
        if num_known and self._parent[self._block_of[hashes[0]]] != (_NO_PARENT if above is None else above):
            raise ValueError("the hashes do not follow their parent")
        new_hashes = hashes[num_known:]
        if len(set(new_hashes)) != len(new_hashes):
            raise ValueError("the hashes are no chain")
        shards, hash_of = self._block_of.shards, self._hash
        for block_hash, block in zip(new_hashes, blocks[num_known:], strict=True):
            if block_hash in shards[block_hash[0]]:
                raise ValueError("the hashes are no chain")
            if hash_of[block] is not None:
                raise BlockError(f"block {block} is cached under another hash")
        return num_known

    def _blocks_of(self, hashes: Sequence[BlockHash]) -> list[int]:
        shards = self._block_of.shards
        return [shards[block_hash[0]][block_hash] for block_hash in hashes]

    def _touch(self, chain: Sequence[int]) -> None:
        """Moves what is evictable of a chain from the root to the list's end, leaf first."""
        older, newer, end, pins = self._older, self._newer, self._end, self._pins
        for node in reversed(chain):
            if pins[node]:
                return  # and with it all its ancestors
            before, after = older[node], newer[node]
            newer[before] = after
            older[after] = before
            last = older[end]
            newer[last] = node
            older[node] = last
            newer[node] = end
            older[end] = node

    def _with_descendants(self, roots: set[int]) -> list[int]:
        """These nodes and all below them, every node before its parent."""
        below: dict[int, list[int]] = {}
        for node in self._block_of.blocks():
            below.setdefault(self._parent[node], []).append(node)
        tops = [node for node in roots if self._parent[node] not in roots]
        ordered: list[int] = []
        seen: set[int] = set()
        while tops:
            node = tops.pop()
            if node not in seen:
                seen.add(node)
                ordered.append(node)
                tops += below.get(node, ())
        ordered.reverse()
        return ordered

    def _withdraw(self, nodes: list[int]) -> list[int]:
        """Takes nodes out, given every node before its parent, with nothing below them left."""
        removed: list[BlockHash] = []
        for node in nodes:
            if self._pins[node]:
                self.unpin((node,))  # its own hold, as nothing is below it any more; it joins the list
            self._unlink(node)
            block_hash = self._hash[node]
            assert block_hash is not None
            self._hash[node] = None
            removed.append(block_hash)
        self._forgotten(removed)
        self._pool.uncache(nodes)
        return nodes

    def _unlink(self, node: int) -> None:
        before, after = self._older[node], self._newer[node]
        self._newer[before] = after
        self._older[after] = before
        self._num_evictable -= 1

    def _forgotten(self, hashes: list[BlockHash]) -> None:
        """The nodes are out of the tree: tells the index and the events."""
        self._block_of.drop(hashes)
        if self._record_events and hashes:
            self._events.append(Removed(tuple(hashes)))
