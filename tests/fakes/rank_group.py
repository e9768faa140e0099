"""Ranks of one process that step together: each on a thread of its own, with a barrier for the exchange."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvrelay.scheduling.queue.prefill_delay import RankLoad

OUT_OF_STEP_S = 10.0


class RankGroup:
    """The place where the ranks meet. Raises BrokenBarrierError when one of them does not come."""

    def __init__(self, num_ranks: int) -> None:
        self._loads: list[RankLoad | None] = [None] * num_ranks
        self._told = threading.Barrier(num_ranks)
        self._heard = threading.Barrier(num_ranks)
        self.num_exchanges = 0

    def exchange(self, rank: int) -> RankExchange:
        """One rank's side. Implements `GroupExchange`."""
        return RankExchange(self, rank)

    def share(self, rank: int, load: RankLoad) -> Sequence[RankLoad]:
        self._loads[rank] = load
        self._told.wait(OUT_OF_STEP_S)
        loads = [load for load in self._loads if load is not None]
        if rank == 0:
            self.num_exchanges += 1
        self._heard.wait(OUT_OF_STEP_S)
        return loads


class RankExchange:
    def __init__(self, group: RankGroup, rank: int) -> None:
        self._group = group
        self._rank = rank

    def share(self, load: RankLoad) -> Sequence[RankLoad]:
        return self._group.share(self._rank, load)
