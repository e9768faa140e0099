"""The interface of routing to the prefix index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

WorkerId = str
BlockHash = bytes
"""16 bytes, as `kvrelay.kv.hashing` makes them."""


class PrefixView(Protocol):
    """The prefix index of the fleet, or an estimate of it."""

    def match(self, hashes: Sequence[BlockHash]) -> Mapping[WorkerId, int]:
        """Returns the number of leading blocks of a chain that each worker holds. Workers with 0 are left out."""
        ...
