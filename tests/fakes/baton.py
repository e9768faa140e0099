"""Threads that run one at a time, in an order that the test chooses: every interleaving can be had again."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tests.fakes.waiting import PATIENCE_S


class Baton:
    """Who holds the baton runs, until its next `step`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._holder: int | None = None
        self._waiting: set[int] = set()
        self._alive: set[int] = set()
        self._own = threading.local()
        self.errors: dict[int, Exception] = {}

    def run(self, works: list[Callable[[], None]], choose: Callable[[int], int]) -> None:
        """Runs all to their ends; `choose(n)` says which of n threads runs next. `errors` has what they raised."""
        self._alive = set(range(len(works)))
        threads = [threading.Thread(target=self._live, args=(number, work)) for number, work in enumerate(works)]
        for thread in threads:
            thread.start()
        while self._all_wait():
            ready = sorted(self._waiting)
            self._pass_to(ready[choose(len(ready))])
        for thread in threads:
            thread.join()

    def step(self) -> None:
        """Others may run here. Without effect outside `run`'s threads."""
        number = getattr(self._own, "number", None)
        if number is None:
            return
        with self._changed:
            self._holder = None
            self._waiting.add(number)
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._holder == number, PATIENCE_S)
            self._waiting.discard(number)

    def _live(self, number: int, work: Callable[[], None]) -> None:
        self._own.number = number
        self.step()
        try:
            work()
        except Exception as error:
            self.errors[number] = error
        with self._changed:
            self._alive.discard(number)
            self._holder = None
            self._changed.notify_all()

    def _all_wait(self) -> bool:
        """Until nobody runs; whether somebody is left."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._holder is None and self._waiting == self._alive, PATIENCE_S)
            return bool(self._alive)

    def _pass_to(self, number: int) -> None:
        with self._changed:
            self._holder = number
            self._changed.notify_all()
