"""Keeps the fleet view current from the registry, the records of workers at given addresses, and workers' status.

Static workers are polled at a list of addresses, so Redis is not needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from kvrelay.config.router import static_worker_address
from kvrelay.fleet import RegistryError, WorkerRecord
from kvrelay.fleet.worker_registry import RECORD_PAGE, record_from_json
from kvrelay.protocol.limits import MOST_ENDED_SESSIONS
from kvrelay.protocol.messages import PeerRef, Status, StatusQuery, TimelineEvent
from kvrelay_router.fleet.view import FleetView

log = logging.getLogger(__name__)

ListWorkers = Callable[[], Awaitable[list[WorkerRecord]]]
MEETING_POLL_S = 0.01
ANSWER_TIMEOUT_S = 2.0
MAX_ANSWER_BYTES = 64 << 10
SHOWN_BYTES = 200


@dataclass(slots=True)
class StaticWorker:
    """The worker at one address."""

    url: str
    record: WorkerRecord | None = None
    """The last record received."""
    silence: str = ""
    """The last error; empty after an answer, and before the first request."""
    later: str = ""
    """The incarnation of a later process with its worker id at another address."""


class StaticWorkers:
    """Polls each URL every `interval_s` for a worker of `model`. Call `start` on the event loop.

    A worker of one of `other_models` is ignored: another fleet of this router has it.
    """

    def __init__(
        self,
        urls: Sequence[str],
        model: str,
        interval_s: float = 0.5,
        *,
        other_models: frozenset[str] = frozenset(),
    ) -> None:
        self._workers = [StaticWorker(url) for url in urls]
        self._model = model
        self._other_models = other_models
        self._interval_s = interval_s
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, on_change: Callable[[], None]) -> None:
        """Starts polling. Calls `on_change` when an answer changed."""
        self._tasks = [asyncio.create_task(self._watch(worker, on_change)) for worker in self._workers]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def found(self) -> list[StaticWorker]:
        """Workers that have answered at least once."""
        return [worker for worker in self._workers if worker.record is not None]

    async def _watch(self, worker: StaticWorker, on_change: Callable[[], None]) -> None:
        while True:
            try:
                if await self._ask(worker):
                    on_change()
            except Exception:
                log.exception("polling the static worker %s failed", worker.url)
            await asyncio.sleep(self._interval_s)

    async def _ask(self, worker: StaticWorker) -> bool:
        """Polls once; returns whether the answer changed."""
        try:
            record = self._read(await _get(worker.url))
            if record.model in self._other_models:
                return self._leaves(worker, record.model)
        except (OSError, TimeoutError, ValueError) as error:
            silence = str(error) or "no answer in time"
            has_changed = silence != worker.silence
            if has_changed:
                log.warning("static worker %s: %s", worker.url, silence)
            worker.silence = silence
            return has_changed
        was, worker.record, worker.silence = worker.record, record, ""
        self._warn_of_later(worker, record)
        if was is None or was.incarnation != record.incarnation:
            log.info("static worker %s is %s, incarnation %s", worker.url, record.worker_id, record.incarnation)
        return record != was

    def _warn_of_later(self, worker: StaticWorker, record: WorkerRecord) -> None:
        """One line if this worker still runs although a later one has its id, so that only that one is used."""
        for other in self._workers:
            found = other.record
            if found is None or other.silence or record.draining or found.worker_id != record.worker_id:
                continue
            if found.incarnation > record.incarnation and found.incarnation != worker.later:
                worker.later = found.incarnation
                text = (
                    "static workers %s and %s are both worker %s, only the second is used: give each its own worker_id"
                )
                log.warning(text, worker.url, other.url, record.worker_id)

    def _leaves(self, worker: StaticWorker, model: str) -> bool:
        """The address serves another fleet now. Returns whether its worker was in this one."""
        was, worker.record, worker.silence = worker.record, None, ""
        if was is not None:
            log.info("static worker %s serves %s now, no longer %s", worker.url, model, self._model)
        return was is not None

    def _read(self, data: bytes) -> WorkerRecord:
        """Decodes a record. Raises ValueError unless it is a worker of this router's models."""
        try:
            record = record_from_json(data)
        except msgspec.DecodeError as error:
            raise ValueError(f"{RECORD_PAGE} is not a worker record: {error}") from error
        if record.model != self._model and record.model not in self._other_models:
            raise ValueError(f"it serves the model {record.model}, this router {self._model}")
        if not record.address.startswith("tcp://"):
            raise ValueError(f"its address {record.address!r} is not tcp://HOST:PORT")
        return record


