"""Placement over whole fleets, under every policy: prefixes replicate, bursts spread, who is never chosen."""

from __future__ import annotations

from collections import Counter
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay_router.dispatch.interface import TooLate
from kvrelay_router.dispatch.placement import PromptPrefixes
from kvrelay_router.routing.estimates import Decision
from kvrelay_router.routing.policy import PolicyName
from tests.unit.dispatch.routed_fleet import Fleet, chosen_prefill, names


@pytest.mark.parametrize("policy", get_args(PolicyName))
def test_a_worker_that_was_not_heard_lately_gets_nothing_while_others_are(policy: PolicyName) -> None:
    fleet = Fleet("p0", "p1", "d0", "d1", policy=policy)
    fleet.silent_s = {"p0": 1.6, "d1": 9.0, "d0": 1.4}
    for number in range(8):
        decision, _ = fleet.place([number] * 200, number)
        assert names(decision) == ("p1", "d0")
    prompt = PromptPrefixes([1] * 200)
    chosen = fleet.placement.place_decode("r", prompt, "f", frozenset({("d0", "1")}))
    assert chosen is not None and chosen.worker_id == "d1", "the last one there is"
    fleet.silent_s = {"p0": 3.0, "p1": 4.0, "d0": 5.0, "d1": 6.0}  # this router itself stood still
    assert {names(fleet.place([number] * 200, number)[0])[0] for number in range(8)} <= {"p0", "p1"}


def test_a_burst_between_two_load_reports_spreads() -> None:
    fleet = Fleet(*(f"p{i}" for i in range(8)), *(f"d{i}" for i in range(4)))
    prompts = [[number] * 2000 for number in range(64)]
    decisions = [fleet.place(prompt, number)[0] for number, prompt in enumerate(prompts)]
    assert set(Counter(map(chosen_prefill, decisions)).values()) == {8}
    decodes = Counter(decision.decode.worker_id for decision in decisions if decision.decode is not None)
    assert set(decodes.values()) == {16}


def test_what_another_router_has_sent_counts_once_a_worker_has_said_so() -> None:
    fleet = Fleet("p0", "p1", "d0")
    fleet.place([1] * 2000)
    first = chosen_prefill(fleet.place([2] * 2000, 1)[0])
    other = "p0" if first == "p1" else "p1"
    # Both have this router's 2,000; another router's 50,000 make the difference, and ours are not counted twice.
    for name in ("p0", "p1"):
        foreign = 50_000 if name == other else 0
        fleet.report(name, queued_tokens=2000 + foreign, own_queued_tokens=2000, num_sequences=1, own_sequences=1)
    assert {chosen_prefill(fleet.place([3 + i] * 2000, 2 + i)[0]) for i in range(8)} == {first}


def test_a_hot_prefix_replicates_under_load_and_stays_where_it_is_without() -> None:
    hot = list(range(8192))
    calm = Fleet("p0", "p1", "p2", "p3", "d0")
    for number in range(12):  # each is done before the next comes
        decision, held = calm.place([*hot, *[number] * 200], number)
        calm.load.move(held, None, 0, None)
        assert number == 0 or decision.num_cached_tokens == 8192
    busy = Fleet("p0", "p1", "p2", "p3", "d0")
    decisions = [busy.place([*hot, *[number] * 200], number)[0] for number in range(1000)]
    shares = Counter(map(chosen_prefill, decisions))
    assert len(shares) == 4 and max(shares.values()) < 2 * min(shares.values())
    assert sum(decision.num_cached_tokens == 0 for decision in decisions) == 4, "each computes the prefix once"


@pytest.mark.parametrize("number", range(4))
def test_siblings_of_a_fork_go_to_the_prefill_worker_that_computed_their_prefix(number: int) -> None:
    fleet = Fleet("p0", "p1", "p2", "p3", "d0")
    for other in range(number):  # the worker that is next in turn differs
        fleet.placement.place(f"other{other}", prompt=PromptPrefixes([other] * 64), needs_decode=True)
    prefix = list(range(4096))
    prompt = PromptPrefixes(prefix)
    hint = fleet.placement.place("prefix", prompt=prompt, needs_decode=False)
    assert isinstance(hint, Decision) and hint.decode is None
    fleet.placement.placed(hint, prompt)
    siblings = [fleet.place([*prefix, *[number] * 32], number)[0] for number in range(16)]  # none ends before the last
    assert {chosen_prefill(each) for each in siblings} == {chosen_prefill(hint)}
    assert all(each.num_cached_tokens == 4096 for each in siblings)


