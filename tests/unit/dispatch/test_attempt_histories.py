"""Whatever happens to workers and messages, the client gets the true tokens, each once, in order, and one end."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvrelay.protocol.messages import Cancel, Generate, Prefill
from kvrelay.protocol.sampling import FinishReason
from kvrelay_router.dispatch.attempt import AttemptState
from kvrelay_router.dispatch.events import Cancelled, StopMatched
from kvrelay_router.dispatch.retry_budget import MAX_UNCOUNTED_ATTEMPTS
from tests.thoroughness import examples
from tests.unit.dispatch.world import World, spec, true_token

WORLDS = st.builds(
    World,
    seed=st.integers(0, 2**32),
    spec=st.builds(
        spec, max_tokens=st.integers(0, 12), max_attempts=st.sampled_from([1, 3, 50]), num_forced=st.integers(0, 5)
    ),
    num_prefill=st.integers(0, 3),
    num_decode=st.integers(1, 3),
    mischief=st.sampled_from([0.0, 0.05, 0.2]),
)


@settings(max_examples=examples(600), deadline=None)
@given(WORLDS)
def test_tokens_are_true_in_order_and_the_sequence_ends_once(world: World) -> None:
    world.run()
    max_tokens = world.machine.spec.sampling.max_tokens
    assert world.tokens == [true_token(index) for index in range(len(world.tokens))]
    assert len(world.ends) == 1
    assert world.machine.attempt <= world.machine.spec.max_attempts + MAX_UNCOUNTED_ATTEMPTS
    finishes = [delta.finish for delta in world.deltas if delta.finish is not None]
    if world.ends == [None]:
        assert len(world.tokens) == max_tokens
        assert finishes == [FinishReason.LENGTH]
        assert world.deltas[-1].finish is FinishReason.LENGTH
    else:
        assert world.machine.state is AttemptState.FAILED
        assert not finishes
        assert len(world.tokens) < max(1, max_tokens)


@settings(max_examples=examples(300), deadline=None)
@given(WORLDS)
def test_a_calm_world_takes_one_attempt(world: World) -> None:
    world.mischief = 0.0
    world.run()
    assert world.ends == [None]
    assert world.machine.attempt == 1


@settings(max_examples=examples(600), deadline=None)
@given(WORLDS)
def test_every_worker_of_an_attempt_that_failed_is_told(world: World) -> None:
    world.run()
    for attempt in range(1, world.machine.attempt):
        asked = {send.worker.peer_id for send in world.sent if send.attempt == attempt and _starts(send.body)}
        named = {
            send.body.decode.peer_id
            for send in world.sent
            if send.attempt == attempt and isinstance(send.body, Prefill) and send.body.decode is not None
        }
        told = {send.worker.peer_id for send in world.sent if send.attempt == attempt and isinstance(send.body, Cancel)}
        assert asked | named <= told


@settings(max_examples=examples(400), deadline=None)
@given(WORLDS, st.integers(0, 60), st.booleans())
@example(World(6762, spec(max_tokens=5, max_attempts=1), num_prefill=2, num_decode=1, mischief=0.2), 22, False).via(
    "cancelled while held back for lost workers"
)
def test_nothing_comes_after_stop_or_cancel_and_both_legs_hear_of_it(world: World, after: int, stop: bool) -> None:
    for _ in range(after):
        if not world.machine.is_over:
            world.step()
    if world.machine.is_over:
        return
    legs = [leg.peer_id for leg in (world.machine.prefill, world.machine.decode) if leg is not None]
    num_sent, num_deltas = len(world.sent), len(world.deltas)
    world.feed(StopMatched() if stop else Cancelled("the client is gone"))
    assert [send.worker.peer_id for send in world.sent[num_sent:]] == legs
    assert world.ends == [None]
    for _ in range(200):
        world.step()
    assert len(world.deltas) == num_deltas
    assert world.ends == [None]


def _starts(body: object) -> bool:
    return isinstance(body, Prefill | Generate)
