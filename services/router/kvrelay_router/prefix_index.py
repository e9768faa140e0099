"""The prefix index for routing: the replica, or answers of the lookup script in Redis."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from kvrelay.fleet.index import FeedState, IndexFeed
from kvrelay.kv.hashing import BlockHash

MAX_ANSWERS = 1024


class FleetPrefixes:
    """A `PrefixView`. `match` never waits; while the replica lags, `prepare` asks Redis first.

    Without Redis no prefix is known, and routing uses load.
    """

    def __init__(self, feed: IndexFeed) -> None:
        self._feed = feed
        # Key: the last hash of a chain. Value: its cached blocks by worker.
        self._answers: OrderedDict[BlockHash, dict[str, int]] = OrderedDict()
        self._num_lookups: Counter[str] = Counter()

    def start(self) -> None:
        """Call it on the event loop."""
        self._feed.start()

    async def close(self) -> None:
        await self._feed.close()

    def match(self, hashes: Sequence[BlockHash]) -> Mapping[str, int]:
        if not hashes:
            return {}
        replica = self._feed.replica
        if replica is not None:
            self._num_lookups["replica"] += 1
            return replica.match(hashes)
        answer = self._answers.get(hashes[-1])
        self._num_lookups["none" if answer is None else "script"] += 1
        return answer or {}

    async def prepare(self, hashes: Sequence[BlockHash]) -> None:
        """Looks the chain up in Redis while the replica is still loading, so that `match` can answer for it. Otherwise
        returns at once."""
        if not hashes or self._feed.state is not FeedState.LOADING:
            return
        self._answers[hashes[-1]] = await self._feed.lookup(hashes)
        self._answers.move_to_end(hashes[-1])
        if len(self._answers) > MAX_ANSWERS:
            self._answers.popitem(last=False)

    def describe(self) -> dict[str, Any]:
        """State and counters as JSON types."""
        lookups = {name: self._num_lookups[name] for name in ("replica", "script", "none")}
        return {**self._feed.describe(), "lookups": lookups}
