"""The clock of a process that may be suspended counts each interval once, and long gaps as short ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.awake_clock import MAX_GAP_S, AwakeClock

times = st.lists(st.integers(0, 40).map(lambda tenths: 100.0 + tenths / 8), min_size=1, max_size=20)


@given(times)
def test_readings_in_any_order_count_each_interval_once(readings: list[float]) -> None:
    clock = AwakeClock()
    start, newest, elapsed = clock.read(readings[0]), readings[0], 0.0
    for now in readings[1:]:
        elapsed += min(max(0.0, now - newest), MAX_GAP_S)
        newest = max(newest, now)
        assert clock.read(now) - start == pytest.approx(elapsed)


def test_a_time_that_was_taken_earlier_changes_nothing() -> None:
    clock = AwakeClock()
    start = clock.read(10.0)
    for _ in range(100):
        clock.read(10.25)
        clock.read(10.0)
    assert clock.read(10.25) - start == 0.25
