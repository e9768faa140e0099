"""A rank with data-parallel attention whose others are processes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from kvrelay.engine.parallel.group_coordinator import GroupCoordinator
from kvrelay.protocol.messages import PeerRef, WakeRank
from kvrelay.ranks.local_ranks import END_WITHIN_S, LocalRanks, RanksFailed
from kvrelay.step.batch import DeviceLost


class ProcessRank:
    """A rank whose others are processes. Implements `LockstepGroup`."""

    def __init__(self, coordinator: GroupCoordinator, local: LocalRanks) -> None:
        """`local`: the processes of other ranks that this one has started: none on other ranks than the first."""
        self.rank = coordinator.rank
        self.size = coordinator.size
        self._coordinator = coordinator
        self._local = local
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="lockstep")
        self._peers: list[PeerRef] = []
        self._send: Callable[[PeerRef, WakeRank], None] = lambda peer, body: None
        self._lost: asyncio.Future[str] | None = None
        self._is_draining = False
        self._is_lost = False  # without a drain
        # Of a process that has ended the connections close, except if it ends in the middle of a collective in C.
        local.first_end.add_done_callback(lambda _: coordinator.leave())

    def join(self, me: PeerRef, send: Callable[[PeerRef, WakeRank], None], on_wake: Callable[[int], None]) -> None:
        own = json.dumps([me.peer_id, me.incarnation, me.address])
        try:
            peers = [PeerRef(*json.loads(text)) for text in self._coordinator.all_texts(own)]
        except DeviceLost as error:
            raise RanksFailed(self._local.why_lost(str(error))) from error
        self._peers = [peer for rank, peer in enumerate(peers) if rank != self.rank]
        self._send = send

    async def exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._executor, self._coordinator.exchange, numbers)
        except DeviceLost:
            self._is_lost = not self._is_draining
            raise

    def wake_others(self, num_passes: int) -> None:
        for peer in self._peers:
            self._send(peer, WakeRank(num_passes=num_passes))

    def begin_drain(self) -> None:
        self._is_draining = True
        self._local.terminate()

    def peer_lost(self, peer: PeerRef, reason: str) -> None:
        if peer in self._peers and self._lost is not None and not self._lost.done():
            self._lost.set_result(f"{peer.peer_id}, a rank of this group, is lost: {reason}")

    async def watch(self) -> None:
        lost = self._lost = asyncio.get_running_loop().create_future()
        ended = asyncio.wrap_future(self._local.first_end)
        await asyncio.wait([lost, ended], return_when=asyncio.FIRST_COMPLETED)
        self._is_lost = not self._is_draining
        raise DeviceLost(lost.result() if lost.done() else ended.result())

    def leave(self) -> None:
        self._coordinator.leave()

    def close(self) -> None:
        self._executor.shutdown(wait=False)
        self._coordinator.close()
        # A lost group does not end by itself, and requests wait for the end of this process.
        self._local.close(0.0 if self._is_lost else END_WITHIN_S)
