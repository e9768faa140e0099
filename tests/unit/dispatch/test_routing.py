"""Routing: who is chosen, why, and who is never paired."""

from __future__ import annotations

import string
from collections import Counter
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay_router.routing.estimates import Candidate, CandidateWorkers, Decision, Demand, NoPlacement, Role
from kvrelay_router.routing.policy import PolicyName, decide, decide_decode
from tests.unit.dispatch.world import peer

POLICIES: list[PolicyName] = list(get_args(PolicyName))


def worker(name: str, role: Role, fingerprint: str = "m", **load: Any) -> Candidate:
    return Candidate(peer(name), role, fingerprint, **load)


def demand(**options: Any) -> Demand:
    values: dict[str, Any] = {"request_id": "r", "num_prompt_tokens": 100, "needs_decode": True} | options
    return Demand(**values)


def decided(policy: PolicyName, wish: Demand, *workers: Candidate) -> tuple[str | None, str | None]:
    decision = decide(policy, wish, CandidateWorkers.of(workers))
    assert isinstance(decision, Decision)
    return (
        decision.prefill.worker_id if decision.prefill is not None else None,
        decision.decode.worker_id if decision.decode is not None else None,
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_one_token_is_prefills_alone(policy: PolicyName) -> None:
    wish = demand(needs_decode=False)
    assert decided(policy, wish, worker("p", "prefill"), worker("d", "decode")) == ("p", None)
    assert decided(policy, wish, worker("p", "prefill")) == ("p", None)


def test_without_prefill_decode_works_alone_and_it_is_a_fallback() -> None:
    decision = decide("least_loaded", demand(), CandidateWorkers.of([worker("d", "decode")]))
    assert isinstance(decision, Decision)
    assert decision.is_fallback and decision.prefill is None
    assert "no prefill worker" in decision.reasons[0]


def test_without_decode_nothing_is_placed_but_one_token() -> None:
    prefill = CandidateWorkers.of([worker("p", "prefill")])
    assert decide("least_loaded", demand(), prefill) == NoPlacement("no decode worker is ready")
    assert decide("least_loaded", demand(), CandidateWorkers()) == NoPlacement("no worker is ready")


def test_a_short_prompt_goes_to_decode_alone_where_that_is_wanted() -> None:
    pair = (worker("p", "prefill"), worker("d", "decode"))
    assert decided("least_loaded", demand(num_prompt_tokens=32, local_prefill_tokens=32), *pair) == (None, "d")
    assert decided("least_loaded", demand(num_prompt_tokens=33, local_prefill_tokens=32), *pair) == ("p", "d")
    decision = decide("least_loaded", demand(num_prompt_tokens=1, local_prefill_tokens=9), CandidateWorkers.of(pair))
    assert isinstance(decision, Decision) and not decision.is_fallback


def test_round_robin_takes_turns_whatever_the_load() -> None:
    workers = [worker(name, "prefill", queued_tokens=load) for name, load in zip("abc", (900, 0, 50), strict=True)]
    turns = [decided("round_robin", demand(ordinal=i), *workers, worker("d", "decode"))[0] for i in range(6)]
    assert turns == ["a", "b", "c"] * 2


def test_least_loaded_looks_at_tokens_for_prefill_and_sequences_for_decode() -> None:
    workers = (
        worker("p0", "prefill", queued_tokens=900, num_sequences=1),
        worker("p1", "prefill", queued_tokens=50, num_sequences=9),
        worker("d0", "decode", num_sequences=3, num_free_blocks=9),
        worker("d1", "decode", num_sequences=2, num_free_blocks=5),
        worker("d2", "decode", num_sequences=2, num_free_blocks=7),
    )
    assert decided("least_loaded", demand(), *workers) == ("p1", "d2")


@pytest.mark.parametrize("policy", POLICIES)
def test_equal_workers_share_evenly(policy: PolicyName) -> None:
    workers = [worker(name, "prefill") for name in "abc"] + [worker("d", "decode")]
    wishes = [demand(request_id=f"r{i}", ordinal=i) for i in range(600)]
    shares = Counter(decided(policy, wish, *workers)[0] for wish in wishes)
    assert set(shares) == {"a", "b", "c"}
    assert min(shares.values()) >= (150 if policy in ("random", "sticky") else 200)


@pytest.mark.parametrize("policy", POLICIES)
def test_where_an_attempt_failed_is_avoided_while_there_are_others(policy: PolicyName) -> None:
    workers = (worker("p0", "prefill"), worker("p1", "prefill", queued_tokens=999), worker("d", "decode"))
    for ordinal in range(4):
        assert decided(policy, demand(ordinal=ordinal, avoid=frozenset({"p0", "d"})), *workers) == ("p1", "d")
    assert decided(policy, demand(avoid=frozenset({"p0", "p1"})), *workers)[0] in ("p0", "p1")


@pytest.mark.parametrize("policy", POLICIES)
def test_after_a_handoff_that_failed_decode_needs_none(policy: PolicyName) -> None:
    workers = [worker("p", "prefill"), *(worker(f"d{number}", "decode") for number in range(2))]
    wish = demand(hands_over=False, avoid=frozenset({"p", "d0"}))
    assert decided(policy, wish, *workers) == (None, "d1"), "one that the KV did not reach is the last choice"
    assert decided(policy, wish, *workers[:2]) == (None, "d0")


@pytest.mark.parametrize("policy", POLICIES)
def test_another_decode_worker_has_the_fingerprint(policy: PolicyName) -> None:
    candidates = CandidateWorkers.of([worker("d1", "decode", "other"), worker("d2", "decode")])
    chosen = decide_decode(policy, demand(), candidates, "m")
    assert chosen is not None and chosen.worker_id == "d2"
    assert decide_decode(policy, demand(), candidates, "third") is None


CANDIDATES = st.lists(
    st.builds(
        lambda name, role, fingerprint, numerics, tokens, sequences: worker(
            name, role, fingerprint, numerics=numerics, queued_tokens=tokens, num_sequences=sequences
        ),
        name=st.text(string.ascii_lowercase, min_size=1, max_size=3),
        role=st.sampled_from(["prefill", "decode"]),
        fingerprint=st.sampled_from(["m", "n"]),
        numerics=st.sampled_from(["", "amx", "avx"]),
        tokens=st.integers(0, 100),
        sequences=st.integers(0, 10),
    ),
    unique_by=lambda candidate: candidate.worker_id,
)


@given(CANDIDATES, st.sampled_from(POLICIES), st.booleans(), st.integers(0, 50), st.frozensets(st.text(max_size=2)))
def test_decisions_are_pure_fit_the_demand_and_say_why(
    workers: list[Candidate], policy: PolicyName, needs_decode: bool, ordinal: int, avoid: frozenset[str]
) -> None:
    wish = demand(needs_decode=needs_decode, ordinal=ordinal, avoid=avoid)
    cached = {candidate.worker_id: candidate.queued_tokens // 16 for candidate in workers}
    decision = decide(policy, wish, CandidateWorkers.of(workers), {"": cached})
    assert decision == decide(policy, wish, CandidateWorkers.of(reversed(workers)), {"": cached})
    roles = {candidate.role for candidate in workers}
    if isinstance(decision, NoPlacement):
        assert "decode" not in roles and (needs_decode or "prefill" not in roles)
        return
    assert decision.reasons
    assert decision.decode is not None or not needs_decode
    if decision.prefill is not None and decision.decode is not None:
        assert decision.prefill.fingerprint == decision.decode.fingerprint == decision.fingerprint


# -- numerics ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_decode_rounds_as_prefill_does_if_any_worker_can(policy: PolicyName) -> None:
    """However busy it is while it has room, and whichever policy chose the prefill worker."""
    prefills = [worker("p0", "prefill", numerics="amx"), worker("p1", "prefill", numerics="avx")]
    alike = {"p0": "d0", "p1": "d1"}
    decodes = [
        worker("d0", "decode", numerics="amx", num_sequences=50),
        worker("d1", "decode", numerics="avx", num_sequences=60),
        worker("d2", "decode", numerics="neon"),
    ]
    for ordinal in range(6):
        prefill, decode = decided(policy, demand(ordinal=ordinal), *prefills, *decodes)
        assert prefill is not None and decode == alike[prefill]
    assert decided(policy, demand(), *prefills, decodes[2])[1] == "d2", "there is no other"


def test_a_request_that_begins_goes_where_there_is_room() -> None:
    """While a fleet is replaced, its last workers of the old version are not left with all requests."""
    prefill, other = worker("p", "prefill", numerics="amx"), worker("d2", "decode", numerics="avx")
    full = [worker(f"d{number}", "decode", numerics="amx", num_blocks=100) for number in range(2)]
    assert decided("cost", demand(), prefill, *full, other) == ("p", "d2")
    assert decided("cost", demand(numerics="amx"), prefill, *full, other) == ("p", "d0"), "what has begun goes on alike"


@pytest.mark.parametrize("policy", POLICIES)
def test_a_worker_that_failed_is_avoided_before_one_that_rounds_otherwise(policy: PolicyName) -> None:
    decodes = [worker("d0", "decode", numerics="amx"), worker("d1", "decode", numerics="avx")]
    prefill = worker("p", "prefill", numerics="amx")
    assert decided(policy, demand(), prefill, *decodes) == ("p", "d0")
    assert decided(policy, demand(avoid=frozenset({"d0"})), prefill, *decodes) == ("p", "d1")
    assert decided(policy, demand(avoid=frozenset({"d0", "d1"})), prefill, *decodes) == ("p", "d0")
    spare = worker("d2", "decode", numerics="amx", num_sequences=50)
    assert decided(policy, demand(avoid=frozenset({"d0"})), prefill, *decodes, spare) == ("p", "d2")


@pytest.mark.parametrize("policy", POLICIES)
def test_a_retry_goes_on_as_the_first_attempt_computed(policy: PolicyName) -> None:
    workers = [
        worker(f"{role[0]}{number}", role, numerics=numerics, queued_tokens=load, num_sequences=load)
        for role in ("prefill", "decode")
        for number, (numerics, load) in enumerate([("amx", 40), ("avx", 0), ("avx", 80)])
    ]
    for numerics, numbers in (("amx", "0"), ("avx", "12")):
        for ordinal in range(4):
            wish = demand(numerics=numerics, ordinal=ordinal)
            prefill, decode = decided(policy, wish, *workers)
            assert prefill is not None and decode is not None and {prefill[1], decode[1]} <= set(numbers)
            alone = msgspec.structs.replace(wish, local_prefill_tokens=100)
            prefill, decode = decided(policy, alone, *workers)
            assert prefill is None and decode is not None and decode[1] in numbers
    other = decided(policy, demand(numerics="neon"), *workers)
    assert other in {("p0", "d0"), ("p1", "d1"), ("p1", "d2"), ("p2", "d1"), ("p2", "d2")}, "alike among themselves"


@pytest.mark.parametrize("policy", POLICIES)
def test_another_decode_worker_for_a_handoff_rounds_as_its_prefill_worker(policy: PolicyName) -> None:
    decodes = [worker(f"d{number}", "decode", numerics=each) for number, each in enumerate(["avx", "amx", "avx"])]
    for ordinal in range(4):
        chosen = decide_decode(policy, demand(numerics="amx", ordinal=ordinal), CandidateWorkers.of(decodes), "m")
        assert chosen == decodes[1]
    assert decide_decode(policy, demand(numerics="neon"), CandidateWorkers.of(decodes), "m") in decodes


@given(
    CANDIDATES,
    st.sampled_from(POLICIES),
    st.booleans(),
    st.integers(0, 50),
    st.frozensets(st.text(string.ascii_lowercase, max_size=1)),
    st.sampled_from(["", "amx", "avx", "neon"]),
)
def test_numerics_are_a_preference_behind_fingerprints_and_failures(
    workers: list[Candidate], policy: PolicyName, needs_decode: bool, ordinal: int, avoid: frozenset[str], wanted: str
) -> None:
    wish = demand(needs_decode=needs_decode, ordinal=ordinal, avoid=avoid, numerics=wanted)
    decision = decide(policy, wish, CandidateWorkers.of(workers))
    without = decide(policy, msgspec.structs.replace(wish, numerics=""), CandidateWorkers.of(workers))
    assert isinstance(decision, Decision) == isinstance(without, Decision), "it refuses nothing"
    if not isinstance(decision, Decision):
        return
    prefill, decode = decision.prefill, decision.decode
    if prefill is not None:
        paired = {each.fingerprint for each in workers if each.role == "decode"}
        fitting = [each for each in workers if each.role == "prefill"]
        fitting = [each for each in fitting if not needs_decode or each.fingerprint in paired]
        assert prefill in preferred(fitting, avoid, wanted)
    if decode is not None:
        fitting = [each for each in workers if each.role == "decode"]
        if prefill is not None:
            fitting = [each for each in fitting if each.fingerprint == prefill.fingerprint]
        assert decode in preferred(fitting, avoid, wanted if prefill is None else prefill.numerics)


def preferred(workers: list[Candidate], avoid: frozenset[str], numerics: str) -> list[Candidate]:
    """The best of these: not avoided counts more than alike."""

    def rank(each: Candidate) -> tuple[bool, bool]:
        return each.worker_id in avoid, bool(numerics) and each.numerics != numerics

    return [each for each in workers if rank(each) == min(map(rank, workers))]
