"""What a worker checks by itself, and what it remembers of cancels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.protocol.messages import Header, PeerRef, Prompt, pack_tokens
from kvrelay.protocol.sampling import Sampling
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.worker.context import WorkerContext
from kvrelay.worker.requests import CancelledRequestCache, OpenRequests, PromptRefused, make_sequence
from tests.fakes.hash_runner import VOCAB_SIZE, HashRunner

ROUTER = PeerRef("router", "1", "tcp://127.0.0.1:1")
HEADER = Header(
    sender="router", incarnation="1", reply_to="tcp://127.0.0.1:1", to_incarnation="2", link=1, request="r", attempt=2
)
SPEC = HashRunner(num_blocks=8, block_size=16, max_model_len=512).spec


def prompt(tokens: list[int], max_tokens: int = 4, num_output: int = 0, cache_salt: str = "") -> Prompt:
    sampling = Sampling(max_tokens=max_tokens)
    return Prompt(tokens=pack_tokens(tokens), num_output=num_output, sampling=sampling, cache_salt=cache_salt)


def test_a_resumed_prompt_tells_output_from_prompt() -> None:
    sequence = make_sequence(HEADER, prompt([5, 6, 7, 8, 9], max_tokens=10, num_output=2), ROUTER, SPEC)
    assert sequence.key == ("r", 2, 0)
    assert (sequence.num_prompt, sequence.num_output, sequence.num_tokens) == (3, 2, 5)
    assert sequence.wants_token


@pytest.mark.parametrize("owner", [None, "", "tenant"])
def test_the_owner_of_the_text_comes_from_the_prompt(owner: str | None) -> None:
    asked = msgspec.structs.replace(prompt([5, 6]), text_owner=owner)
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(asked), type=Prompt)
    assert make_sequence(HEADER, received, ROUTER, SPEC).origin.text_owner == owner


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (prompt([]), "0 tokens"),
        (prompt([1, 2], num_output=2), "2 are output"),
        (prompt([1, VOCAB_SIZE]), "token id"),
        (prompt([1, -1]), "token id"),
        (prompt([1] * 128, max_tokens=1), "max_model_len 128"),
        (prompt([1] * 129, max_tokens=0), "max_model_len 128"),
    ],
)
def test_a_prompt_that_can_never_run_is_refused_with_the_reason(wrong: Prompt, reason: str) -> None:
    with pytest.raises(PromptRefused, match=reason):
        make_sequence(HEADER, wrong, ROUTER, SPEC)


def test_a_prompt_that_may_outgrow_the_pool_is_refused() -> None:
    larger = replace(SPEC, max_model_len=512)
    assert make_sequence(HEADER, prompt([1] * 100, max_tokens=28), ROUTER, larger).num_tokens == 100
    with pytest.raises(PromptRefused, match="may grow to 9 blocks, the pool has 8"):
        make_sequence(HEADER, prompt([1] * 100, max_tokens=29), ROUTER, larger)


def test_a_prompt_that_just_fits_is_taken() -> None:
    assert make_sequence(HEADER, prompt([1] * 127, max_tokens=100), ROUTER, SPEC).num_tokens == 127
    assert make_sequence(HEADER, prompt([1] * 128, max_tokens=0), ROUTER, SPEC).num_tokens == 128


def test_a_salt_gives_other_block_hashes() -> None:
    hashes = [
        make_sequence(HEADER, prompt([1] * 40, cache_salt=salt), ROUTER, SPEC).block_hashes(2) for salt in ("", "a", "")
    ]
    assert hashes[0] == hashes[2]
    assert not set(hashes[0]) & set(hashes[1])


def test_cancelled_attempts_are_remembered_for_a_while_and_in_bounded_number() -> None:
    cancelled = CancelledRequestCache(keep_s=10, at_most=3)
    for number in range(4):
        cancelled.add(("r", number, 0), now=float(number))
    assert ("r", 0, 0) not in cancelled
    assert ("r", 3, 0) in cancelled
    cancelled.add(("late", 1, 0), now=12.5)
    assert ("r", 2, 0) not in cancelled
    assert len(cancelled) == 2


# -- the open requests' index by the router's request, against going through all of them -----------------------------


SAMPLES = {"a": 1, "b": 2, "c": 5}
"""Of each of the router's requests."""
KEYS = st.sampled_from([(name, attempt, i) for name, n in SAMPLES.items() for attempt in range(3) for i in range(n)])


@dataclass(eq=False)
class OpenRequest:
    """What `OpenRequests` asks of a request."""

    sequence: Any
    scores = None


@given(st.lists(st.tuples(st.sampled_from(["add", "remove", "supersede"]), KEYS), max_size=60))
def test_samples_are_found_as_by_going_through_all_requests(actions: list[tuple[str, SequenceKey]]) -> None:
    context = cast("WorkerContext", SimpleNamespace())
    requests: OpenRequests[OpenRequest] = OpenRequests(context, "prefill", lambda key, reason: requests.remove(key))
    by_hand: list[OpenRequest] = []
    for action, key in actions:
        if action == "add" and key not in requests:
            by_hand.append(OpenRequest(SimpleNamespace(key=key)))
            requests.add(by_hand[-1])
        elif action == "remove":
            requests.remove(key)
            by_hand = [each for each in by_hand if each.sequence.key != key]
        elif action == "supersede":
            requests.supersede(key)
            name, attempt, sample = key
            by_hand = [
                each
                for each in by_hand
                if (each.sequence.key[0], each.sequence.key[2]) != (name, sample) or each.sequence.key[1] >= attempt
            ]
        assert list(requests.values()) == by_hand
        for name in SAMPLES:
            assert list(requests.samples_of(name)) == [each for each in by_hand if each.sequence.key[0] == name]
    assert requests._samples.keys() == {key[0] for key in requests}, "nothing stays of what has ended"
