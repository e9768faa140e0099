"""Ranks with data-parallel attention, each a worker with requests of its own: how one reaches the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from kvrelay.protocol.messages import PeerRef, WakeRank
from kvrelay.step.batch import DeviceLost


class LockstepGroup(Protocol):
    """One rank's connection to the others. All methods are called on the event loop's thread."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    async def exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        """Returns the numbers of all ranks, in the order of ranks. Each rank gives as many. Raises DeviceLost."""
        ...

    def join(self, me: PeerRef, send: Callable[[PeerRef, WakeRank], None], on_wake: Callable[[int], None]) -> None:
        """Exchanges the ranks' addresses. `on_wake` is called if another rank of this process wakes this one. Blocks
        until all ranks have joined. Raises RanksFailed."""
        ...

    def wake_others(self, num_passes: int) -> None:
        """Wakes the other ranks, which take their next pass if they have finished no more than so many. Does not
        wait."""
        ...

    def begin_drain(self) -> None:
        """This rank drains: so do those whose processes it has started."""
        ...

    def peer_lost(self, peer: PeerRef, reason: str) -> None:
        """The messenger has lost a peer, which may be a rank of the group."""
        ...

    async def watch(self) -> None:
        """Runs until another rank is lost, and raises DeviceLost then."""
        ...

    def leave(self) -> None:
        """Ends an `exchange` that waits, now or later, with DeviceLost, for the other ranks too."""
        ...

    def close(self) -> None:
        """Closes the connections, and ends the processes that were started."""
        ...


class LocalGroup:
    """The meeting point of ranks of one process: simulated workers. All calls are on one event loop's thread."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.ranks = [LocalRank(self, rank) for rank in range(size)]
        self._given: dict[int, Sequence[int]] = {}
        self._every: asyncio.Future[list[list[int]]] | None = None
        self._has_left = False

    async def exchange(self, rank: int, numbers: Sequence[int]) -> list[list[int]]:
        if self._has_left:
            raise DeviceLost("a rank has left the group")
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


class LocalRank:
    """One rank's side. Implements `LockstepGroup`."""

    def __init__(self, group: LocalGroup, rank: int) -> None:
        self.rank = rank
        self.size = group.size
        self._on_wake: Callable[[int], None] = lambda num_passes: None
        self._group = group

    async def exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        return await self._group.exchange(self.rank, numbers)

    def wake_others(self, num_passes: int) -> None:
        for other in self._group.ranks:
            if other is not self:
                other._on_wake(num_passes)

    def join(self, me: PeerRef, send: Callable[[PeerRef, WakeRank], None], on_wake: Callable[[int], None]) -> None:
        self._on_wake = on_wake

    def begin_drain(self) -> None: ...

    def peer_lost(self, peer: PeerRef, reason: str) -> None: ...

    async def watch(self) -> None:
        await asyncio.get_running_loop().create_future()

    def close(self) -> None: ...

    def leave(self) -> None:
        self._group.leave()
