"""Which handoff a decode worker grants next, and what it leaves to those that run."""

from __future__ import annotations

import pytest

from kvrelay.engine.batch import SequenceKey
from kvrelay.scheduling.base import SchedulerSettings
from kvrelay_decode.request import DecodeRequest
from kvrelay_decode.wishes import Wishes
from tests.unit.scheduling.bench import Bench, make_sequence

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(("ratio", "granted"), [(0.0, True), (0.5, True), (1.0, False)])
def test_a_wish_leaves_room_for_what_running_sequences_are_expected_to_draw(ratio: float, granted: bool) -> None:
    """Twelve blocks: two and the next 16 tokens' four are the running one's, the wish is for seven."""
    bench = Bench(num_blocks=12, settings=SchedulerSettings(new_token_ratio=ratio), cache=False)
    running = bench.adopt([1] * 7, 17)
    assert running is not None
    wish = DecodeRequest(make_sequence([2] * 27, 5, "wish"), deadline=1e9)
    requests: dict[SequenceKey, DecodeRequest] = {
        running.key: DecodeRequest(running, deadline=1e9),
        wish.sequence.key: wish,
    }
    wishes = Wishes(bench.scheduler, bench.blocks, requests, lambda request, num_blocks: True)
    wishes.add(wish)
    assert (wishes.next(len(requests)) is wish) is granted
