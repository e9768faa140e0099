"""The attempts' machine, one rule at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvrelay.protocol.messages import (
    Cancel,
    FirstToken,
    Generate,
    PeerRef,
    Prefill,
    Reassign,
    SequenceUsage,
    Stop,
    TokenEntry,
    unpack_tokens,
)
from kvrelay.protocol.sampling import BeamResult, BeamSpec, FinishReason, Sampling, TokenLogprobs
from kvrelay_router.dispatch.attempt import AttemptState, SequenceAttempts
from kvrelay_router.dispatch.events import (
    AttemptFailed,
    AwaitLost,
    Cancelled,
    DecodeChosen,
    DecodeNeeded,
    Deliver,
    Ended,
    Event,
    FindDecode,
    FindPlacement,
    FirstTokenCame,
    IllegalEvent,
    Instruction,
    NotPlaced,
    Placed,
    Send,
    StopMatched,
    TokensCame,
    WorkerBack,
    WorkerLost,
)
from kvrelay_router.dispatch.interface import SequenceDelta
from kvrelay_router.dispatch.load import worker_key
from kvrelay_router.dispatch.tries import MAX_VOID_ATTEMPTS, PROVEN_TOKENS
from tests.unit.dispatch.world import PROMPT, peer, spec

P, P2, D, D2, D3 = peer("p"), peer("p2"), peer("d"), peer("d2"), peer("d3")
LENGTH = FinishReason.LENGTH


def placed(prefill: PeerRef | None = P, decode: PeerRef | None = D, **options: Any) -> SequenceAttempts:
    machine = SequenceAttempts(spec(**options))
    machine.handle(Placed(prefill, decode, 60.0))
    return machine


def first(token: int, index: int = 0, attempt: int = 1, worker: PeerRef = P, **options: Any) -> FirstTokenCame:
    return FirstTokenCame(worker, attempt, FirstToken(index=index, token_id=token, **options))


def tokens(index: int, *ids: int, attempt: int = 1, worker: PeerRef = D, **options: Any) -> TokensCame:
    entry = TokenEntry(request="r", attempt=attempt, sequence=0, index=index, token_ids=list(ids), **options)
    return TokensCame(worker, entry)


def need(*excluded: str, attempt: int = 1) -> DecodeNeeded:
    return DecodeNeeded(P, attempt, "refused", frozenset(excluded))


def failed(worker: PeerRef, attempt: int = 1, *, retriable: bool = True) -> AttemptFailed:
    return AttemptFailed(worker, attempt, "broken", retriable)


def delivered(instructions: list[Instruction]) -> list[int]:
    return [token for i in instructions if isinstance(i, Deliver) for token in i.delta.token_ids]


def sent(instructions: list[Instruction]) -> list[tuple[str, type]]:
    return [(i.worker.peer_id, type(i.body)) for i in instructions if isinstance(i, Send)]


# -- the short cut ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "event",
    [
        tokens(2, 22, finish=FinishReason.LENGTH),
        tokens(2, 22, cached_tokens=3),
        tokens(2, 22, usage=SequenceUsage(prompt_blocks=1)),
        tokens(2, 22, logprobs=[TokenLogprobs(22, -0.5, [], [])]),
        tokens(2),
        tokens(1, 21, 22),
        tokens(3, 23),
        tokens(2, 22, attempt=2),
        tokens(2, 22, worker=D2),
    ],
)
def test_what_is_more_than_the_next_tokens_or_not_theirs_is_for_handle(event: TokensCame) -> None:
    machine = placed()
    assert machine.next_delta(D, tokens(0, 20).entry) is None  # decode has not committed, as far as is known
    machine.handle(tokens(0, 20))
    assert machine.next_delta(D, tokens(1, 21).entry) == SequenceDelta(0, [21])
    assert machine.next_delta(event.worker, event.entry) is None
    assert machine.output == [20, 21]


def test_tokens_that_others_wait_for_are_for_handle() -> None:
    machine = placed()
    machine.handle(tokens(0, 20))
    machine.handle(tokens(2, 22))
    assert machine.next_delta(D, tokens(1, 21).entry) is None
    assert delivered(machine.handle(tokens(1, 21))) == [21, 22]


def test_after_the_end_there_is_no_short_cut() -> None:
    machine = placed()
    machine.handle(tokens(0, 20))
    machine.handle(Cancelled("the client is gone"))
    assert machine.next_delta(D, tokens(1, 21).entry) is None


# -- placement --------------------------------------------------------------------------------------------------------


def test_the_prompt_goes_to_prefill_alone_and_names_decode() -> None:
    (send,) = SequenceAttempts(spec()).handle(Placed(P, D, 42.0))
    assert isinstance(send, Send) and isinstance(send.body, Prefill)
    assert (send.worker, send.attempt, send.body.decode) == (P, 1, D)
    assert unpack_tokens(send.body.prompt.tokens).tolist() == PROMPT
    assert (send.body.prompt.num_output, send.body.prompt.timeout_s) == (0, 42.0)


def test_without_prefill_decode_generates_alone() -> None:
    (send,) = SequenceAttempts(spec()).handle(Placed(None, D, 42.0))
    assert isinstance(send, Send) and send.worker == D and isinstance(send.body, Generate)


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_one_token_at_most_needs_no_decode(max_tokens: int) -> None:
    machine = SequenceAttempts(spec(max_tokens=max_tokens))
    assert not machine.needs_decode
    (send,) = machine.handle(Placed(P, None, 42.0))
    assert isinstance(send, Send) and isinstance(send.body, Prefill) and send.body.decode is None


def test_nobody_to_place_on_ends_the_sequence() -> None:
    assert SequenceAttempts(spec()).handle(NotPlaced("nobody came")) == [Ended("nobody came")]


# -- tokens -----------------------------------------------------------------------------------------------------------


def test_decode_repeats_the_first_token_and_it_is_delivered_once() -> None:
    machine = placed()
    assert delivered(machine.handle(first(5))) == [5]
    assert delivered(machine.handle(tokens(0, 5))) == []
    assert delivered(machine.handle(tokens(1, 6, 7))) == [6, 7]


def test_decodes_repeat_may_overtake_prefills_first_token() -> None:
    machine = placed()
    assert delivered(machine.handle(tokens(0, 5))) == [5]
    assert machine.state is AttemptState.STREAMING
    assert delivered(machine.handle(first(5))) == []


def test_tokens_behind_a_gap_wait_for_it_and_so_does_the_finish() -> None:
    machine = placed()
    assert machine.handle(tokens(2, 7, finish=LENGTH)) == []
    assert machine.handle(tokens(1, 6)) == []
    instructions = machine.handle(first(5))
    assert delivered(instructions) == [5, 6, 7]
    assert instructions[-1] == Ended(None)


def test_a_batch_that_overlaps_delivers_what_is_new_with_its_logprobs() -> None:
    machine = placed()
    machine.handle(first(5))
    logprobs = [TokenLogprobs(token, -1.0, [], []) for token in (5, 6)]
    (deliver,) = machine.handle(tokens(0, 5, 6, logprobs=logprobs))
    assert isinstance(deliver, Deliver)
    assert (deliver.delta.token_ids, deliver.delta.logprobs) == ([6], logprobs[1:])


def test_a_finish_of_the_past_does_not_end_what_went_on() -> None:
    machine = placed()
    machine.handle(tokens(0, 5, 6))
    assert machine.handle(first(5, finish=LENGTH)) == []
    assert not machine.is_over


def test_a_finish_without_a_new_token_ends_the_sequence() -> None:
    machine = placed()
    machine.handle(tokens(0, 5))
    deliver, ended = machine.handle(tokens(1, finish=LENGTH))
    assert isinstance(deliver, Deliver) and deliver.delta.finish is LENGTH and deliver.delta.token_ids == []
    assert ended == Ended(None)


def test_scoring_ends_with_one_delta_without_tokens() -> None:
    machine = placed(decode=None, max_tokens=0, prompt_logprobs=0)
    scores = [TokenLogprobs(12, -1.0, [], []), TokenLogprobs(13, -2.0, [], [])]
    body = FirstToken(index=0, prompt_logprobs=scores, finish=LENGTH)
    deliver, ended = machine.handle(FirstTokenCame(P, 1, body))
    assert isinstance(deliver, Deliver) and deliver.delta.prompt_logprobs == scores
    assert (deliver.delta.token_ids, deliver.delta.finish, ended) == ([], LENGTH, Ended(None))


def test_prompt_logprobs_stand_in_front_even_where_decode_is_faster() -> None:
    scores = [TokenLogprobs(12, -1.0, [], [])]
    machine = placed(prompt_logprobs=0)
    assert machine.handle(tokens(0, 5)) == []
    assert machine.handle(tokens(1, 6)) == []
    instructions = machine.handle(first(5, prompt_logprobs=scores))
    assert delivered(instructions) == [5, 6]
    assert isinstance(instructions[0], Deliver) and instructions[0].delta.prompt_logprobs == scores
    assert isinstance(instructions[1], Deliver) and instructions[1].delta.prompt_logprobs == []


def test_prompt_logprobs_that_died_with_prefill_are_computed_again() -> None:
    machine = placed(prompt_logprobs=0)
    machine.handle(tokens(0, 5))
    assert isinstance(machine.handle(WorkerLost(P, "killed"))[-1], FindPlacement)
    machine.handle(Placed(P2, D, 60.0))
    scores = [TokenLogprobs(12, -1.0, [], [])]
    assert delivered(machine.handle(first(9, attempt=2, worker=P2, prompt_logprobs=scores))) == [9]


def test_cached_tokens_are_told_once_and_usage_with_the_next_delta() -> None:
    machine = placed()
    (deliver,) = machine.handle(first(5, cached_tokens=16))
    assert isinstance(deliver, Deliver) and deliver.delta.cached_tokens == 16
    usage = SequenceUsage(prompt_blocks=2, received_blocks=1, cached_blocks=1)
    assert machine.handle(tokens(0, 5, cached_tokens=16, usage=usage)) == []
    (deliver,) = machine.handle(tokens(1, 6))
    assert isinstance(deliver, Deliver)
    assert (deliver.delta.cached_tokens, deliver.delta.usage) == (None, usage)


# -- another decode worker --------------------------------------------------------------------------------------------


def test_a_refused_handoff_goes_to_another_decode_worker() -> None:
    machine = placed()
    cancel, find = machine.handle(need("d"))
    assert sent([cancel]) == [("d", Cancel)]
    assert isinstance(find, FindDecode) and find.excluded == {worker_key(D)}
    (send,) = machine.handle(DecodeChosen(D2))
    assert isinstance(send, Send) and (send.worker, send.body) == (P, Reassign(decode=D2))
    assert delivered(machine.handle(tokens(0, 5, worker=D2))) == [5]


def test_a_lost_decode_worker_is_replaced_before_prefill_asks() -> None:
    machine = placed()
    assert isinstance(machine.handle(WorkerLost(D, "silent"))[-1], FindDecode)
    machine.handle(DecodeChosen(D2))
    (again,) = machine.handle(need("d"))
    assert isinstance(again, Send) and again.body == Reassign(decode=D2)


def test_tokens_of_the_decode_worker_that_was_left_do_not_count() -> None:
    machine = placed()
    machine.handle(need("d"))
    machine.handle(DecodeChosen(D2))
    assert machine.handle(tokens(0, 99)) == []
    assert machine.handle(failed(D)) == []
    assert machine.state is AttemptState.PREFILLING


def test_exclusions_add_up() -> None:
    machine = placed()
    machine.handle(need("d"))
    machine.handle(DecodeChosen(D2))
    find = machine.handle(WorkerLost(D2, "silent"))[-1]
    assert isinstance(find, FindDecode) and find.excluded == {worker_key(D), worker_key(D2)}


def test_no_decode_worker_left_ends_the_attempt_with_prefills_answer() -> None:
    machine = placed()
    machine.handle(need("d"))
    (send,) = machine.handle(DecodeChosen(None))
    assert isinstance(send, Send) and send.body == Reassign(decode=None)
    assert machine.handle(need("d")) == []
    find = machine.handle(failed(P, retriable=False))[-1]
    assert isinstance(find, FindPlacement) and find.avoid == {"p", "d"}
    assert machine._tries.num_counted == 1


def test_an_attempt_whose_lost_decode_worker_came_back_too_late_for_it_is_void() -> None:
    machine = placed()
    machine.handle(WorkerLost(D, "silent"))
    machine.handle(DecodeChosen(None, came_back=True))
    find = machine.handle(failed(P))[-1]
    assert isinstance(find, FindPlacement) and find.delay_s > 0
    assert machine._tries.num_counted == 0


def test_while_another_decode_worker_is_awaited_nothing_asks_for_one_again() -> None:
    machine = placed()
    machine.handle(need("d"))
    assert machine.handle(need("d")) == []
    assert machine.handle(WorkerLost(D, "killed")) == []
    (send,) = machine.handle(DecodeChosen(D2))
    assert isinstance(send, Send) and send.body == Reassign(decode=D2)


def test_a_new_start_of_the_lost_decode_worker_takes_over_and_late_word_about_the_old_one_counts_for_nothing() -> None:
    machine, again = placed(), PeerRef("d", "2", "tcp://d")
    machine.handle(WorkerLost(D, "killed"))
    (send,) = machine.handle(DecodeChosen(again))
    assert isinstance(send, Send) and send.body == Reassign(decode=again)
    (repeat,) = machine.handle(DecodeNeeded(P, 1, "d is lost", frozenset({"d"}), D))
    assert isinstance(repeat, Send) and repeat.body == Reassign(decode=again)
    assert isinstance(machine.handle(DecodeNeeded(P, 1, "refused", frozenset({"d"}), again))[-1], FindDecode)


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
        lambda machine: machine.handle(WorkerLost(P, "killed")),
        lambda machine: machine.handle(failed(P)),
        lambda machine: machine.handle(failed(D)),
    ],
)
def test_before_the_commit_a_failure_cancels_both_and_starts_over(
    break_it: Callable[[SequenceAttempts], list[Instruction]],
) -> None:
    machine = placed()
    machine.handle(first(5))
    instructions = break_it(machine)
    assert sent(instructions) == [("p", Cancel), ("d", Cancel)]
    assert isinstance(instructions[-1], FindPlacement) and instructions[-1].attempt == 2
    (send,) = machine.handle(Placed(P2, D2, 30.0))
    assert isinstance(send, Send) and isinstance(send.body, Prefill) and send.attempt == 2
    assert unpack_tokens(send.body.prompt.tokens).tolist() == [*PROMPT, 5]
    assert send.body.prompt.num_output == 1


def test_after_the_commit_prefill_does_not_matter_and_decode_does() -> None:
    machine = placed()
    machine.handle(tokens(0, 5))
    assert machine.handle(WorkerLost(P, "killed")) == []
    assert machine.handle(failed(P)) == []
    instructions = machine.handle(WorkerLost(D, "killed"))
    assert sent(instructions) == [("p", Cancel), ("d", Cancel)]
    assert isinstance(instructions[-1], FindPlacement) and instructions[-1].avoid == {"d"}


def test_what_an_old_attempt_held_back_is_not_mixed_with_the_new_ones() -> None:
    machine = placed()
    machine.handle(first(5))
    machine.handle(tokens(2, 77))
    machine.handle(WorkerLost(D, "killed"))
    machine.handle(Placed(P, D2, 60.0))
    assert machine.handle(tokens(1, 88)) == []
    assert delivered(machine.handle(tokens(1, 6, attempt=2, worker=D2))) == [6]
    assert delivered(machine.handle(tokens(2, 7, attempt=2, worker=D2))) == [7]


def test_a_resumed_attempt_of_one_token_goes_to_prefill_alone() -> None:
    machine = placed(max_tokens=3)
    machine.handle(tokens(0, 5, 6))
    machine.handle(WorkerLost(D, "killed"))
    assert not machine.needs_decode
    machine.handle(Placed(P, None, 60.0))
    instructions = machine.handle(first(7, index=2, attempt=2, finish=LENGTH))
    assert delivered(instructions) == [7] and instructions[-1] == Ended(None)


def test_all_tokens_known_is_the_end_even_if_the_finish_was_lost() -> None:
    machine = placed(max_tokens=2)
    machine.handle(tokens(0, 5, 6))
    instructions = machine.handle(WorkerLost(D, "killed"))
    assert sent(instructions) == [("p", Cancel), ("d", Cancel)]
    assert isinstance(instructions[-2], Deliver) and instructions[-2].delta.finish is LENGTH
    assert instructions[-1] == Ended(None)


def test_attempts_are_bounded() -> None:
    machine = placed(max_attempts=2)
    machine.handle(failed(P))
    machine.handle(Placed(P2, D2, 60.0))
    instructions = machine.handle(failed(P2, attempt=2))
    assert sent(instructions) == [("p2", Cancel), ("d2", Cancel)]
    assert instructions[-1] == Ended("broken (attempt 2, the last)")


VOID: list[Callable[[int], Event]] = [
    lambda attempt: AttemptFailed(P, attempt, "draining", retriable=True, refused=True),
    lambda attempt: WorkerLost(P, "it lost us", gave_us_up=True),
    lambda attempt: WorkerLost(D, "it lost us", gave_us_up=True),
]


@pytest.mark.parametrize("event", VOID)
def test_what_was_no_try_of_a_worker_does_not_count_as_an_attempt(event: Callable[[int], Event]) -> None:
    prefill = None if event(1) == WorkerLost(D, "it lost us", gave_us_up=True) else P
    machine = placed(prefill=prefill, max_attempts=1)
    pauses = []
    for attempt in range(1, MAX_VOID_ATTEMPTS + 1):
        find = machine.handle(event(attempt))[-1]
        assert isinstance(find, FindPlacement) and find.attempt == attempt + 1
        pauses.append(find.delay_s)
        machine.handle(Placed(prefill, D, 60.0))
    assert pauses[0] > 0 and pauses == sorted(pauses) and sum(pauses) > 10
    (ended,) = [i for i in machine.handle(event(MAX_VOID_ATTEMPTS + 1)) if not isinstance(i, Send)]
    assert isinstance(ended, Ended) and ended.error is not None and "the last" in ended.error


def test_void_attempts_leave_the_real_ones_their_number() -> None:
    machine = placed(max_attempts=2)
    machine.handle(WorkerLost(P, "it lost us", gave_us_up=True))
    machine.handle(Placed(P, D, 60.0))
    find = machine.handle(failed(P, attempt=2))[-1]
    assert isinstance(find, FindPlacement) and find.delay_s == 0
    machine.handle(Placed(P, D, 60.0))
    machine.handle(WorkerLost(P, "it lost us", gave_us_up=True))
    machine.handle(Placed(P, D, 60.0))
    assert machine.handle(failed(P, attempt=4))[-1] == Ended("broken (attempt 4, the last)")


def test_an_attempt_that_brought_enough_tokens_does_not_count() -> None:
    machine = placed(max_attempts=1, max_tokens=100)
    machine.handle(tokens(0, *range(PROVEN_TOKENS)))
    find = machine.handle(WorkerLost(D, "silent"))[-1]
    assert isinstance(find, FindPlacement) and find.delay_s == 0
    machine.handle(Placed(P, D, 60.0))
    machine.handle(tokens(PROVEN_TOKENS, *range(PROVEN_TOKENS - 1), attempt=2))
    assert machine.handle(failed(D, attempt=2))[-1] == Ended("broken (attempt 2, the last)")


def test_the_last_attempt_waits_for_lost_workers_and_goes_on_when_one_is_heard_again() -> None:
    machine = placed(max_attempts=2)
    machine.handle(WorkerLost(P, "silent"))
    machine.handle(Placed(P2, D2, 60.0))
    assert isinstance(machine.handle(WorkerLost(P2, "silent"))[-1], AwaitLost)
    assert machine.state is AttemptState.WAITING
    assert machine.handle(WorkerBack(PeerRef("p", "2", "tcp://p"))) == [], "a new start proves nothing"
    (find,) = machine.handle(WorkerBack(P))
    assert isinstance(find, FindPlacement) and find.attempt == 3
    assert machine.handle(WorkerBack(P2)) == []
    machine.handle(Placed(P, D, 60.0))
    machine.handle(failed(P, attempt=3))
    machine.handle(Placed(P, D, 60.0))
    assert machine.handle(failed(P, attempt=4))[-1] == Ended("broken (attempt 4, the last)")


def test_lost_workers_that_are_not_heard_again_end_the_request() -> None:
    machine = placed(max_attempts=1)
    (*cancels, held_back) = machine.handle(WorkerLost(P, "killed"))
    assert sent(cancels) == [("p", Cancel), ("d", Cancel)] and isinstance(held_back, AwaitLost)
    assert machine.handle(NotPlaced("nobody came")) == [Ended("nobody came")]


def test_a_committed_decode_worker_that_gave_us_up_costs_no_attempt() -> None:
    machine = placed(max_attempts=1)
    machine.handle(tokens(0, 5))
    assert isinstance(machine.handle(WorkerLost(D, "it lost us", gave_us_up=True))[-1], FindPlacement)


def test_a_failure_that_would_repeat_itself_is_final_and_both_are_told() -> None:
    machine = placed()
    instructions = machine.handle(failed(P, retriable=False))
    assert sent(instructions) == [("p", Cancel), ("d", Cancel)]
    assert instructions[-1] == Ended("broken")


def test_decode_that_gives_a_sequence_up_starts_a_new_attempt() -> None:
    machine = placed()
    instructions = machine.handle(tokens(0, 5, finish=FinishReason.ABORT))
    assert delivered(instructions) == [5]
    assert isinstance(instructions[-1], FindPlacement)


def test_another_start_of_a_worker_is_another_worker() -> None:
    machine = placed()
    assert machine.handle(WorkerLost(peer("d", incarnation=2), "killed")) == []
    assert machine.handle(WorkerLost(D3, "killed")) == []


# -- the client -------------------------------------------------------------------------------------------------------


def test_stop_and_cancel_go_to_both_and_end_it() -> None:
    machine = placed()
    machine.handle(first(5))
    instructions = machine.handle(StopMatched())
    assert sent(instructions) == [("p", Stop), ("d", Stop)]
    assert instructions[-1] == Ended(None)
    machine = placed()
    instructions = machine.handle(Cancelled("gone"))
    assert sent(instructions) == [("p", Cancel), ("d", Cancel)]
    assert machine.handle(first(5)) == []


def test_a_client_that_leaves_while_no_worker_is_there_leaves_nothing() -> None:
    machine = placed()
    machine.handle(failed(P))
    assert machine.handle(Cancelled("gone")) == [Ended(None)]


# -- illegal events ---------------------------------------------------------------------------------------------------


def streaming() -> SequenceAttempts:
    machine = placed()
    machine.handle(tokens(0, 5))
    return machine


def resumed() -> SequenceAttempts:
    machine = streaming()
    machine.handle(WorkerLost(D, "killed"))
    machine.handle(Placed(P, D2, 60.0))
    return machine


def reassigning() -> SequenceAttempts:
    machine = placed()
    machine.handle(need("d"))
    return machine


ILLEGAL: list[tuple[Callable[[], SequenceAttempts], Event]] = [
    (lambda: SequenceAttempts(spec()), first(5)),
    (lambda: SequenceAttempts(spec()), DecodeChosen(D)),
    (lambda: SequenceAttempts(spec()), Placed(None, None, 1.0)),
    (lambda: SequenceAttempts(spec()), Placed(P, None, 1.0)),
    (placed, Placed(P, D, 1.0)),
    (placed, NotPlaced("late")),
    (placed, DecodeChosen(D2)),
    (placed, first(5, attempt=2)),
    (placed, first(5, worker=P2)),
    (placed, tokens(0, 5, worker=D2)),
    (placed, failed(D2)),
    (placed, DecodeNeeded(P2, 1, "refused", frozenset({"d"}))),
    (reassigning, DecodeChosen(D)),
    (streaming, Placed(P, D, 1.0)),
    (streaming, DecodeChosen(D2)),
    (resumed, first(5, index=0, attempt=2)),
    (lambda: placed(prompt_logprobs=0), first(5)),
    (lambda: placed(decode=None, max_tokens=1), need("d")),
]


@pytest.mark.parametrize(("make", "event"), ILLEGAL)
def test_an_illegal_event_raises_and_changes_nothing(make: Callable[[], SequenceAttempts], event: Event) -> None:
    machine = make()
    before = copy.deepcopy(vars(machine))
    with pytest.raises(IllegalEvent):
        machine.handle(event)
    assert vars(machine) == before


def test_after_the_end_events_from_outside_are_void_and_those_of_the_shell_illegal() -> None:
    machine = placed()
    machine.handle(StopMatched())
    for event in (first(5), tokens(0, 5), need("d"), failed(P), WorkerLost(P, "killed"), StopMatched(), Cancelled("")):
        assert machine.handle(event) == []
    own: list[Event] = [Placed(P, D, 1.0), NotPlaced(""), DecodeChosen(D)]
    for late in own:
        with pytest.raises(IllegalEvent):
            machine.handle(late)


# -- beam search ------------------------------------------------------------------------------------------------------

BEAMS = [BeamResult([1, 2, 3], -0.5, -1.5, LENGTH), BeamResult([4], -0.7, -0.7, FinishReason.STOP_TOKEN)]


def searching() -> SequenceAttempts:
    sampling = Sampling(max_tokens=3, beams=BeamSpec(width=2, num_returned=2))
    machine = SequenceAttempts(msgspec.structs.replace(spec(), sampling=sampling))
    machine.handle(Placed(P, D, 60.0))
    return machine


def test_a_beam_search_is_silent_until_its_texts_come() -> None:
    machine = searching()
    assert machine.handle(tokens(0, cached_tokens=16, usage=SequenceUsage(prompt_blocks=2))) == []
    assert machine.state is AttemptState.STREAMING
    deliver, ended = machine.handle(tokens(0, finish=LENGTH, beams=BEAMS))
    assert isinstance(deliver, Deliver)
    assert (deliver.delta.beams, deliver.delta.finish, deliver.delta.token_ids) == (BEAMS, LENGTH, [])
    assert (deliver.delta.cached_tokens, deliver.delta.usage) == (16, SequenceUsage(prompt_blocks=2))
    assert ended == Ended(None)


def test_prefill_may_end_a_beam_search() -> None:
    machine = searching()
    body = FirstToken(index=0, finish=LENGTH, beams=BEAMS, cached_tokens=3)
    deliver, _ = machine.handle(FirstTokenCame(P, 1, body))
    assert isinstance(deliver, Deliver) and deliver.delta.beams == BEAMS
    assert machine.state is AttemptState.DONE


def test_a_beam_search_starts_again_with_the_prompt() -> None:
    machine = searching()
    machine.handle(tokens(0))
    *_, find = machine.handle(WorkerLost(D, "silent"))
    assert isinstance(find, FindPlacement)
    (send,) = machine.handle(Placed(P2, D2, 30.0))
    assert isinstance(send, Send) and isinstance(send.body, Prefill)
    assert unpack_tokens(send.body.prompt.tokens).tolist() == PROMPT
    assert send.body.prompt.num_output == 0


@pytest.mark.parametrize(
    "event", [first(7), tokens(0, 7), tokens(0, finish=LENGTH), tokens(0, 7, finish=LENGTH, beams=BEAMS)]
)
def test_tokens_are_no_answer_to_a_beam_search(event: Event) -> None:
    machine = searching()
    with pytest.raises(IllegalEvent, match="beam search"):
        machine.handle(event)
    assert machine.state is AttemptState.PREFILLING
