"""Counts requests by outcome and owner, for metrics and `/fleet`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kvrelay_router.dispatch.active_requests import ActiveRequest
from kvrelay_router.dispatch.records import RequestRecord

OUTCOMES = ("submitted", "finished", "failed", "timed_out", "cancelled", "refused")


class RequestCounts:
    """Counts since the start. There are as many owners as API keys."""

    def __init__(self) -> None:
        self._of_owners: dict[str, Counter[str]] = {}

    def add(self, outcome: str, owner: str) -> None:
        counter = self._of_owners.get(owner)
        if counter is None:
            counter = self._of_owners[owner] = Counter()
        counter[outcome] += 1

    def of(self, owner: str | None) -> dict[str, int]:
        """The number of requests of an owner (None: of all) by outcome."""
        counters = [counter for each, counter in self._of_owners.items() if owner in (None, each)]
        return {outcome: sum(counter[outcome] for counter in counters) for outcome in OUTCOMES}


def own_figures(running: Iterable[ActiveRequest], records: Iterable[RequestRecord], owner: str) -> dict[str, int]:
    """Figures of one owner's requests. Retries are those of the requests in `records`."""
    own = [each for each in running if each.record.owner == owner]
    sequences = [sequence for each in own for sequence in each.sequences.values()]
    return {
        "running": len(own),
        "running_sequences": len(sequences),
        "sequences_waiting_for_worker": sum(sequence.waiting_for is not None for sequence in sequences),
        "retries": sum(max(0, len(each.attempts) - 1) for record in records for each in record.sequences),
    }
