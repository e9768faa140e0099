"""Which handoff a decode worker grants next, and what it leaves to those that run."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.kv.pool import BlockState
from kvrelay.kv.table import blocks_for
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.scheduling.queue.queue_orders import ORDERS
from kvrelay.scheduling.scheduler_settings import QueueOrderName, SchedulerSettings
from kvrelay.scheduling.sequence import Sequence
from kvrelay_decode.receiver_events import ReservationOpened
from kvrelay_decode.receiver_handoff import ReceiverHandoff
from kvrelay_decode.request import DecodeRequest
from kvrelay_decode.wishes import Wishes
from tests.unit.scheduling.bench import ADOPTED_FIRST_TOKEN, Bench, make_sequence

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

    def __init__(
        self,
        settings: SchedulerSettings | None = None,
        num_blocks: int = 16,
        max_running: int = 8,
        *,
        cache: bool = False,
    ) -> None:
        self.bench = Bench(num_blocks, max_running=max_running, settings=settings, cache=cache)
        self.num_arrivals = 0
        self.requests: dict[SequenceKey, DecodeRequest] = {}
        self.wishes = Wishes(self.bench.scheduler, self.bench.blocks, self.requests, lambda request, num_blocks: True)
        self.bench.scheduler.gate = self.wishes.gate

    def local(self, num_tokens: int, group: str = "", max_tokens: int = 3) -> None:
        self.num_arrivals += 1
        sequence = self.bench.add([1] * num_tokens, max_tokens, group=group)
        self.requests[sequence.key] = DecodeRequest(sequence, deadline=1e9, arrival=self.num_arrivals)

    def wish(self, num_tokens: int, group: str = "", num_siblings: int = 0, max_tokens: int = 3) -> DecodeRequest:
        self.num_arrivals += 1
        sequence = make_sequence([2] * num_tokens, max_tokens, f"wish {self.num_arrivals}")
        sequence.sample_group = group
        if group:
            sequence.key = (group, 1, self.num_arrivals)
        request = DecodeRequest(
            sequence, deadline=1e9, arrival=self.num_arrivals, handoff=ReceiverHandoff(), num_siblings=num_siblings
        )
        self.requests[sequence.key] = request
        self.wishes.add(request)
        return request

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
    st.lists(st.tuples(st.booleans(), st.integers(1, 32), st.integers(0, 3)), min_size=1, max_size=6),
    st.sampled_from(list(ORDERS)),
    st.integers(1, 3),
)
def test_where_nothing_runs_somebody_moves(
    arrivals: list[tuple[bool, int, int]], order: QueueOrderName, max_running: int
) -> None:
    waiting = Waiting(SchedulerSettings(queue_order=order), num_blocks=8, max_running=max_running)
    for number, (is_wish, num_tokens, num_siblings) in enumerate(arrivals):
        group = f"g{number}" if num_siblings else ""
        if is_wish:
            waiting.wish(num_tokens, group, num_siblings)
        else:
            for _ in range(1 + num_siblings):
                waiting.local(num_tokens, group)
    assert waiting.somebody_moves


class Decoding(Waiting):
    """A decode worker in rounds: grants, commits what was granted two rounds before, and makes a step."""

    def __init__(self, num_blocks: int, max_running: int, *, cache: bool) -> None:
        super().__init__(num_blocks=num_blocks, max_running=max_running, cache=cache)
        self.receiving: list[tuple[DecodeRequest, int]] = []
        self.num_received: dict[SequenceKey, int] = {}  # blocks sent for each sequence
        self.round = 0

    def run_round(self) -> bool:
        """Whether anything moved."""
        self.round += 1
        granted = 0
        while (request := self.wishes.next()) is not None:
            self.grant(request)
            granted += 1
        committed = [request for request, landed in self.receiving if landed <= self.round]
        for request in committed:
            self.commit(request)
        plan, outputs = self.bench.step()
        for output in outputs:
            if output.finish is not None:
                self.close(output.sequence)
        return bool(granted or committed or self.receiving or plan.has_work or plan.preempted)

    def close(self, sequence: Sequence) -> None:
        """It is no more."""
        del self.requests[sequence.key]

    def cancel(self, which: int) -> None:
        """Whatever it is doing."""
        if not self.requests:
            return
        request = list(self.requests.values())[which % len(self.requests)]
        if request in list(self.wishes):
            self.wishes.drop(request)
        elif any(request is each for each, _ in self.receiving):
            self.receiving = [each for each in self.receiving if each[0] is not request]
            self.wishes.settled(request)
            self.bench.blocks.free(request.sequence)
        else:
            self.bench.scheduler.abort(request.sequence.key)
        self.close(request.sequence)

    def grant(self, request: DecodeRequest) -> None:
        assert request.handoff is not None
        assert self.bench.blocks.admit(request.sequence, BlockState.RESERVED), "a wish was to be granted without room"
        self.wishes.granted(request)
        first_block = blocks_for(request.sequence.num_computed, self.bench.pool.block_size)
        self.num_received[request.sequence.key] = request.sequence.table.num_blocks - first_block
        request.handoff.handle(ReservationOpened("r", 0, request.sequence.table.num_blocks, needs_quarantine=False))
        self.receiving.append((request, self.round + 2))
        num_running = self.bench.scheduler.num_slots + len(self.receiving)
        assert num_running <= self.bench.scheduler.limits.max_running

    def commit(self, request: DecodeRequest) -> None:
        sequence = request.sequence
        self.receiving = [each for each in self.receiving if each[0] is not request]
        request.handoff = None
        sequence.num_computed = sequence.num_tokens
        sequence.tokens.append(ADOPTED_FIRST_TOKEN)
        self.bench.blocks.change_block_state(sequence, BlockState.RUNNING)
        self.bench.sequences.append(sequence)
        self.bench.scheduler.adopt(sequence)
        self.wishes.settled(request)


@pytest.mark.parametrize(("num_siblings", "granted"), [(0, True), (2, True), (3, False)])
def test_the_first_sample_is_granted_where_there_is_room_for_all(num_siblings: int, granted: bool) -> None:
    """Of four places one is taken."""
    worker = Decoding(num_blocks=32, max_running=4, cache=True)
    worker.local(4, max_tokens=20)
    worker.run_round()
    wish = worker.wish(9, "group" if num_siblings else "", num_siblings)
    assert (worker.wishes.next() is wish) is granted


def test_nobody_else_is_granted_what_is_set_aside_for_the_rest() -> None:
    worker = Decoding(num_blocks=32, max_running=3, cache=True)
    first = worker.wish(9, "group", 2, max_tokens=20)
    worker.run_round()
    other = worker.wish(4)
    worker.local(4)
    for _ in range(4):
        worker.run_round()
    assert worker.bench.scheduler.running.keys() == {first.sequence.key}
    siblings = [worker.wish(9, "group", 1 - number, max_tokens=20) for number in range(2)]
    for _ in range(4):
        worker.run_round()
    assert {first.sequence.key, *(each.sequence.key for each in siblings)} == worker.bench.scheduler.running.keys()
    assert other.sequence.key in worker.requests


@pytest.mark.parametrize("refused", [False, True])
def test_what_is_set_aside_for_samples_that_do_not_come_is_free_again(refused: bool) -> None:
    worker = Decoding(num_blocks=32, max_running=2, cache=True)
    worker.wish(9, "group", 1, max_tokens=6)
    worker.run_round()
    other = worker.wish(4, max_tokens=2)
    worker.run_round()
    if refused:  # the sibling asks, and is given up before it is granted
        sibling = worker.wish(9, "group")
        del worker.requests[sibling.sequence.key]
        worker.wishes.drop(sibling)
        assert worker.wishes.next() is other
    for _ in range(20):
        worker.run_round()
    assert not worker.requests


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(st.booleans(), st.integers(1, 24), st.integers(0, 3), st.integers(2, 12), st.integers(0, 3)),
        min_size=1,
        max_size=8,
    ),
    st.integers(1, 5),
    st.integers(0, 3),
    st.booleans(),
    st.dictionaries(st.integers(0, 40), st.integers(0, 99), max_size=4),
)
def test_groups_are_handed_over_and_run_and_nobody_waits_for_ever(
    arrivals: list[tuple[bool, int, int, int, int]],
    max_running: int,
    num_silent: int,
    cache: bool,
    cancels: dict[int, int],
) -> None:
    """Some samples never ask: those that end with their first token, or whose client is gone. Some are cancelled."""
    worker = Decoding(num_blocks=12, max_running=max_running, cache=cache)
    for number, (is_wish, num_tokens, num_siblings, max_tokens, gap) in enumerate(arrivals):
        group = f"g{number}" if num_siblings else ""
        if is_wish:
            worker.wish(num_tokens, group, num_siblings, max_tokens)
            for _ in range(gap):
                worker.run_round()
            for left in reversed(range(max(0, num_siblings - num_silent))):
                worker.wish(num_tokens, group, left, max_tokens)
        else:
            for _ in range(1 + num_siblings):
                worker.local(num_tokens, group, max_tokens)
    for number in range(1500):
        if number in cancels:
            worker.cancel(cancels[number])
        if not worker.requests:
            break
        assert worker.run_round(), "requests wait, and nothing moves"
    assert not worker.requests
    while worker.bench.scheduler.has_work:
        worker.bench.step()
    assert worker.bench.pool.num_available == 12


@pytest.mark.parametrize("num_tokens", [3, 4, 9, 12])
def test_samples_are_sent_full_blocks_once(num_tokens: int) -> None:
    worker = Decoding(num_blocks=32, max_running=8, cache=True)
    num_blocks = blocks_for(num_tokens, worker.bench.pool.block_size)
    first = worker.wish(num_tokens, "group", 4)
    worker.run_round()
    siblings = [worker.wish(num_tokens, "group", 3 - number) for number in range(4)]
    worker.run_round()
    if num_blocks > 1:
        assert worker.num_received.keys() == {first.sequence.key}, "the others wait for what is on its way"
        assert all(sibling in list(worker.wishes) for sibling in siblings)
    while worker.requests:
        assert worker.run_round()
    assert list(worker.num_received.values()) == [num_blocks, 1, 1, 1, 1]


def test_where_the_first_sample_is_given_up_the_next_one_is_sent_the_prompt() -> None:
    worker = Decoding(num_blocks=32, max_running=8, cache=True)
    for number in range(3):
        worker.wish(9, "group", 2 - number)
    worker.run_round()
    worker.cancel(0)
    while worker.requests:
        assert worker.run_round()
    assert list(worker.num_received.values()) == [3, 3, 1]
