"""The attempts' machine, one rule at a time: placements, workers that are lost, ends."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest

from kvrelay.protocol.failure_kind import FailureKind
from kvrelay.protocol.messages import (
    Cancel,
    PeerRef,
    Prefill,
    Reassign,
    unpack_tokens,
)
from kvrelay.state_machine import IllegalEvent
from kvrelay_router.dispatch.attempt import AttemptState
from kvrelay_router.dispatch.events import (
    AwaitLostWorkers,
    Cancelled,
    DecodeChosen,
    Ended,
    FindDecode,
    FindPlacement,
    PlacementFailed,
    Send,
    StopMatched,
    WorkerBack,
    WorkersAssigned,
)
from kvrelay_router.dispatch.retry_budget import MAX_UNCOUNTED_ATTEMPTS, PROVEN_TOKENS
from kvrelay_router.fleet.load import worker_key
from tests.unit.dispatch.attempt_events import (
    D2,
    LENGTH,
    P2,
    D,
    P,
    delivered,
    failed,
    first,
    lost,
    need,
    placed,
    sent,
    tokens,
)
from tests.unit.dispatch.driven_sequence import (
    AnyEvent,
    Deliver,
    Done,
    DrivenSequence,
)
from tests.unit.dispatch.world import PROMPT, spec

# -- placement --------------------------------------------------------------------------------------------------------


NOBODY_CAME = Ended("nobody came", kind=FailureKind.NO_WORKER)


def broken(error: str) -> Ended:
    return Ended(error, kind=FailureKind.ENGINE_ERROR)


def test_the_prompt_goes_to_prefill_alone_and_names_decode() -> None:
    (send,) = DrivenSequence(spec()).handle(WorkersAssigned(P, D, 42.0))
    assert isinstance(send, Send) and isinstance(send.body, Prefill)
    assert (send.worker, send.attempt, send.body.decode) == (P, 1, D)
    assert unpack_tokens(send.body.prompt.tokens).tolist() == PROMPT
    assert (send.body.prompt.num_output, send.body.prompt.timeout_s) == (0, 42.0)


# -- another decode worker --------------------------------------------------------------------------------------------


def test_a_refused_handoff_goes_to_another_decode_worker() -> None:
    machine = placed()
    cancel, find = machine.handle(need("d"))
    assert sent([cancel]) == [("d", Cancel)]
    assert isinstance(find, FindDecode) and find.excluded == {worker_key(D)}
    (send,) = machine.handle(DecodeChosen(D2))
    assert isinstance(send, Send) and (send.worker, send.body) == (P, Reassign(decode=D2))
    assert delivered(machine.handle(tokens(0, 5, worker=D2))) == [5]


def test_no_decode_worker_left_ends_the_attempt_with_prefills_answer() -> None:
    machine = placed()
    machine.handle(need("d"))
    (send,) = machine.handle(DecodeChosen(None))
    assert isinstance(send, Send) and send.body == Reassign(decode=None)
    assert machine.handle(need("d")) == []
    find = machine.handle(failed(P, retriable=False))[-1]
    assert isinstance(find, FindPlacement) and find.avoid == {"p", "d"}
    assert machine.attempts._budget.num_counted == 1


def test_an_attempt_whose_lost_decode_worker_came_back_too_late_for_it_is_void() -> None:
    machine = placed()
    machine.handle(lost(D, "silent"))
    machine.handle(DecodeChosen(None, returned=True))
    find = machine.handle(failed(P))[-1]
    assert isinstance(find, FindPlacement) and find.delay_s > 0
    assert machine.attempts._budget.num_counted == 0


def test_a_new_start_of_the_lost_decode_worker_takes_over_and_late_word_about_the_old_one_counts_for_nothing() -> None:
    machine, again = placed(), PeerRef("d", "2", "tcp://d")
    machine.handle(lost(D, "killed"))
    (send,) = machine.handle(DecodeChosen(again))
    assert isinstance(send, Send) and send.body == Reassign(decode=again)
    (repeat,) = machine.handle(need("d", unable=D))
    assert isinstance(repeat, Send) and repeat.body == Reassign(decode=again)
    assert isinstance(machine.handle(need("d", unable=again))[-1], FindDecode)


def test_prefill_that_missed_the_commit_may_let_go() -> None:
    machine = placed()
    machine.handle(tokens(0, 5))
    (send,) = machine.handle(need("d"))
    assert isinstance(send, Send) and (send.worker, send.body) == (P, Reassign(decode=None))
    assert machine.handle(failed(P)) == []
    assert delivered(machine.handle(tokens(1, 6))) == [6]


# -- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "break_it",
    [
        lambda machine: machine.handle(lost(P, "killed")),
        lambda machine: machine.handle(failed(P)),
        lambda machine: machine.handle(failed(D)),
    ],
)
def test_before_the_commit_a_failure_cancels_both_and_starts_over(
    break_it: Callable[[DrivenSequence], list[Done]],
) -> None:
    machine = placed()
    machine.handle(first(5))
    instructions = break_it(machine)
    assert sent(instructions) == [("p", Cancel), ("d", Cancel)]
    assert isinstance(instructions[-1], FindPlacement) and instructions[-1].attempt == 2
    (send,) = machine.handle(WorkersAssigned(P2, D2, 30.0))
    assert isinstance(send, Send) and isinstance(send.body, Prefill) and send.attempt == 2
    assert unpack_tokens(send.body.prompt.tokens).tolist() == [*PROMPT, 5]
    assert send.body.prompt.num_output == 1


def test_all_tokens_known_is_the_end_even_if_the_finish_was_lost() -> None:
    machine = placed(max_tokens=2)
    machine.handle(tokens(0, 5, 6))
    instructions = machine.handle(lost(D, "killed"))
    assert sent(instructions) == [("p", Cancel), ("d", Cancel)]
    assert isinstance(instructions[-2], Deliver) and instructions[-2].delta.finish is LENGTH
    assert instructions[-1] == Ended(None)


def test_attempts_are_bounded() -> None:
    machine = placed(max_attempts=2)
    machine.handle(failed(P))
    machine.handle(WorkersAssigned(P2, D2, 60.0))
    instructions = machine.handle(failed(P2, attempt=2))
    assert sent(instructions) == [("p2", Cancel), ("d2", Cancel)]
    assert instructions[-1] == broken("broken (attempt 2, the last)")


VOID: list[Callable[[int], AnyEvent]] = [
    lambda attempt: failed(P, attempt, FailureKind.DRAINING, refused=True),
    lambda attempt: lost(P, "it lost us", is_alive=True),
    lambda attempt: lost(P, "silent", was_silent=True),
    lambda attempt: lost(D, "it lost us", is_alive=True),
]


@pytest.mark.parametrize("event", VOID)
def test_what_was_no_try_of_a_worker_does_not_count_as_an_attempt(event: Callable[[int], AnyEvent]) -> None:
    prefill = None if event(1) == lost(D, "it lost us", is_alive=True) else P
    machine = placed(prefill=prefill, max_attempts=1)
    pauses = []
    for attempt in range(1, MAX_UNCOUNTED_ATTEMPTS + 1):
        find = machine.handle(event(attempt))[-1]
        assert isinstance(find, FindPlacement) and find.attempt == attempt + 1
        pauses.append(find.delay_s)
        machine.handle(WorkersAssigned(prefill, D, 60.0))
    assert pauses[0] > 0 and pauses == sorted(pauses) and sum(pauses) > 10
    (ended,) = [i for i in machine.handle(event(MAX_UNCOUNTED_ATTEMPTS + 1)) if not isinstance(i, Send)]
    assert isinstance(ended, Ended) and ended.error is not None and "the last" in ended.error


def test_void_attempts_leave_the_real_ones_their_number() -> None:
    machine = placed(max_attempts=2)
    machine.handle(lost(P, "it lost us", is_alive=True))
    machine.handle(WorkersAssigned(P, D, 60.0))
    find = machine.handle(failed(P, attempt=2))[-1]
    assert isinstance(find, FindPlacement) and find.delay_s == 0
    machine.handle(WorkersAssigned(P, D, 60.0))
    machine.handle(lost(P, "it lost us", is_alive=True))
    machine.handle(WorkersAssigned(P, D, 60.0))
    assert machine.handle(failed(P, attempt=4))[-1] == broken("broken (attempt 4, the last)")


def test_an_attempt_that_brought_enough_tokens_does_not_count() -> None:
    machine = placed(max_attempts=1, max_tokens=100)
    machine.handle(tokens(0, *range(PROVEN_TOKENS)))
    find = machine.handle(lost(D, "silent"))[-1]
    assert isinstance(find, FindPlacement) and find.delay_s == 0
    machine.handle(WorkersAssigned(P, D, 60.0))
    machine.handle(tokens(PROVEN_TOKENS, *range(PROVEN_TOKENS - 1), attempt=2))
    assert machine.handle(failed(D, attempt=2))[-1] == broken("broken (attempt 2, the last)")


def test_the_last_attempt_waits_for_lost_workers_and_goes_on_when_one_is_heard_again() -> None:
    machine = placed(max_attempts=2)
    machine.handle(lost(P, "silent"))
    machine.handle(WorkersAssigned(P2, D2, 60.0))
    assert isinstance(machine.handle(lost(P2, "silent"))[-1], AwaitLostWorkers)
    assert machine.state is AttemptState.WAITING
    assert machine.handle(WorkerBack(PeerRef("p", "2", "tcp://p"))) == [], "a new start proves nothing"
    (find,) = machine.handle(WorkerBack(P))
    assert isinstance(find, FindPlacement) and find.attempt == 3
    assert machine.handle(WorkerBack(P2)) == []
    machine.handle(WorkersAssigned(P, D, 60.0))
    machine.handle(failed(P, attempt=3))
    machine.handle(WorkersAssigned(P, D, 60.0))
    assert machine.handle(failed(P, attempt=4))[-1] == broken("broken (attempt 4, the last)")


def test_lost_workers_that_are_not_heard_again_end_the_request() -> None:
    machine = placed(max_attempts=1)
    (*cancels, held_back) = machine.handle(lost(P, "killed"))
    assert sent(cancels) == [("p", Cancel), ("d", Cancel)] and isinstance(held_back, AwaitLostWorkers)
    assert machine.handle(PlacementFailed("nobody came")) == [NOBODY_CAME]


def test_losses_in_company_count_only_for_a_suspect() -> None:
    machine = placed(max_attempts=2)
    for is_suspect in (False, True):
        find = machine.handle(lost(P, in_company=True))[-1]
        assert isinstance(find, FindPlacement) and find.is_suspect == is_suspect and not find.delay_s
        machine.handle(WorkersAssigned(P, D, 60.0))
    find = machine.handle(lost(P, in_company=True))[-1]
    assert isinstance(find, FindPlacement) and find.is_suspect
    machine.handle(WorkersAssigned(P, D, 60.0))
    assert isinstance(machine.handle(lost(P, in_company=True))[-1], AwaitLostWorkers)
    (find,) = machine.handle(WorkerBack(P))
    assert isinstance(find, FindPlacement) and find.is_suspect


def test_an_attempt_that_brought_enough_tokens_clears_a_suspect() -> None:
    machine = placed(max_attempts=1, max_tokens=100)
    find = machine.handle(lost(P, in_company=True))[-1]
    assert isinstance(find, FindPlacement) and find.is_suspect
    machine.handle(WorkersAssigned(P, D, 60.0))
    machine.handle(tokens(0, *range(PROVEN_TOKENS), attempt=2))
    find = machine.handle(lost(D, in_company=True))[-1]
    assert isinstance(find, FindPlacement) and not find.is_suspect


def test_a_failure_that_would_repeat_itself_is_final_and_both_are_told() -> None:
    machine = placed()
    instructions = machine.handle(failed(P, retriable=False))
    assert sent(instructions) == [("p", Cancel), ("d", Cancel)]
    assert instructions[-1] == broken("broken")


# -- illegal events ---------------------------------------------------------------------------------------------------


def streaming() -> DrivenSequence:
    machine = placed()
    machine.handle(tokens(0, 5))
    return machine


def resumed() -> DrivenSequence:
    machine = streaming()
    machine.handle(lost(D, "killed"))
    machine.handle(WorkersAssigned(P, D2, 60.0))
    return machine


def reassigning() -> DrivenSequence:
    machine = placed()
    machine.handle(need("d"))
    return machine


ILLEGAL: list[tuple[Callable[[], DrivenSequence], AnyEvent]] = [
    (lambda: DrivenSequence(spec()), DecodeChosen(D)),
    (lambda: DrivenSequence(spec()), WorkersAssigned(None, None, 1.0)),
    (lambda: DrivenSequence(spec()), WorkersAssigned(P, None, 1.0)),
    (placed, WorkersAssigned(P, D, 1.0)),
    (placed, PlacementFailed("late")),
    (placed, DecodeChosen(D2)),
    (placed, failed(D2)),
    (placed, need("d", worker=P2)),
    (reassigning, DecodeChosen(D)),
    (streaming, WorkersAssigned(P, D, 1.0)),
    (streaming, DecodeChosen(D2)),
    (lambda: placed(decode=None, max_tokens=1), need("d")),
]


@pytest.mark.parametrize(("make", "event"), ILLEGAL)
def test_an_illegal_event_raises_and_changes_nothing(make: Callable[[], DrivenSequence], event: AnyEvent) -> None:
    machine = make()
    before = copy.deepcopy(machine.values())
    with pytest.raises(IllegalEvent):
        machine.handle(event)
    assert machine.values() == before


@pytest.mark.parametrize(
    ("make", "event"),
    [
        (lambda: DrivenSequence(spec()), first(5)),
        (placed, first(5, attempt=2)),
        (placed, first(5, worker=P2)),
        (placed, tokens(0, 5, worker=D2)),
        (resumed, first(5, index=0, attempt=2)),
        (lambda: placed(prompt_logprobs=0), first(5)),
    ],
)
def test_tokens_of_others_and_of_the_past_are_not_delivered(
    make: Callable[[], DrivenSequence], event: AnyEvent
) -> None:
    machine = make()
    before = list(machine.output)
    assert delivered(machine.handle(event)) == [] and machine.output == before


def test_after_the_end_events_from_outside_are_void_and_those_of_the_shell_illegal() -> None:
    machine = placed()
    machine.handle(StopMatched())
    for event in (first(5), tokens(0, 5), need("d"), failed(P), lost(P, "killed"), StopMatched(), Cancelled("")):
        assert machine.handle(event) == []
    own: list[AnyEvent] = [WorkersAssigned(P, D, 1.0), PlacementFailed(""), DecodeChosen(D)]
    for late in own:
        with pytest.raises(IllegalEvent):
            machine.handle(late)
