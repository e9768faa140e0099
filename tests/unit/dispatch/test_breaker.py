"""The breaker against a slow account of what happened, and one by one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay_router.fleet import load
from kvrelay_router.fleet.load import Breakers, BreakerState, worker_key
from kvrelay_router.routing.estimates import Candidate, CandidateWorkers
from tests.unit.dispatch.world import peer

BAD, GOOD = (Candidate(peer(name), "decode", "m") for name in ("bad", "good"))
KEY = worker_key(BAD.peer)
BOTH = CandidateWorkers.of([BAD, GOOD])


@pytest.fixture(autouse=True, scope="module")
def few_failures() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(load, "THRESHOLD", 3)
        patched.setattr(load, "LONGEST_S", 8.0)
        yield


def opened(now: float = 0.0) -> Breakers:
    breakers = Breakers()
    assert [breakers.failed(KEY, now) for _ in range(3)] == [False, False, True]
    return breakers


def test_failures_in_a_row_open_and_a_success_between_starts_the_count_again() -> None:
    breakers = Breakers()
    for _ in range(5):
        breakers.failed(KEY, 0.0)
        breakers.failed(KEY, 0.0)
        breakers.succeeded(KEY)
    assert breakers.usable(BOTH, 0.0) == BOTH
    assert opened().usable(BOTH, 0.0).decode == (GOOD,)


def test_after_the_cooldown_one_request_probes_and_no_second_one() -> None:
    breakers = opened()
    assert breakers.usable(BOTH, 1.9).decode == (GOOD,)
    assert breakers.usable(BOTH, 2.0) == BOTH and breakers.state(KEY, 2.0) is BreakerState.HALF_OPEN
    breakers.dispatched(KEY, 2.0)
    assert breakers.usable(BOTH, 2.1).decode == (GOOD,)
    breakers.succeeded(KEY)
    assert breakers.usable(BOTH, 2.2) == BOTH and breakers.state(KEY, 2.2) is BreakerState.CLOSED


def test_a_probe_that_fails_opens_for_twice_as_long_up_to_a_limit() -> None:
    breakers, now = opened(), 0.0
    for cooldown_s in (2.0, 4.0, 8.0, 8.0):
        assert breakers.usable(BOTH, now + cooldown_s - 0.1).decode == (GOOD,)
        now += cooldown_s
        breakers.dispatched(KEY, now)
        assert breakers.failed(KEY, now)


def test_a_probe_without_a_verdict_is_followed_by_another() -> None:
    breakers = opened()
    breakers.dispatched(KEY, 2.0)
    assert breakers.usable(BOTH, 3.9).decode == (GOOD,)
    assert breakers.usable(BOTH, 4.0) == BOTH


def test_late_failures_of_requests_sent_before_do_not_prolong_it() -> None:
    breakers = opened()
    assert not breakers.failed(KEY, 1.0)
    assert breakers.usable(BOTH, 2.0) == BOTH


def test_the_last_workers_of_a_role_are_tried_all_the_same() -> None:
    assert opened().usable(CandidateWorkers.of([BAD]), 0.0).decode == (BAD,)


def test_a_new_start_of_the_worker_is_closed() -> None:
    breakers = opened()
    breakers.gone("bad")
    assert breakers.state(KEY, 0.0) is BreakerState.CLOSED


@given(st.lists(st.tuples(st.sampled_from(["fail", "succeed", "send", "look"]), st.floats(0, 3))))
def test_at_most_one_request_in_any_cooldown_reaches_an_open_worker(events: list[tuple[str, float]]) -> None:
    breakers, now = Breakers(), 0.0
    sent: list[float] = []
    for event, gap in events:
        now += gap
        if event == "fail":
            breakers.failed(KEY, now)
        elif event == "succeed":
            breakers.succeeded(KEY)
            sent.clear()
        elif BAD in breakers.usable(BOTH, now).decode:
            if breakers.state(KEY, now) is BreakerState.HALF_OPEN and event == "send":
                assert not sent or now - sent[-1] >= load.COOLDOWN_S
                sent.append(now)
            if event == "send":
                breakers.dispatched(KEY, now)
