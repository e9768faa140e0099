"""One sequence's state in its grammar, and the threads that do its work in order.

The work of different sequences has no order.

One thread does the work of all objects. If its queue takes too long, other threads help, so that one object whose work
is slow delays no other.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread
from time import perf_counter

import numpy as np

from kvrelay.grammar.grammar_compiler import GrammarError, GrammarMatcher, TokenMask
from kvrelay.step.batch import GrammarWork


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
        """Does the waiting work, unless another thread is doing it. Called by `WorkThreads`."""
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


class WorkThreads:
    """Threads that end with the owner of this object."""

    def __init__(self, name: str, max_threads: int, hangs_after_s: Callable[[], float]) -> None:
        """`max_threads` does not count threads whose present work takes longer than `hangs_after_s`."""
        self._name = name
        self._max_threads = max_threads
        self._hangs_after_s = hangs_after_s
        self._queue: SimpleQueue[OrderedWork | None] = SimpleQueue()  # None: the owner has ended
        self._current: dict[int, OrderedWork] = {}  # key: number of the thread
        self._num_started = 0
        weakref.finalize(self, self._queue.put, None)

    def submit(self, work: Iterable[OrderedWork]) -> None:
        """Has what was put into these done."""
        for each in work:
            self._queue.put(each)
        if not self._num_started:
            self._start(stays=True)

    def help(self) -> None:
        """Starts another thread until the queue is empty, if work waits and there may be one more."""
        limit_s = self._hangs_after_s()
        busy = [each for each in list(self._current.values()) if each.took_s() <= limit_s]
        if not self._queue.empty() and len(busy) < self._max_threads:
            self._start(stays=False)

    def _start(self, *, stays: bool) -> None:
        # A daemon: work that hangs does not keep the process from ending. It does not keep the owner alive either.
        arguments = (self._queue, self._current, self._num_started, stays)
        Thread(target=_work, args=arguments, name=f"{self._name}-{self._num_started}", daemon=True).start()
        self._num_started += 1


def _work(queue: SimpleQueue[OrderedWork | None], current: dict[int, OrderedWork], number: int, stays: bool) -> None:
    """Does the queued work, until the owner has ended if it `stays`, else until the queue is empty."""
    with suppress(Empty):
        while (work := queue.get(block=stays)) is not None:
            current[number] = work
            work.perform()
            current.pop(number, None)
            del work  # not kept alive while there is none
        queue.put(None)  # so that the other threads end too


MAX_RUN_TOKENS = 64
"""Forced tokens that join an output at once. The rest of a longer run follows behind the next token."""


class GrammarCounters:
    """Sums up work of several threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._work = GrammarWork()

    def compiled(self, seconds: float, *, is_known: bool) -> None:
        with self._lock:
            self._work.num_compiled += not is_known
            self._work.num_found += is_known
            self._work.compile_s += seconds

    def forced(self, num_tokens: int) -> None:
        with self._lock:
            self._work.num_forced_tokens += num_tokens

    def filled(self, seconds: float) -> None:
        with self._lock:
            self._work.num_masks += 1
            self._work.mask_s += seconds

    def take(self) -> GrammarWork | None:
        with self._lock:
            work = self._work
            if not (work.num_masks or work.num_compiled or work.num_found or work.num_forced_tokens):
                return None
            self._work = GrammarWork()
        return work


class GrammarState(OrderedWork):
    """A matcher, and the mask of the token that comes next. Other threads read it once all work is done."""

    def __init__(self, done: GrammarCounters) -> None:
        super().__init__()
        self.mask: TokenMask = np.zeros(0, np.int32)
        self.error: Exception | None = None
        self.is_constant = False
        """Whether the mask does not depend on the output."""
        self.allows_all = False
        """Whether every token is allowed from here on."""
        self._run: list[int] = []
        self._behind_run: GrammarMatcher | None = None
        self._matcher: GrammarMatcher | None = None
        self._done = done
        self._drafts: Sequence[int] = ()
        self.ahead: list[TokenMask] = []
        """The masks behind the first drafts, as far as the grammar allows these."""

    def do(self, work: Callable[[], None]) -> None:
        """Does the work, unless some failed before."""
        if self.error is None:
            try:
                work()
            except Exception as error:  # raised when the mask is read
                self.error = error

    def begin(self, matcher: GrammarMatcher, mask_words: int, output_ids: Sequence[int]) -> None:
        self._matcher = matcher
        self.mask = np.zeros(mask_words, np.int32)
        matcher.accept(output_ids)
        self.fill()

    def go_on(self, token_ids: Sequence[int]) -> None:
        """Appends tokens, and computes the mask of the token behind them."""
        self._accept(token_ids)
        self.fill()

    def _accept(self, token_ids: Sequence[int]) -> None:
        assert self._matcher is not None
        self._drafts, self.ahead = (), []
        for token_id in token_ids:  # one by one: end-of-sequence tokens may be among them
            self._matcher.accept([token_id])

    def look_ahead(self, drafts: Sequence[int]) -> None:
        """Computes the masks behind drafts. The drafts are not appended."""
        # A row that was late may come with the same drafts again: it would be late for ever if they were begun anew.
        if drafts == self._drafts[: len(drafts)]:
            return
        assert self._matcher is not None
        self._drafts, self.ahead = drafts, []
        matcher, mask = self._matcher.copy(), self.mask
        with suppress(GrammarError):  # if too complex behind a draft, that is no failure: the draft may be wrong
            for draft in drafts:
                if not mask[draft >> 5] >> (draft & 31) & 1:
                    return
                matcher.accept([draft])
                mask, started = np.zeros_like(mask), perf_counter()
                matcher.fill(mask)
                self._done.filled(perf_counter() - started)
                self.ahead.append(mask)

    def jump(self, token_ids: Sequence[int]) -> None:
        """Appends tokens, and finds those that are forced behind them."""
        self._accept(token_ids)
        assert self._matcher is not None
        self._run, self._behind_run = [], None
        if self._matcher.forced():
            self._behind_run = self._matcher.copy()
            while len(self._run) < MAX_RUN_TOKENS and (forced := self._behind_run.forced()):
                part = forced[: MAX_RUN_TOKENS - len(self._run)]
                self._behind_run.accept(part)
                self._run += part

    def end_run(self) -> list[int]:
        """Appends the tokens that were forced, returns them, and puts the work for the mask behind them. Empty if they
        are not known yet, so the mask allows the first of them; or if the grammar failed, which `masks` raises."""
        run = self._run if self.is_done and self.error is None else []
        if run:
            self._matcher = self._behind_run
            self._done.forced(len(run))
        self.put(self.fill)
        return run

    def fill(self) -> None:
        assert self._matcher is not None
        started = perf_counter()
        self._matcher.fill(self.mask)
        self.allows_all = self._matcher.allows_all
        self._done.filled(perf_counter() - started)
