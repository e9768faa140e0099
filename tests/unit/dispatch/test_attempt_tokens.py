"""What the attempts' machine delivers of the tokens that come, one rule at a time."""

from __future__ import annotations

import msgspec

from kvrelay.protocol.messages import (
    FirstToken,
    PeerRef,
    Prefill,
    PromptLogprobs,
    SequenceUsage,
    unpack_tokens,
)
from kvrelay.protocol.packed_logprobs import packed_in_parts
from kvrelay.protocol.sampling import BeamSpec, FinishReason, Sampling, ScoredText, TokenLogprobs
from kvrelay_router.dispatch.attempt import AttemptState
from kvrelay_router.dispatch.events import (
    Ended,
    Event,
    FindPlacement,
    Instruction,
    Send,
    TokensArrived,
    WorkersAssigned,
)
from kvrelay_router.dispatch.running_request import ScoresReceived
from tests.unit.dispatch.attempt_events import (
    D2,
    LENGTH,
    P2,
    D,
    P,
    delivered,
    first,
    lost,
    placed,
    tokens,
)
from tests.unit.dispatch.driven_sequence import (
    Deliver,
    Done,
    DrivenSequence,
    FirstTokenReceived,
    ScoresFrom,
)
from tests.unit.dispatch.world import PROMPT, spec

# -- what the attempt machine hears of tokens -------------------------------------------------------------------------


def test_only_the_first_tokens_and_the_last_are_events() -> None:
    machine, events = placed(), list[Event]()

    def recorded(event: Event) -> list[Instruction]:
        events.append(event)
        return machine.attempts.handle(event)

    machine.handle_event = recorded
    for received in (first(5), tokens(0, 5), tokens(1, 6), tokens(2, 7, 8), tokens(4, 9, finish=LENGTH)):
        machine.handle(received)
    own = (True, True, False), (False, False, False), (False, True, True)
    assert events == [TokensArrived(*each) for each in own]


# -- tokens -----------------------------------------------------------------------------------------------------------


def test_a_batch_that_overlaps_delivers_what_is_new_with_its_logprobs() -> None:
    machine = placed()
    machine.handle(first(5))
    logprobs = [TokenLogprobs(token, -1.0, [], []) for token in (5, 6)]
    (deliver,) = machine.handle(tokens(0, 5, 6, logprobs=logprobs))
    assert isinstance(deliver, Deliver)
    assert (deliver.delta.token_ids, deliver.delta.logprobs) == ([6], logprobs[1:])


def test_a_finish_without_a_new_token_ends_the_sequence() -> None:
    machine = placed()
    machine.handle(tokens(0, 5))
    deliver, ended = machine.handle(tokens(1, finish=LENGTH))
    assert isinstance(deliver, Deliver) and deliver.delta.finish is LENGTH and deliver.delta.token_ids == []
    assert ended == Ended(None)


def scores(start: int, *token_ids: int, attempt: int = 1, worker: PeerRef = P) -> ScoresFrom:
    (part,) = packed_in_parts([TokenLogprobs(token_id, -1.0, [], []) for token_id in token_ids])
    return ScoresFrom(worker, ScoresReceived(attempt, PromptLogprobs(start=start, part=part)))


def scored(instructions: list[Done]) -> list[int]:
    """The tokens of the log-probabilities in the only delta, which has others' tokens behind them."""
    (deliver,) = [each for each in instructions if isinstance(each, Deliver)]
    return [each.token_id for each in deliver.delta.prompt_logprobs[:]]


def test_parts_of_prompt_logprobs_go_out_with_the_first_token_and_once() -> None:
    machine = placed(prompt_logprobs=0)
    assert machine.handle(scores(0, 12)) == []
    assert machine.handle(scores(1, 13)) == []
    assert machine.state is AttemptState.PREFILLING
    instructions = machine.handle(first(5))
    assert (delivered(instructions), scored(instructions)) == ([5], [12, 13])
    assert machine.handle(scores(0, 12, 13)) == []
    assert scored(machine.handle(tokens(0, 5, 6))) == []


def test_scoring_ends_with_one_delta_without_tokens() -> None:
    machine = placed(decode=None, max_tokens=0, prompt_logprobs=0)
    machine.handle(scores(0, 12, 13))
    done = machine.handle(FirstTokenReceived(P, 1, FirstToken(index=0, finish=LENGTH)))
    assert scored(done) == [12, 13]
    assert isinstance(done[0], Deliver) and (done[0].delta.token_ids, done[0].delta.finish) == ([], LENGTH)
    assert done[1:] == [Ended(None)]


