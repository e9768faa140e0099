"""How many generations a router takes, and how many of one tenant."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.text.request.api_error import ApiError
from kvrelay_router.access.identity import Caller
from kvrelay_router.access.rate_limiter import InProgress


def num_admitted(in_progress: InProgress, stack: ExitStack, tenant: str, weight: float = 1.0, fleet: str = "") -> int:
    """Enters generations of a tenant until one is refused."""
    admitted = 0
    while True:
        try:
            stack.enter_context(in_progress.admit(Caller(tenant=tenant, weight=weight), fleet))
        except ApiError:
            return admitted
        admitted += 1


def test_without_tenants_one_client_gets_all_places_and_gives_them_back() -> None:
    in_progress = InProgress(5)
    for _ in range(2):
        with ExitStack() as stack:
            assert num_admitted(in_progress, stack, "") == in_progress.num_requests == 5
        assert in_progress.num_requests == 0


def test_a_refusal_is_429() -> None:
    with pytest.raises(ApiError) as refused, InProgress(0).admit(Caller()):
        raise AssertionError("it was admitted")
    assert refused.value.status == 429


def test_a_flood_leaves_places_for_others() -> None:
    in_progress = InProgress(90, shares=True)
    with ExitStack() as stack:
        assert num_admitted(in_progress, stack, "flood") == 80
        assert num_admitted(in_progress, stack, "light") >= 8
        assert num_admitted(in_progress, stack, "another") >= 1
        assert num_admitted(in_progress, stack, "flood") == 0


def test_a_fleet_that_stalls_leaves_places_for_others() -> None:
    in_progress = InProgress(90, several_fleets=True)
    with ExitStack() as stack:
        assert num_admitted(in_progress, stack, "", fleet="stalled") == 80
        assert num_admitted(in_progress, stack, "", fleet="quick") >= 8
        assert num_admitted(in_progress, stack, "", fleet="stalled") == 0
    with ExitStack() as stack:
        assert num_admitted(in_progress, stack, "", fleet="quick") == 80


def test_a_tenant_may_flood_one_fleet_and_not_all() -> None:
    in_progress = InProgress(90, shares=True, several_fleets=True)
    with ExitStack() as stack:
        assert num_admitted(in_progress, stack, "flood", fleet="a") >= 70
        assert num_admitted(in_progress, stack, "light", fleet="a") >= 1
        assert num_admitted(in_progress, stack, "light", fleet="b") >= 1
        assert num_admitted(in_progress, stack, "flood", fleet="b") == 0


@given(st.integers(1, 40), st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([0.5, 1.0, 4.0])), max_size=60))
def test_never_more_than_the_limit_and_a_tenant_with_none_gets_a_free_place(
    limit: int, arrivals: list[tuple[str, float]]
) -> None:
    in_progress = InProgress(limit, shares=True)
    admitted: set[str] = set()
    with ExitStack() as stack:
        for tenant, weight in arrivals:
            has_room = in_progress.num_requests < limit
            try:
                stack.enter_context(in_progress.admit(Caller(tenant=tenant, weight=weight)))
            except ApiError:
                assert not has_room or tenant in admitted
            else:
                admitted.add(tenant)
            assert in_progress.num_requests <= limit
    assert in_progress.num_requests == 0
