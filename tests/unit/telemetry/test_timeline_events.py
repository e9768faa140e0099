"""What workers keep of their latest requests is bounded, and what is asked for is of the request alone."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.telemetry.tracer import MAX_EVENTS, RecentEvents, timeline_event


@given(st.lists(st.integers(0, 5)), st.integers(1, 4))
def test_the_latest_requests_are_kept(added: list[int], num_kept: int) -> None:
    recent = RecentEvents(num_kept)
    for number, request in enumerate(added):
        key = (str(request), 1, 0)
        recent.add(key, [timeline_event(key, str(number), 0.0, 1.0)])
    latest = list(dict.fromkeys(reversed(added)))[:num_kept]
    for request in range(6):
        kept = [each.name for each in recent.of(str(request))]
        if request not in latest:
            assert kept == []
        else:  # a request that was forgotten in between begins anew
            numbers = [str(number) for number, each in enumerate(added) if each == request]
            assert kept == numbers[len(numbers) - len(kept) :] != []


def test_a_request_of_many_stages_does_not_grow_without_bound() -> None:
    recent = RecentEvents()
    key = ("r", 1, 0)
    for _ in range(3):
        recent.add(key, [timeline_event(key, "chunk", 0.0, 1.0)] * (MAX_EVENTS - 10))
    assert len(recent.of("r")) == MAX_EVENTS


def test_times_are_those_of_the_wall_clock() -> None:
    before = time.time()
    now = time.monotonic()
    made = timeline_event(("r", 2, 3), "queue", now, None)
    assert (made.attempt, made.sequence, made.end) == (2, 3, None)
    assert abs(made.start - before) < 60  # not of a clock that began at the machine's start
