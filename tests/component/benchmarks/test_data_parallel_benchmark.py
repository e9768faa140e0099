"""The simulated group of the benchmark gives every request its tokens, with the delayer and without."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.data_parallel import VARIANTS, Variant, arrivals_of, row, run
from kvrelay.device_profiles import find_profile
from tests.fakes.virtual_time import VirtualTimeLoop

pytestmark = pytest.mark.component


@pytest.mark.parametrize("variant", VARIANTS[:2], ids=["off", "on"])
def test_every_request_gets_its_tokens(variant: Variant) -> None:
    arrivals = arrivals_of(12, 20.0, balanced=False, burst=1)
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        requests, ranks = runner.run(run(arrivals, find_profile("llama3-8b-h100"), variant))
    assert [len(request.tokens_at_s) for request in requests] == [arrival.num_output for arrival in arrivals]
    assert len({rank.loop.num_passes for rank in ranks}) == 1
    assert row(requests, ranks, variant).count("|") == 11
