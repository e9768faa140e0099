"""What lately happened to each sequence on a worker, for whoever asks about one request: see `/requests/{id}/timeline`.

Kept for the latest requests only, in memory; written once a sequence leaves, and nothing of it per token.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable

from kvrelay.protocol.messages import Stage
from kvrelay.protocol.sequence_key import SequenceKey

MAX_REQUESTS = 512
MAX_STAGES = 512
"""Of one request: samples and attempts beyond are left out."""


class RecentStages:
    """The stages of the latest requests that left this worker."""

    def __init__(self, max_requests: int = MAX_REQUESTS) -> None:
        self._max_requests = max_requests
        self._requests: OrderedDict[str, list[Stage]] = OrderedDict()

    def add(self, key: SequenceKey, stages: Iterable[Stage]) -> None:
        """Forgets the request of which nothing was added for longest, where there are too many."""
        known = self._requests.setdefault(key[0], [])
        known += list(stages)[: max(0, MAX_STAGES - len(known))]
        self._requests.move_to_end(key[0])
        while len(self._requests) > self._max_requests:
            self._requests.popitem(last=False)

    def of(self, request: str) -> list[Stage]:
        """Those of one request; none where it is unknown or forgotten."""
        return list(self._requests.get(request, ()))


def stage(
    key: SequenceKey, name: str, start: float, end: float | None, detail: dict[str, float | str] | None = None
) -> Stage:
    """Of monotonic seconds. `end` None: it goes on."""
    to_epoch = time.time() - time.monotonic()
    return Stage(
        attempt=key[1],
        sequence=key[2],
        name=name,
        start=start + to_epoch,
        end=end + to_epoch if end is not None else None,
        detail=detail or {},
    )
