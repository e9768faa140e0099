"""Block hashes: a chain of hashes identifies a prefix, in the same way on every worker.

A block's hash covers its parent's hash and its tokens; the chain starts at a root that covers whatever else makes K/V
differ (model, numerics of the worker that computes the prompt, the client's salt). Two prefixes that differ anywhere
therefore share no hash from there on, and a hash alone identifies the whole prefix up to its block. The digest is long
enough that a match of hashes is taken as a match of content.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

BlockHash = bytes
"""16 bytes."""

HASH_BYTES = 16
_INT32 = np.dtype("<i4")
_NEW_HASH = blake2b(digest_size=HASH_BYTES).copy
"""Returns a new hash object. Takes half as long as the constructor with its keyword."""


def root_hash(*, model: str, numerics: str = "", cache_salt: str = "") -> BlockHash:
    """The parent of every first block. Each part is preceded by its length, so no two sets of parts read alike."""
    digest = _NEW_HASH()
    for part in (model, numerics, cache_salt):
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.digest()


def hash_blocks(parent: BlockHash, token_ids: Sequence[int] | NDArray[np.int32], block_size: int) -> list[BlockHash]:
    """Hashes of the full blocks in `token_ids`, which follow the block named `parent`; a partial tail has none.

    Tokens enter as little-endian int32. Raises ValueError for a block size below 1, OverflowError for a token id beyond
    int32.
    """
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")
    num_full = len(token_ids) // block_size
    data = np.asarray(token_ids[: num_full * block_size], dtype=_INT32).tobytes()
    step = 4 * block_size
    hashes: list[BlockHash] = []
    for start in range(0, num_full * step, step):
        block = _NEW_HASH()
        block.update(parent + data[start : start + step])
        parent = block.digest()
        hashes.append(parent)
    return hashes


def num_in_common(chains: Sequence[Sequence[BlockHash]], least: int = 0) -> int:
    """Returns how many first blocks all chains share, given that they share `least`.

    O(chains * log blocks): equal hashes mean equal prefixes, so this bisects.
    """
    most = min(map(len, chains), default=least)
    return bisect_left(range(most), True, least, key=lambda at: len({chain[at] for chain in chains}) > 1)
