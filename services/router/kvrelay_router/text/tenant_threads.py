"""Threads that tenants take turns at, so that long texts of one do not hold up those of others.

Start-time fair queueing (Goyal, Vin and Cheng, 1996): the next job is that with the earliest start tag. A job's tag is
the end tag of its tenant's job before it, but not less than the tag of the job that started last.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from threading import Lock
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class ThreadShare(NamedTuple):
    """Whose turn a job takes."""

    tenant: str = ""
    weight: float = 1.0


NO_TENANT = ThreadShare()

current_share: ContextVar[ThreadShare] = ContextVar("current_share", default=NO_TENANT)
"""Whose request the current task serves, for work deep below the endpoints."""

MAX_TENANTS = 1024
"""Tenants whose end tags are kept: those that were served most, because clients may choose their names."""


class TenantThreads:
    """Thread-safe. A future that is cancelled before its job starts costs no thread's time."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._lock = Lock()
        self._waiting: list[tuple[float, int, Future[Any], Callable[[], Any]]] = []  # heap by start tag
        self._end_tags: dict[str, float] = {}
        self._last_start = 0.0
        self._num_jobs = 0
        self._num_unfinished = 0

    def submit(self, work: Callable[[], T], cost: float, share: ThreadShare) -> Future[T]:
        """Runs `work` in the turn of this tenant. `cost`: how long it takes, in any unit."""
        future: Future[T] = Future()
        with self._lock:
            if not self._num_unfinished:  # idle threads are not reserved for any tenant
                self._last_start = 0.0
                self._end_tags.clear()
            start = max(self._last_start, self._end_tags.get(share.tenant, 0.0))
            self._end_tags[share.tenant] = start + cost / share.weight
            self._num_jobs += 1
            self._num_unfinished += 1
            heapq.heappush(self._waiting, (start, self._num_jobs, future, work))
            if len(self._end_tags) > 2 * MAX_TENANTS:
                self._prune()
        self._threads.submit(self._run_next)
        return future

    def close(self) -> None:
        """Drops the jobs that wait."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for _, _, future, _ in waiting:
            future.cancel()

    def _run_next(self) -> None:
        while (job := self._take()) is not None:
            future, work = job
            try:
                if not future.set_running_or_notify_cancel():
                    continue
                _run(future, work)
                return
            finally:
                with self._lock:
                    self._num_unfinished -= 1

    def _take(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        with self._lock:
            if not self._waiting:
                return None
            self._last_start, _, future, work = heapq.heappop(self._waiting)  # tags never decrease while jobs run
            return future, work

    def _prune(self) -> None:
        most = heapq.nlargest(MAX_TENANTS, self._end_tags.items(), key=lambda item: item[1])
        self._end_tags = {name: end for name, end in most if end > self._last_start}


def _run(future: Future[Any], work: Callable[[], Any]) -> None:
    try:
        result = work()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
