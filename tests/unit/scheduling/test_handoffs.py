"""Handoffs in the waiting queue: their order, the room that they leave to running sequences, and that none starves."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.scheduling.queue.queue_orders import ORDERS
from kvrelay.scheduling.scheduler_settings import QueueOrderName, SchedulerSettings
from kvrelay.scheduling.sequence import SequenceState
from tests.thoroughness import examples
from tests.unit.scheduling.bench import BLOCK_SIZE, SCHEDULERS, Bench
from tests.unit.scheduling.handoff_worker import HandoffWorker


@pytest.mark.parametrize(("ratio", "admitted"), [(0.0, True), (0.5, True), (1.0, False)])
def test_a_handoff_leaves_room_for_what_running_sequences_are_expected_to_sample(ratio: float, admitted: bool) -> None:
    """Twelve blocks: two and the next 16 tokens' four are the running one's, the handoff is for seven."""
    bench = Bench(num_blocks=12, settings=SchedulerSettings(new_token_ratio=ratio), cache=False)
    assert bench.adopt([1] * 7, 17) is not None
    handoff = bench.handoff([2] * 27, 5)
    assert (list(bench.scheduler.reserve()) == [handoff]) is admitted


def test_a_handoff_is_admitted_while_a_step_is_in_flight() -> None:
    worker = HandoffWorker()
    worker.local(9, max_tokens=20)
    plan = worker.scheduler.schedule()
    handoff = worker.handoff(9)
    assert list(worker.scheduler.reserve()) == [handoff]
    second = worker.handoff(9)
    ahead = worker.scheduler.schedule_ahead()
    assert ahead is not None
    assert list(ahead.reservations) == [second]
    worker.scheduler.commit(plan, worker.bench.forward(plan))


def test_a_handoff_that_ends_before_it_was_announced_is_not_announced() -> None:
    worker = HandoffWorker()
    worker.local(9, max_tokens=1)
    plan = worker.scheduler.schedule()
    handoff = worker.handoff(9)
    assert worker.scheduler.schedule_ahead() is None
    assert handoff.state is SequenceState.WAITING_FOR_REMOTE_KV
    worker.scheduler.abort(handoff.key)
    assert not worker.scheduler.reserve()
    worker.scheduler.commit(plan, worker.bench.forward(plan))
    assert worker.bench.pool.num_available == 16


def test_a_sequence_that_is_not_being_received_is_not_adopted() -> None:
    worker = HandoffWorker()
    local = worker.local(9)
    with pytest.raises(ValueError, match="it receives no KV"):
        worker.scheduler.adopt(local)
    waiting = worker.handoff(9)
    with pytest.raises(ValueError, match="it receives no KV"):
        worker.scheduler.adopt(waiting)


# -- the order ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_handoff", [True, False])
def test_a_large_sequence_is_not_starved_by_small_ones_of_the_other_kind(is_handoff: bool) -> None:
    """Half the pool is taken by small ones that come as others end; the large one needs all of it."""
    worker = HandoffWorker(num_blocks=16, max_running=8)
    small, large = (worker.local, worker.handoff) if is_handoff else (worker.handoff, worker.local)
    for _ in range(4):
        small(8, max_tokens=4)
    worker.run_round()
    late = large(50, max_tokens=4)
    for _ in range(40):
        small(8, max_tokens=4)
        worker.run_round()
        if late in worker.admitted:
            break
    assert late in worker.admitted
    worker.run()


def test_preempted_sequences_come_before_handoffs() -> None:
    worker = HandoffWorker(num_blocks=8, max_running=4)
    worker.local(12, max_tokens=12)
    worker.local(12, max_tokens=12, token=3)
    while not worker.scheduler.num_preemptions:
        worker.run_round()
    preempted = next(iter(worker.scheduler.waiting))
    handoff = worker.handoff(4)
    worker.reserve()
    assert handoff.state is SequenceState.WAITING
    while preempted.state is SequenceState.WAITING:
        assert handoff.state is SequenceState.WAITING
        worker.run_round()
    worker.run()


@given(
    st.lists(st.tuples(st.booleans(), st.integers(1, 32), st.integers(0, 3)), min_size=1, max_size=6),
    st.sampled_from(list(ORDERS)),
    st.integers(1, 3),
)
def test_where_nothing_runs_somebody_moves(
    arrivals: list[tuple[bool, int, int]], order: QueueOrderName, max_running: int
) -> None:
    worker = HandoffWorker(8, max_running, SchedulerSettings(queue_order=order))
    for number, (is_handoff, num_tokens, num_to_come) in enumerate(arrivals):
        group = f"g{number}" if num_to_come else ""
        if is_handoff:
            worker.handoff(num_tokens, group, num_to_come)
        else:
            for _ in range(1 + num_to_come):
                worker.local(num_tokens, group)
    assert worker.somebody_moves


# -- prefixes -------------------------------------------------------------------------------------------------------


def test_a_prefix_is_not_sent_twice_at_once() -> None:
    worker = HandoffWorker(num_blocks=32, cache=True)
    first, second = worker.handoff(10), worker.handoff(10)
    assert worker.reserve() == [first]
    worker.run()
    assert second in worker.admitted
    assert worker.num_sent_blocks == 3 + 1


def test_a_prefix_that_is_being_computed_is_not_sent_and_one_that_is_being_sent_not_computed() -> None:
    worker = HandoffWorker(num_blocks=32, cache=True)
    worker.local(10, token=2)
    worker.scheduler.schedule()
    worker.handoff(10, token=2)
    assert not worker.reserve()
    worker = HandoffWorker(num_blocks=32, cache=True)
    worker.handoff(10)
    worker.reserve()
    worker.local(10, token=2)
    assert not worker.scheduler.schedule().rows


# -- sample groups --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_to_come", "admitted"), [(0, True), (2, True), (3, False)])
def test_the_first_sample_is_admitted_if_there_is_room_for_all(num_to_come: int, admitted: bool) -> None:
    """One of four places is taken."""
    worker = HandoffWorker(num_blocks=32, max_running=4, cache=True)
    worker.local(4, max_tokens=20)
    worker.run_round()
    handoff = worker.handoff(9, "group" if num_to_come else "", num_to_come)
    assert (worker.reserve() == [handoff]) is admitted


def test_nobody_else_gets_the_capacity_that_is_reserved_for_the_rest() -> None:
    worker = HandoffWorker(num_blocks=32, max_running=3, cache=True)
    first = worker.handoff(9, "group", 2, max_tokens=20)
    worker.run_round()
    other = worker.handoff(4, token=3)
    worker.local(4)
    for _ in range(4):
        worker.run_round()
    assert worker.scheduler.running.keys() == {first.key}
    siblings = [worker.handoff(9, "group", 1 - number, max_tokens=20) for number in range(2)]
    for _ in range(4):
        worker.run_round()
    assert {first.key, *(each.key for each in siblings)} == worker.scheduler.running.keys()
    assert other.state is SequenceState.WAITING


def test_blocks_that_are_reserved_for_samples_to_come_are_nobody_elses() -> None:
    """Of 12 blocks the first takes 3, and the three to come one each beside the two that they share."""
    worker = HandoffWorker(num_blocks=12, max_running=8, cache=True)
    worker.handoff(9, "group", 3, max_tokens=4)
    worker.reserve()
    assert worker.scheduler.lifecycle.num_headroom_blocks == 3
    local = worker.local(25)
    worker.scheduler.schedule()
    assert local.state is SequenceState.WAITING


@pytest.mark.parametrize("num_tokens", [3, 4, 9, 12])
def test_samples_are_sent_the_full_blocks_of_their_prompt_once(num_tokens: int) -> None:
    worker = HandoffWorker(num_blocks=32, cache=True)
    worker.handoff(num_tokens, "group", 4)
    worker.run_round()
    for number in range(4):
        worker.handoff(num_tokens, "group", 3 - number)
    worker.run()
    num_shared = (num_tokens - 1) // BLOCK_SIZE
    assert worker.num_sent_blocks == num_shared + 5


@pytest.mark.parametrize("num_before", range(8))
def test_samples_that_are_admitted_out_of_their_order_reserve_for_nobody_who_is_here(num_before: int) -> None:
    """The last sample to arrive says that none is to come, the first that three are. Each may be admitted first: the
    order depends on their keys, and with them on the number of requests before."""
    worker = HandoffWorker(num_blocks=32, max_running=4, settings=SchedulerSettings(queue_order="random"))
    for _ in range(num_before):
        worker.local(4)
        worker.cancel(0)
    worker.local(4, max_tokens=20)
    worker.run_round()
    samples = [worker.handoff(9, "group", 3 - index) for index in range(4)]
    assert not worker.reserve(), "three places are free, and the group is admitted as a whole"
    worker.cancel(0)
    assert set(worker.reserve()) == set(samples)
    assert worker.scheduler.lifecycle.num_slots == 4
    worker.run()


# -- histories ------------------------------------------------------------------------------------------------------

arrivals = st.lists(
    st.tuples(
        *(st.booleans(), st.integers(1, 24), st.integers(0, 3), st.integers(2, 12), st.integers(0, 3)),
        *(st.integers(1, 3), st.integers(0, 1)),
    ),
    min_size=1,
    max_size=8,
)
cancels = st.dictionaries(st.integers(0, 40), st.tuples(st.integers(0, 99), st.integers(0, 12)), max_size=5)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@settings(max_examples=examples(80), deadline=None)
@given(arrivals, st.integers(1, 5), st.integers(0, 3), st.booleans(), cancels, st.sampled_from(list(ORDERS)))
def test_all_are_received_and_run_and_nobody_waits_for_ever(
    scheduler: str,
    wanted: list[tuple[bool, int, int, int, int, int, int]],
    max_running: int,
    num_silent: int,
    cache: bool,
    cancelled: dict[int, tuple[int, int]],
    order: QueueOrderName,
) -> None:
    """Local prompts, handoffs and groups of both. Some samples never come: those that end with their first token, or
    whose client is gone. Some sequences are cancelled; senders of some are lost, and their blocks quarantined."""
    policy = SchedulerSettings(queue_order=order, queue_starvation_bound=3)
    worker = HandoffWorker(12, max_running, policy, cache=cache, scheduler=scheduler)

    def run_round() -> None:
        if worker.round in cancelled:
            worker.cancel(*cancelled[worker.round])
        worker.run_round()

    for number, (is_handoff, num_tokens, num_others, max_tokens, gap, token, sender) in enumerate(wanted):
        group = f"g{number}" if num_others else ""
        for left in reversed(range(1 + num_others)):
            if not is_handoff:
                worker.local(num_tokens, group, max_tokens, token)
            elif left == num_others or left >= num_silent:
                worker.handoff(num_tokens, group, left, max_tokens, token=token, sender=sender)
            if is_handoff and left == num_others:
                for _ in range(gap):
                    run_round()
    for _ in range(40):
        run_round()
    worker.run()
