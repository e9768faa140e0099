"""The limits of one router alone, against slow oracles."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.fleet.key_limits import KeyLimits, LocalLimits, OwnLimits, Refusal

TIMES = st.lists(st.floats(0, 5), min_size=1, max_size=80)


@given(TIMES, st.integers(1, 5), st.sampled_from([60.0, 120.0, 600.0]))
def test_no_window_ever_holds_more_than_burst_and_rate(gaps: list[float], burst: int, rpm: float) -> None:
    limits, local, now = KeyLimits(rpm, burst), LocalLimits(), 100.0
    admitted: list[float] = []
    for number, gap in enumerate(gaps):
        now += gap
        refusal = local.enter("k", limits, str(number), 1.0, now)
        if refusal is None:
            admitted.append(now)
        else:
            assert refusal.limit == "rate"
            assert local.enter("k", limits, "x", 1.0, now + refusal.retry_after_s + 1e-6) is None
            admitted.append(now + refusal.retry_after_s + 1e-6)
            now = admitted[-1]
    for first in range(len(admitted)):
        for last in range(first, len(admitted)):
            assert last - first + 1 <= burst + (admitted[last] - admitted[first]) * rpm / 60 + 1e-6


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.floats(0, 0.5))), st.integers(1, 4))
def test_never_more_at_a_time_and_leases_end_by_themselves(
    events: list[tuple[bool, int, float]], concurrency: int
) -> None:
    limits, local, now = KeyLimits(concurrency=concurrency), LocalLimits(), 0.0
    oracle: dict[str, float] = {}
    for number, (enters, which, gap) in enumerate(events):
        now += gap
        oracle = {name: end for name, end in oracle.items() if end > now}
        if enters:
            refusal = local.enter("k", limits, str(number), 1.0, now)
            assert (refusal is None) == (len(oracle) < concurrency)
            if refusal is None:
                oracle[str(number)] = now + 1.0
            else:
                assert refusal.limit == "concurrency" and refusal.retry_after_s > 0
        elif oracle:
            name = sorted(oracle)[which % len(oracle)]
            del oracle[name]
            local.leave("k", name)


def test_keys_do_not_count_for_each_other() -> None:
    local, limits = LocalLimits(), KeyLimits(60, 1, 1)
    assert local.enter("a", limits, "1", 9.0, 0.0) is None
    assert isinstance(local.enter("a", limits, "2", 9.0, 0.0), Refusal)
    assert local.enter("b", limits, "3", 9.0, 0.0) is None
    local.leave("c", "3")


async def test_without_redis_a_process_limits_its_own_requests() -> None:
    now = 0.0
    own, limits = OwnLimits(clock=lambda: now), KeyLimits(concurrency=1)
    assert await own.enter("a", limits, "1", 9.0) is None
    assert isinstance(await own.enter("a", limits, "2", 9.0), Refusal)
    await own.leave("a", "1")
    assert await own.enter("a", limits, "2", 9.0) is None
    now = 10.0  # its lease has ended
    assert await own.enter("a", limits, "3", 9.0) is None
    await own.close()
