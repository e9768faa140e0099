"""Ranks of one process that step together: simulated workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from collections.abc import Sequence as Seq

from kvrelay.protocol.messages import PeerRef, WakeRank
from kvrelay.step.batch import DeviceLost


class LocalGroup:
    """The meeting point of the ranks. All calls are on one event loop's thread."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.ranks = [LocalRank(self, rank) for rank in range(size)]
        self._given: dict[int, Seq[int]] = {}
        self._every: asyncio.Future[list[list[int]]] | None = None
        self._has_left = False

    async def exchange(self, rank: int, numbers: Seq[int]) -> list[list[int]]:
        self.check()
        if self._every is None:
            self._every = asyncio.get_running_loop().create_future()
        every = self._every
        self._given[rank] = numbers
        if len(self._given) == self.size:
            every.set_result([list(self._given[each]) for each in range(self.size)])
            self._given, self._every = {}, None
        return await asyncio.shield(every)

    def leave(self) -> None:
        self._has_left = True
        if self._every is not None and not self._every.done():
            self._every.set_exception(DeviceLost("a rank has left the group"))
            self._every.exception()  # it may be that none awaits it

    def check(self) -> None:
        if self._has_left:
            raise DeviceLost("a rank has left the group")


class LocalRank:
    """One rank's side. Implements `LockstepGroup`."""

    def __init__(self, group: LocalGroup, rank: int) -> None:
        self.rank = rank
        self._on_wake: Callable[[int], None] = lambda num_passes: None
        self._group = group

    @property
    def size(self) -> int:
        return self._group.size

    async def exchange(self, numbers: Seq[int]) -> list[list[int]]:
        return await self._group.exchange(self.rank, numbers)

    def wake_others(self, num_passes: int) -> None:
        for other in self._group.ranks:
            if other is not self:
                other.woken(num_passes)

    def woken(self, num_passes: int) -> None:
        self._on_wake(num_passes)

    def join(self, me: PeerRef, send: Callable[[PeerRef, WakeRank], None], on_wake: Callable[[int], None]) -> None:
        self._on_wake = on_wake

    def begin_drain(self) -> None: ...

    def peer_lost(self, peer: PeerRef, reason: str) -> None: ...

    async def watch(self) -> None:
        await asyncio.get_running_loop().create_future()

    def close(self) -> None: ...

    def leave(self) -> None:
        self._group.leave()
