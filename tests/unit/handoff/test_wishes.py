"""Which handoff a decode worker grants next, and what it leaves to those that run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.engine.batch import SequenceKey
from kvrelay.scheduling.base import QueueOrderName, SchedulerSettings
from kvrelay.scheduling.orders import ORDERS
from kvrelay_decode.handoff import ReceiverHandoff
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
    assert (wishes.next() is wish) is granted


class Waiting:
    """Local prompts and wishes in the order of their arrival on a worker where nothing runs."""

    def __init__(self, settings: SchedulerSettings | None = None, num_blocks: int = 16, max_running: int = 8) -> None:
        self.bench = Bench(num_blocks, max_running=max_running, settings=settings, cache=False)
        self.requests: dict[SequenceKey, DecodeRequest] = {}
        self.wishes = Wishes(self.bench.scheduler, self.bench.blocks, self.requests, lambda request, num_blocks: True)
        self.bench.scheduler.gate = self.wishes.gate

    def local(self, num_tokens: int) -> None:
        sequence = self.bench.add([1] * num_tokens, 3)
        self.requests[sequence.key] = DecodeRequest(sequence, deadline=1e9, arrival=len(self.requests))

    def wish(self, num_tokens: int) -> None:
        sequence = make_sequence([2] * num_tokens, 3, f"wish {len(self.requests)}")
        request = DecodeRequest(sequence, deadline=1e9, arrival=len(self.requests), handoff=ReceiverHandoff())
        self.requests[sequence.key] = request
        self.wishes.add(request)

    @property
    def somebody_moves(self) -> bool:
        return self.wishes.next() is not None or bool(self.bench.scheduler.schedule().rows)


def test_a_prompt_that_the_queue_prefers_does_not_wait_for_a_wish_that_waits_for_the_oldest_prompt() -> None:
    waiting = Waiting(SchedulerSettings(queue_order="sjf"))
    waiting.local(30)
    waiting.wish(4)
    waiting.local(4)
    assert waiting.wishes.next() is None
    assert waiting.somebody_moves


def test_a_wish_for_the_whole_pool_needs_no_headroom_for_prompts_that_wait_for_it() -> None:
    waiting = Waiting(num_blocks=8)
    waiting.wish(32)
    waiting.local(4)
    assert waiting.somebody_moves


def test_prompts_that_wait_for_a_wish_take_none_of_the_places_for_running_ones() -> None:
    waiting = Waiting(max_running=2)
    waiting.wish(4)
    waiting.local(4)
    waiting.local(4)
    assert waiting.somebody_moves


@given(
    st.lists(st.tuples(st.booleans(), st.integers(1, 32)), min_size=1, max_size=6),
    st.sampled_from(list(ORDERS)),
    st.integers(1, 3),
)
def test_where_nothing_runs_somebody_moves(
    arrivals: list[tuple[bool, int]], order: QueueOrderName, max_running: int
) -> None:
    waiting = Waiting(SchedulerSettings(queue_order=order), num_blocks=8, max_running=max_running)
    for is_wish, num_tokens in arrivals:
        if is_wish:
            waiting.wish(num_tokens)
        else:
            waiting.local(num_tokens)
    assert waiting.somebody_moves
