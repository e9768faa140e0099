"""Histograms and counters, and what travels of them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.telemetry.metrics import SECONDS, Histogram

pytestmark = pytest.mark.unit


@given(st.lists(st.one_of(st.floats(0, 100), st.sampled_from(SECONDS))))
def test_every_value_is_counted_once_in_the_bucket_whose_bound_it_does_not_pass(values: list[float]) -> None:
    histogram = Histogram("s", SECONDS)
    for value in values:
        histogram.record(value)
    report = histogram.report()
    edges = [float("-inf"), *report.bounds, float("inf")]
    oracle = [sum(low < value <= high for value in values) for low, high in itertools.pairwise(edges)]
    assert report.counts == oracle
    assert report.total == pytest.approx(sum(values))
