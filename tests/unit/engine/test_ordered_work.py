"""Threads that do the work of each object in order."""

from __future__ import annotations

from functools import partial
from threading import Event

from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.engine.masks.grammar_state import OrderedWork, WorkThreads, wait
from tests.fakes.waiting import PATIENCE_S
from tests.thoroughness import examples


@settings(max_examples=examples(50))
@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=40))
def test_the_work_of_each_object_is_done_once_and_in_order(puts: list[tuple[int, bool]]) -> None:
    """With threads that help after some of the puts."""
    threads = WorkThreads("test", 3, lambda: 1.0)
    objects = [OrderedWork() for _ in range(4)]
    done: list[list[int]] = [[] for _ in objects]
    for number, (which, helped) in enumerate(puts):
        objects[which].put(partial(done[which].append, number))
        threads.submit([objects[which]])
        if helped:
            threads.help()
    assert wait(objects, PATIENCE_S)
    assert done == [[at for at, (which, _) in enumerate(puts) if which == each] for each in range(4)]


def test_slow_work_delays_no_other() -> None:
    threads = WorkThreads("test", 2, lambda: PATIENCE_S)
    slow, other, go_on, begun, ended = OrderedWork(), OrderedWork(), Event(), Event(), Event()

    def block() -> None:
        begun.set()
        go_on.wait(PATIENCE_S)

    slow.put(block)
    slow.put(ended.set)
    other.put(lambda: None)
    threads.submit([slow, other])
    assert begun.wait(PATIENCE_S)
    threads.help()
    assert wait([slow, other], PATIENCE_S, for_first=True)
    assert other.is_done and not slow.is_done and not ended.is_set() and slow.took_s() > 0
    go_on.set()
    assert wait([slow], PATIENCE_S) and ended.is_set() and slow.took_s() == 0


def test_no_more_threads_help_than_may_but_for_those_that_hang() -> None:
    limit_s = [PATIENCE_S]
    threads = WorkThreads("test", 1, lambda: limit_s[0])
    stuck, other, go_on, begun = OrderedWork(), OrderedWork(), Event(), Event()

    def block() -> None:
        begun.set()
        go_on.wait(PATIENCE_S)

    stuck.put(block)
    other.put(lambda: None)
    threads.submit([stuck, other])
    assert begun.wait(PATIENCE_S)
    threads.help()
    assert not other.is_done
    limit_s[0] = 0.0
    threads.help()
    assert wait([other], PATIENCE_S) and not stuck.is_done
    go_on.set()
    assert wait([stuck], PATIENCE_S)
