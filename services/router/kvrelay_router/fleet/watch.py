"""Keeps the fleet view current from the registry, static workers' records, and workers' status."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection

from kvrelay.fleet import RegistryError, WorkerRecord
from kvrelay.protocol.limits import MOST_ENDED_SESSIONS
from kvrelay.protocol.messages import PeerRef, Stage, Status, StatusQuery
from kvrelay_router.fleet.static_workers import StaticWorkers, merged
from kvrelay_router.fleet.view import FleetView

log = logging.getLogger(__name__)

MEETING_POLL_S = 0.01
ListWorkers = Callable[[], Awaitable[list[WorkerRecord]]]


class FleetWatch:
    """Calls `on_change` after every event that may make a worker ready. Without `list_workers` there is no registry,
    and `static` provides all workers."""

    def __init__(
        self,
        view: FleetView,
        list_workers: ListWorkers | None,
        send: Callable[[PeerRef, StatusQuery], None],
        on_change: Callable[[], None],
        *,
        static: StaticWorkers | None = None,
        registry_interval_s: float = 0.5,
        status_interval_s: float = 1.0,
    ) -> None:
        self.registry_is_away = ""  # the reason
        self._view = view
        self._list_workers = list_workers
        self._static = static
        self._registered: list[WorkerRecord] = []  # last answer of the registry
        self._send = send
        self._on_change = on_change
        self._registry_interval_s = registry_interval_s
        self._status_interval_s = status_interval_s
        self._last_query = 0
        self._ended_sessions: list[str] = []  # since the last regular query
        self._asked: dict[str, str] = {}  # worker id to the incarnation that was asked
        # Awaited workers, their answers, and an event for completion.
        self._questions: dict[int, tuple[set[str], dict[str, Status], asyncio.Event]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._closing = asyncio.Event()
        self._has_looked = asyncio.Event()

    def start(self) -> None:
        """Call it on the event loop."""
        if self._static is not None:
            self._static.start(self._merge)
        self._tasks = [asyncio.create_task(self._watch_registry()), asyncio.create_task(self._ask_regularly())]

    async def close(self) -> None:
        """Stops after the current registry read. It uses an event instead of cancellation, since redis-py may swallow a
        cancellation and the wait would never end."""
        self._closing.set()
        if self._static is not None:
            await self._static.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def on_status(self, peer: PeerRef, status: Status) -> None:
        self._view.answered(peer, status, time.monotonic())
        question = self._questions.get(status.query)
        if question is not None:
            awaited, answered, complete = question
            answered[peer.peer_id] = status
            if awaited <= answered.keys():
                complete.set()
        self._on_change()

    async def met(self) -> None:
        """Waits until the registry was read and each of its workers has answered or is lost."""
        await self._has_looked.wait()
        while self._view.has_joining(time.monotonic()):
            await asyncio.sleep(MEETING_POLL_S)

    async def ask_all(self, timeout_s: float) -> frozenset[str]:
        """Queries every worker now; returns the ids of those that answered in time."""
        return frozenset(await self._ask(self._view.peers(), "", timeout_s))

    async def ask_about(self, request: str, worker_ids: Collection[str], timeout_s: float) -> dict[str, list[Stage]]:
        """Stages of a request on these workers, without workers that did not answer in time."""
        peers = [peer for peer in self._view.peers() if peer.peer_id in worker_ids]
        answered = await self._ask(peers, request, timeout_s)
        return {peer_id: status.stages for peer_id, status in answered.items()}

    async def _ask(self, peers: list[PeerRef], request: str, timeout_s: float) -> dict[str, Status]:
        if not peers:
            return {}
        query = self._next_query()
        answered: dict[str, Status] = {}
        complete = asyncio.Event()
        self._questions[query] = ({peer.peer_id for peer in peers}, answered, complete)
        try:
            for peer in peers:
                self._send(peer, StatusQuery(query=query, request=request))
            await asyncio.wait_for(complete.wait(), timeout_s)
        except TimeoutError:
            pass
        finally:
            del self._questions[query]
        return answered

    def session_ended(self, session_key: str) -> None:
        """The next regular query tells the workers. Sessions beyond `MOST_ENDED_SESSIONS` in between are left out:
        their blocks then stay in the caches like any others."""
        if len(self._ended_sessions) < MOST_ENDED_SESSIONS:
            self._ended_sessions.append(session_key)

    @property
    def registry_state(self) -> str:
        """The registry's state for display: `ok`, `none`, or the reason of the failure."""
        return "none" if self._list_workers is None else self.registry_is_away or "ok"

    async def look(self) -> None:
        """Reads the registry once. If that fails, the last known fleet and static workers remain."""
        if self._list_workers is not None:
            await self._ask_registry(self._list_workers)
        self._merge()

    async def _ask_registry(self, list_workers: ListWorkers) -> None:
        try:
            self._registered = await list_workers()
        except (RegistryError, OSError) as error:
            if not self.registry_is_away:
                log.warning("registry: Redis does not answer, using the last known workers: %s", error)
            self.registry_is_away = str(error) or type(error).__name__
            return
        if self.registry_is_away:
            log.info("registry: Redis answers again")
            self.registry_is_away = ""

    def _merge(self) -> None:
        """Updates the view from the last registry answer and static workers."""
        static = self._static.found() if self._static is not None else []
        records = merged(self._registered, static, self._view.is_gone)
        self._view.registered(records, time.monotonic())
        self._ask_the_new()
        self._on_change()

    def _ask_the_new(self) -> None:
        """Queries new workers at once, since a worker is ready only after its first answer."""
        peers = self._view.peers()
        for peer in peers:
            if self._asked.get(peer.peer_id) != peer.incarnation:
                self._send(peer, StatusQuery(query=self._next_query()))
        self._asked = {peer.peer_id: peer.incarnation for peer in peers}

    async def _watch_registry(self) -> None:
        while not self._closing.is_set():
            try:
                await self.look()
            except Exception:
                log.exception("reading the registry failed")
            self._has_looked.set()
            await self._pause(self._registry_interval_s)

    async def _ask_regularly(self) -> None:
        while not await self._pause(self._status_interval_s):
            query = StatusQuery(query=self._next_query(), ended_sessions=self._ended_sessions)
            self._ended_sessions = []
            for peer in self._view.peers():
                self._send(peer, query)

    async def _pause(self, seconds: float) -> bool:
        """Returns whether the wait ended early because of `close`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closing.wait()
        return self._closing.is_set()

    def _next_query(self) -> int:
        self._last_query += 1
        return self._last_query
