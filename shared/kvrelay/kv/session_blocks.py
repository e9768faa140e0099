"""Which cached blocks a session alone has used, so that they can be evicted first once the session has ended.

A session is a client's name for requests that belong together, such as the calls of a program. Its prompts grow from
call to call, and no request outside the session uses their common prefix, but least-recently-used eviction keeps these
blocks like any others after the last call.

A block belongs to the session whose sequence published it, until a request of another session, or of none, matches it.
A request that uses a block uses all before it, so all blocks behind one of a session's own are its own, too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvrelay.kv.hashing import BlockHash


class SessionBlocks:
    """Blocks by hash, of the latest sessions with at most `most_blocks` blocks together. Sessions need not end: the one
    that published longest ago is forgotten first, and its blocks are then like any others.
    """

    def __init__(self, most_blocks: int) -> None:
        self._most_blocks = most_blocks
        self._owner: dict[BlockHash, str] = {}
        # In the order of publication, so every block follows its parent. Also blocks that are no longer the session's.
        self._published: OrderedDict[str, list[BlockHash]] = OrderedDict()
        self._num_published = 0

    def __len__(self) -> int:
        """Number of sessions with blocks."""
        return len(self._published)

    def published(self, session: str, hashes: Sequence[BlockHash]) -> None:
        """These blocks are new in the cache. Empty `session`: they belong to none. O(their number)."""
        if session:
            for block_hash in hashes:
                self._owner[block_hash] = session
            self._published.setdefault(session, []).extend(hashes)
            self._published.move_to_end(session)
            self._num_published += len(hashes)
            while self._num_published > self._most_blocks:
                self.end(next(iter(self._published)))
        elif self._owner:
            for block_hash in hashes:  # blocks with these hashes may have been a session's, and evicted
                self._owner.pop(block_hash, None)

    def matched(self, session: str, hashes: Sequence[BlockHash]) -> None:
        """A request of `session` (empty: of none) uses these cached blocks, a chain from its first block on. O(number
        of blocks that were another session's)."""
        if not self._owner:
            return
        for block_hash in reversed(hashes):
            owner = self._owner.get(block_hash)
            # Those before it are shared as well, or the session's own.
            if owner is None or owner == session:
                return
            del self._owner[block_hash]

    def end(self, session: str) -> list[BlockHash]:
        """Forgets the session and returns its own blocks, each behind its parent. Some may have been evicted."""
        hashes = self._published.pop(session, [])
        self._num_published -= len(hashes)
        # A block may have been evicted and published again. Its latest publication follows that of its parent.
        latest = reversed(dict.fromkeys(reversed(hashes)))
        own = [block_hash for block_hash in latest if self._owner.get(block_hash) == session]
        for block_hash in own:
            del self._owner[block_hash]
        return own