def test_the_last_part_releases_tokens_of_a_faster_decode_worker() -> None:
    machine = placed(prompt_logprobs=0)
    assert machine.handle(tokens(0, 5)) == machine.handle(scores(0, 12)) == machine.handle(tokens(1, 6)) == []
    instructions = machine.handle(scores(1, 13))
    assert (delivered(instructions), scored(instructions)) == ([5, 6], [12, 13])
    assert machine.state is AttemptState.STREAMING and machine.attempts.is_streaming
    assert machine.handle(first(5)) == []


def test_a_prompt_that_is_computed_again_repeats_and_loses_no_logprobs() -> None:
    machine = placed(prefill=None, prompt_logprobs=0)
    assert machine.handle(scores(0, 12, worker=D)) == []
    assert machine.attempts.computes_prompt == D
    assert machine.handle(scores(0, 12, 13, worker=D)) == machine.handle(scores(0, 12, worker=D)) == []
    assert scored(machine.handle(tokens(0, 5))) == [12, 13]


def test_complete_parts_of_a_lost_worker_are_good_for_the_next_attempt() -> None:
    machine = placed(prompt_logprobs=0)
    machine.handle(scores(0, 12, 13))
    machine.handle(lost(P, "killed"))
    machine.handle(WorkersAssigned(P2, D, 60.0))
    assert scored(machine.handle(first(9, attempt=2, worker=P2))) == [12, 13]


def test_an_attempt_after_the_first_token_scores_nothing() -> None:
    machine = placed(prompt_logprobs=0)
    machine.handle(scores(0, 12, 13))
    machine.handle(first(5))
    machine.handle(lost(P, "killed"))
    (send,) = machine.handle(WorkersAssigned(P2, D, 60.0))
    assert isinstance(send, Send) and isinstance(send.body, Prefill)
    assert send.body.prompt.sampling.prompt_logprobs is None
    assert delivered(machine.handle(first(6, index=1, attempt=2, worker=P2))) == [6]


def test_cached_tokens_are_told_once_and_usage_with_the_next_delta() -> None:
    machine = placed()
    (deliver,) = machine.handle(first(5, cached_tokens=16))
    assert isinstance(deliver, Deliver) and deliver.delta.cached_tokens == 16
    usage = SequenceUsage(prompt_blocks=2, received_blocks=1, cached_blocks=1)
    assert machine.handle(tokens(0, 5, cached_tokens=16, usage=usage)) == []
    (deliver,) = machine.handle(tokens(1, 6))
    assert isinstance(deliver, Deliver)
    assert (deliver.delta.cached_tokens, deliver.delta.usage) == (None, usage)


# -- beam search ------------------------------------------------------------------------------------------------------

BEAMS = [ScoredText([1, 2, 3], -0.5, -1.5, LENGTH), ScoredText([4], -0.7, -0.7, FinishReason.STOP_TOKEN)]


def searching() -> DrivenSequence:
    sampling = Sampling(max_tokens=3, beams=BeamSpec(width=2, num_returned=2))
    prompt = msgspec.structs.replace(spec().prompt, sampling=sampling)
    machine = DrivenSequence(msgspec.structs.replace(spec(), prompt=prompt))
    machine.handle(WorkersAssigned(P, D, 60.0))
    return machine


def test_a_beam_search_is_silent_until_its_texts_come() -> None:
    machine = searching()
    assert machine.handle(tokens(0, cached_tokens=16, usage=SequenceUsage(prompt_blocks=2))) == []
    assert machine.state is AttemptState.STREAMING
    deliver, ended = machine.handle(tokens(0, finish=LENGTH, texts=BEAMS))
    assert isinstance(deliver, Deliver)
    assert (deliver.delta.texts, deliver.delta.finish, deliver.delta.token_ids) == (BEAMS, LENGTH, [])
    assert (deliver.delta.cached_tokens, deliver.delta.usage) == (16, SequenceUsage(prompt_blocks=2))
    assert ended == Ended(None)


def test_prefill_may_end_a_beam_search() -> None:
    machine = searching()
    body = FirstToken(index=0, finish=LENGTH, texts=BEAMS, cached_tokens=3)
    deliver, _ = machine.handle(FirstTokenReceived(P, 1, body))
    assert isinstance(deliver, Deliver) and deliver.delta.texts == BEAMS
    assert machine.state is AttemptState.DONE


def test_a_beam_search_starts_again_with_the_prompt() -> None:
    machine = searching()
    machine.handle(tokens(0))
    *_, find = machine.handle(lost(D, "silent"))
    assert isinstance(find, FindPlacement)
    (send,) = machine.handle(WorkersAssigned(P2, D2, 30.0))
    assert isinstance(send, Send) and isinstance(send.body, Prefill)
    assert unpack_tokens(send.body.prompt.tokens).tolist() == PROMPT
    assert send.body.prompt.num_output == 0