def merged(
    registered: Iterable[WorkerRecord], static: Iterable[StaticWorker], is_gone: Callable[[WorkerRecord], bool]
) -> list[WorkerRecord]:
    """Merges registry and static records to one record per worker id. `is_gone` tells whether an incarnation is
    replaced, lost or incompatible.

    The registry's record takes precedence because it has more data (slot, drain mark). A worker's own record replaces
    it only if it is a later incarnation, or the registry's incarnation is gone: leases outlive workers, and clocks may
    be set back. A worker that does not answer keeps its last record until it is gone, since only its page may be
    unreachable.
    """
    records = {record.worker_id: record for record in registered}
    for worker in static:
        if (record := worker.record) is None:
            continue
        known = records.get(record.worker_id)
        if worker.silence:
            counts = known is None and not is_gone(record)
        else:
            counts = known is None or record.incarnation > known.incarnation or _succeeds(record, known, is_gone)
        if counts:
            records[record.worker_id] = record
    return list(records.values())


def _succeeds(record: WorkerRecord, known: WorkerRecord, is_gone: Callable[[WorkerRecord], bool]) -> bool:
    return record.incarnation != known.incarnation and is_gone(known)


async def _get(url: str) -> bytes:
    """Fetches the page. HTTP/1.0 makes the end of the connection the end of the answer, also through a proxy.

    Raises OSError, TimeoutError, and ValueError for a status other than 200.
    """
    host, port = static_worker_address(url)
    async with asyncio.timeout(ANSWER_TIMEOUT_S):
        reader, writer = await asyncio.open_connection(host, port)
        try:
            writer.write(f"GET {RECORD_PAGE} HTTP/1.0\r\nhost: {url.removeprefix('http://')}\r\n\r\n".encode())
            answer = bytearray()
            while part := await reader.read(MAX_ANSWER_BYTES):
                answer += part
                if len(answer) > MAX_ANSWER_BYTES:
                    raise ValueError(f"{RECORD_PAGE} has more than {MAX_ANSWER_BYTES} bytes")
        finally:
            writer.close()
    head, _, body = bytes(answer).partition(b"\r\n\r\n")
    status = head.split(b"\r\n", 1)[0].split(b" ", 2)
    if len(status) < 2 or not status[0].startswith(b"HTTP/1."):
        raise ValueError("the server does not speak HTTP")
    if status[1] != b"200":
        said = body[:SHOWN_BYTES].decode("utf-8", "replace").strip()
        raise ValueError(f"{RECORD_PAGE} answers {status[1].decode('latin-1')} {said}")
    return body


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
        self.view = view
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
        self.view.answered(peer, status, time.monotonic())
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
        while self.view.has_joining(time.monotonic()):
            await asyncio.sleep(MEETING_POLL_S)

    async def ask_all(self, timeout_s: float) -> frozenset[str]:
        """Queries every worker now; returns the ids of those that answered in time."""
        return frozenset(await self._ask(self.view.peers(), "", timeout_s))

    async def ask_about(
        self, request: str, worker_ids: Collection[str], timeout_s: float
    ) -> dict[str, list[TimelineEvent]]:
        """Events of a request on these workers, without workers that did not answer in time."""
        peers = [peer for peer in self.view.peers() if peer.peer_id in worker_ids]
        answered = await self._ask(peers, request, timeout_s)
        return {peer_id: status.events for peer_id, status in answered.items()}

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
        records = merged(self._registered, static, self.view.is_gone)
        self.view.registered(records, time.monotonic())
        self._ask_the_new()
        self._on_change()

    def _ask_the_new(self) -> None:
        """Queries new workers at once, since a worker is ready only after its first answer."""
        peers = self.view.peers()
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
            for peer in self.view.peers():
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
