"""The open requests' index by the router's request, against going through all of them."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.worker.context import WorkerContext
from kvrelay.worker.requests import OpenRequests

pytestmark = pytest.mark.unit

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
