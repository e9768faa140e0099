"""Which worker holds which prefix, as routing sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

WorkerId = str
BlockHash = bytes
"""16 bytes, as `kvrelay.kv.hashing` makes them."""


class PrefixView(Protocol):
    """The prefix index of the fleet, or what stands in for it."""

    def match(self, hashes: Sequence[BlockHash]) -> Mapping[WorkerId, int]:
        """For a chain of block hashes: the number of leading blocks that each worker holds. Workers with 0 are left
        out."""
        ...
