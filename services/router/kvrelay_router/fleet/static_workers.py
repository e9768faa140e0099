"""Finds workers by a list of addresses: polls each for its record, so Redis is not needed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from kvrelay.config.router import static_worker_address
from kvrelay.fleet import WorkerRecord
from kvrelay.fleet.worker_record import RECORD_PAGE, record_from_json

log = logging.getLogger(__name__)

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
        if was is None or was.incarnation != record.incarnation:
            log.info("static worker %s is %s, incarnation %s", worker.url, record.worker_id, record.incarnation)
        return record != was

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
