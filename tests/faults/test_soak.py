"""The soak's own code, in a run of half a minute; `make test-soak` is the long one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.soak import KINDS, growth_of, print_report, run_soak
from tests.faults.storm.processes import Holding


@pytest.mark.timeout(600)
def test_half_a_minute_of_mixed_load_leaves_nothing(tmp_path: Path) -> None:
    soaked = run_soak(tmp_path, 30.0)
    print_report(soaked)
    assert set(soaked.requests) == set(KINDS)
    assert {"router", "prefill-0", "prefill-1", "decode-0", "decode-1"} <= set(soaked.samples)


def held(resident_mb: float, descriptors: int = 20) -> Holding:
    return Holding(descriptors, threads=5, resident_mb=resident_mb)


def test_what_grows_is_named_and_what_is_flat_or_only_warms_up_is_not() -> None:
    warms_up = [held(100.0), held(150.0), held(200.0), *[held(210.0)] * 6]
    leaks = [held(100.0 + 20.0 * number) for number in range(9)]
    leaks_descriptors = [held(100.0, 20 + 5 * number) for number in range(9)]
    assert growth_of({"a": warms_up, "b": [held(1.0)]}) == []
    assert growth_of({"a": leaks}) == ["a: resident_mb grew from 180 to 240"]
    assert growth_of({"a": leaks_descriptors}) == ["a: descriptors grew from 40 to 55"]