def test_of_equal_workers_the_one_that_served_the_session_is_chosen() -> None:
    fleet = Fleet("p0", "p1", "p2", "d0", "d1", "d2")

    def place(tokens: list[int], session: str) -> tuple[str | None, str | None]:
        prompt = PromptPrefixes(tokens, session_key=session)
        decision = fleet.placement.place("r", prompt=prompt, needs_decode=True)
        assert isinstance(decision, Decision)
        fleet.placement.placed(decision, prompt)
        return names(decision)

    served = {session: place([number] * 8, session) for number, session in enumerate(("a", "b", "c"))}
    assert len({prefill for prefill, _ in served.values()}) == 3  # they spread
    for turn in range(1, 5):
        for number, (session, workers) in enumerate(served.items()):
            assert place([100 * turn + number] * 8, session) == workers  # no prompt has a full block
    fleet.placement.session_ended("b")
    assert {place([number] * 8, "") for number in range(900, 909)} > {served["b"]}


def test_a_session_does_not_outweigh_a_queue_or_a_cached_prefix() -> None:
    fleet = Fleet("p0", "p1", "d0")
    prefix = list(range(4096))
    first, _ = fleet.place(prefix)
    prompt = PromptPrefixes([7] * 8, session_key="a")
    fleet.report(chosen_prefill(first), queued_tokens=8192, queued_pairs=8192.0 * 4096)
    elsewhere = fleet.placement.place("r", prompt=prompt, needs_decode=True)
    assert isinstance(elsewhere, Decision)
    fleet.placement.placed(elsewhere, prompt)
    assert chosen_prefill(elsewhere) != chosen_prefill(first)
    fleet.report(chosen_prefill(first))
    again = fleet.placement.place("s", prompt=PromptPrefixes([*prefix, *[9] * 32], session_key="a"), needs_decode=True)
    assert isinstance(again, Decision) and chosen_prefill(again) == chosen_prefill(first)


@given(
    st.sampled_from(get_args(PolicyName)),
    st.sets(st.sampled_from(["p0", "p1", "p2", "d0", "d1"])),
    st.lists(st.integers(0, 3), min_size=1, max_size=30),
)
def test_a_draining_worker_is_never_chosen(policy: PolicyName, draining: set[str], prompts: list[int]) -> None:
    fleet = Fleet("p0", "p1", "p2", "p3", "d0", "d1", "d2", policy=policy, draining=tuple(draining))
    for number, prompt in enumerate(prompts):
        decision, _ = fleet.place([prompt] * 100, number)
        chosen = {each.worker_id for each in (decision.prefill, decision.decode) if each is not None}
        assert not chosen & draining


def test_the_last_decisions_are_kept_with_their_reasons() -> None:
    fleet = Fleet("p0", "d0")
    for number in range(60):
        fleet.place([number] * 100, number)
    latest = fleet.placement.last_decisions
    assert len(latest) == 50 and latest[-1]["request_id"] == "r59"
    assert latest[-1]["prefill"] == "p0" and latest[-1]["reasons"] and latest[-1]["expected_ms"]["compute"] > 0


def test_what_no_placement_serves_in_time_is_refused_and_what_another_policy_would_miss_is_not() -> None:
    fleet = Fleet("p0", "p1", "d0", policy="prefix_only")
    long = PromptPrefixes(list(range(4096)))
    for number in range(20):  # all on one worker, which holds the prefix
        fleet.place([*range(4096), *[number] * 2000], number)
    late = fleet.placement.place("r", prompt=long, needs_decode=True)
    soon = fleet.placement.place("r", prompt=long, needs_decode=True, deadline_s=1.0)
    assert isinstance(late, Decision) and isinstance(soon, Decision)
    assert chosen_prefill(late) != chosen_prefill(soon)
    assert late.expected.ttft_s > 1.0 > soon.expected.ttft_s
    with pytest.raises(TooLate) as caught:
        fleet.placement.place("r", prompt=long, needs_decode=True, deadline_s=0.05)
    assert caught.value.retry_after_s == pytest.approx(soon.expected.ttft_s - 0.05)
