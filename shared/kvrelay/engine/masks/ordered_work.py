"""Threads for work that must be done in order for each object and in any order between objects.

One thread does the work of all objects. If its queue takes too long, other threads help, so that one object whose work
is slow delays no other.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from threading import Event, Lock, Thread
from time import perf_counter


class OrderedWork:
    """The work of one object. `put` and `WorkThreads.submit` are called on one thread at a time."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._lock = Lock()  # held by the thread that does the work
        self._num_put = 0
        self._num_done = 0
        self._began_at: float | None = None
        self._watch: _Countdown | None = None

    def put(self, work: Callable[[], None]) -> None:
        """Adds work. `do` must not raise for it. `WorkThreads.submit` has it done."""
        self._num_put += 1
        self._waiting.append(work)

    def do(self, work: Callable[[], None]) -> None:
        """Does one piece of work."""
        work()

    @property
    def is_done(self) -> bool:
        """Returns whether all work is done."""
        return self._num_done == self._num_put

    def took_s(self) -> float:
        """Seconds since the work that is being done began, 0 if none is."""
        began_at = self._began_at
        return 0.0 if began_at is None else perf_counter() - began_at

    def watch(self, watch: _Countdown | None) -> None:
        self._watch = watch
        if watch is not None and self.is_done:  # a thread that ends it from now on sees the watch
            watch.note(self)

    def perform(self) -> None:
        """Does what waits, unless another thread is doing that. Called by `WorkThreads`."""
        # A thread that finds the lock taken leaves its work to the other one, which looks again after the release.
        while self._waiting and self._lock.acquire(blocking=False):
            try:
                while self._waiting:
                    work = self._waiting.popleft()
                    self._began_at = perf_counter()
                    self.do(work)
                    self._began_at = None
                    self._num_done += 1
            finally:
                self._lock.release()
            watch = self._watch
            if watch is not None and self.is_done:
                watch.note(self)


class _Countdown:
    """Sets `reached` when all but `num_left` of these are done."""

    def __init__(self, work: Iterable[OrderedWork], num_left: int) -> None:
        self.reached = Event()
        self._left = set(work)
        self._num_left = num_left
        self._lock = Lock()

    def note(self, done: OrderedWork) -> None:
        with self._lock:
            self._left.discard(done)
            if len(self._left) <= self._num_left:
                self.reached.set()


def wait(work: Collection[OrderedWork], timeout_s: float, *, for_first: bool = False) -> bool:
    """Returns when all of it is done, or with `for_first` the first; False if that takes longer."""
    watch = _Countdown(work, len(work) - 1 if for_first else 0)
    for each in work:
        each.watch(watch)
    reached = watch.reached.wait(timeout_s)
    for each in work:
        each.watch(None)
    return reached


@dataclass(slots=True)
class _Queue:
    """What the threads of a `WorkThreads` share. They keep it alive, and not their owner."""

    work: deque[OrderedWork] = field(default_factory=deque)
    filled: Event = field(default_factory=Event)
    current: dict[int, OrderedWork] = field(default_factory=dict)  # key: number of the thread
    is_closed: bool = False

    def serve(self) -> None:
        """The first thread. It ends with the owner."""
        while not self.is_closed:
            self.help(0)
            self.filled.wait()
            self.filled.clear()

    def help(self, number: int) -> None:
        """Does work until none waits."""
        while self.work:
            try:
                work = self.work.popleft()
            except IndexError:
                break  # another thread was faster
            self.current[number] = work
            work.perform()
            self.current.pop(number, None)

    def close(self) -> None:
        self.is_closed = True
        self.filled.set()


class WorkThreads:
    """Threads that end with the owner of this object."""

    def __init__(self, name: str, max_threads: int, hangs_after_s: Callable[[], float]) -> None:
        """`max_threads` does not count threads whose present work takes longer than `hangs_after_s`."""
        self._name = name
        self._max_threads = max_threads
        self._hangs_after_s = hangs_after_s
        self._queue = _Queue()
        self._num_started = 0
        weakref.finalize(self, self._queue.close)

    def submit(self, work: Iterable[OrderedWork]) -> None:
        """Has what was put into these done."""
        self._queue.work.extend(work)
        if self._num_started:
            self._queue.filled.set()
        else:
            self._start(self._queue.serve)

    def help(self) -> None:
        """Starts another thread until the queue is empty, if work waits and there may be one more."""
        limit_s = self._hangs_after_s()
        busy = [each for each in list(self._queue.current.values()) if each.took_s() <= limit_s]
        if self._queue.work and len(busy) < self._max_threads:
            number = self._num_started
            self._start(lambda queue=self._queue: queue.help(number))  # type: ignore[misc]

    def _start(self, target: Callable[[], None]) -> None:
        # A daemon: work that hangs does not keep the process from ending.
        Thread(target=target, name=f"{self._name}-{self._num_started}", daemon=True).start()
        self._num_started += 1
