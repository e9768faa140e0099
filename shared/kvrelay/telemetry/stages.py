"""Stages of recent sequences on a worker, for `/requests/{id}/timeline`.

They are kept in memory for the latest requests and written when a sequence leaves, never per token.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable

from kvrelay.protocol.messages import Stage
from kvrelay.protocol.sequence_key import SequenceKey

MAX_REQUESTS = 512
MAX_STAGES = 512
"""Maximum stages of one request; stages of further samples and attempts are dropped."""


class RecentStages:
    """Stages of the latest `max_requests` requests that left this worker."""

    def __init__(self, max_requests: int = MAX_REQUESTS) -> None:
        self._max_requests = max_requests
        self._requests: OrderedDict[str, list[Stage]] = OrderedDict()

    def add(self, key: SequenceKey, stages: Iterable[Stage]) -> None:
        """Adds stages; beyond `max_requests`, drops the least recently extended request."""
        known = self._requests.setdefault(key[0], [])
        known += list(stages)[: max(0, MAX_STAGES - len(known))]
        self._requests.move_to_end(key[0])
        while len(self._requests) > self._max_requests:
            self._requests.popitem(last=False)

    def of(self, request: str) -> list[Stage]:
        """Stages of one request; empty if it is unknown or dropped."""
        return list(self._requests.get(request, ()))


def stage(
    key: SequenceKey, name: str, start: float, end: float | None, detail: dict[str, float | str] | None = None
) -> Stage:
    """Makes a stage from monotonic seconds. `end` is None while the stage lasts."""
    to_epoch = time.time() - time.monotonic()
    return Stage(
        attempt=key[1],
        sequence=key[2],
        name=name,
        start=start + to_epoch,
        end=end + to_epoch if end is not None else None,
        detail=detail or {},
    )
