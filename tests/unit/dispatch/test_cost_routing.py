"""The cost policy, and what surrounds all policies: prefixes replicate, bursts spread, who is never chosen."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.scheduling.step_cost import StepCost
from kvrelay_router.fleet.load import Held, OutstandingLoad, worker_key
from kvrelay_router.routing.estimates import Candidate, CandidateWorkers, Decision, Demand, Role
from kvrelay_router.routing.policy import PolicyName, decide
from tests.unit.dispatch.routed_fleet import BLOCK, COST, names
from tests.unit.dispatch.world import peer


def worker(name: str, role: Role, **load: Any) -> Candidate:
    values: dict[str, Any] = {
        "num_blocks": 4096,
        "num_free_blocks": 4096,
        "token_budget": 2048,
        "step_cost": COST,
        "block_bytes": 1 << 20,
        "transfer_bytes_s": 1e10,
    }
    return Candidate(peer(name), role, "m", **(values | load))


def demand(num_prompt_tokens: int = 4096, **options: Any) -> Demand:
    values: dict[str, Any] = {"request_id": "r", "needs_decode": True, "local_prefill_tokens": 0}
    return Demand(num_prompt_tokens=num_prompt_tokens, **(values | options))


def choose(wish: Demand, cached: dict[str, int], *workers: Candidate, policy: PolicyName = "cost") -> Decision:
    decision = decide(policy, wish, CandidateWorkers.of(workers), {"": cached})
    assert isinstance(decision, Decision)
    return decision


# -- prefill ----------------------------------------------------------------------------------------------------------


def test_who_holds_the_prefix_is_chosen_until_the_wait_there_is_longer_than_computing_it_elsewhere() -> None:
    cached, decode = {"p1": 200}, worker("d", "decode")  # 3,200 tokens: 0.16 s and more to compute
    idle = worker("p0", "prefill")
    assert names(choose(demand(), cached, idle, worker("p1", "prefill", queued_tokens=2000), decode))[0] == "p1"
    assert names(choose(demand(), cached, idle, worker("p1", "prefill", queued_tokens=80_000), decode))[0] == "p0"


def test_a_fast_worker_with_more_ahead_beats_a_slow_one() -> None:
    slow = worker("p0", "prefill", step_cost=StepCost(5e-2, 5e-4, 5e-8), queued_tokens=100)
    fast = worker("p1", "prefill", queued_tokens=2000)
    assert names(choose(demand(), {}, slow, fast, worker("d", "decode")))[0] == "p1"


def test_a_worker_without_measurements_is_taken_for_the_typical_one() -> None:
    new = worker("p0", "prefill", step_cost=None)
    known = worker("p1", "prefill", queued_tokens=1000)
    decision = choose(demand(), {}, new, known, worker("d", "decode"))
    assert names(decision)[0] == "p0"
    assert decision.expected.compute_s == pytest.approx(2 * 5e-3 + 4096 * 5e-5 + 4096**2 / 2 * 5e-9)


def test_the_expectation_is_the_sum_of_its_parts_and_the_reasons_name_them() -> None:
    busy = worker("p", "prefill", queued_tokens=2048, queued_pairs=1e6)
    decision = choose(demand(), {"p": 64}, busy, worker("d", "decode"))
    expected = decision.expected
    assert expected.queue_s == pytest.approx(5e-3 + 2048 * 5e-5 + 1e6 * 5e-9)
    assert expected.compute_s == pytest.approx(2 * 5e-3 + 3072 * 5e-5 + 3072 * (1024 + 1536) * 5e-9)
    assert expected.transfer_s == pytest.approx(128 * 2**20 / 1e10)  # the last chunk's blocks: nothing hides those
    assert expected.ttft_s == pytest.approx(expected.queue_s + expected.compute_s + expected.transfer_s)
    assert decision.num_cached_tokens == 1024 and "1024 of 4096 tokens cached" in decision.reasons[0]


@given(st.integers(1, 5000), st.integers(0, 400))
def test_at_least_one_token_is_always_computed(num_prompt_tokens: int, num_cached: int) -> None:
    decision = choose(demand(num_prompt_tokens), {"p": num_cached}, worker("p", "prefill"), worker("d", "decode"))
    assert 0 <= decision.num_cached_tokens < num_prompt_tokens
    assert decision.num_cached_tokens % BLOCK == 0
    assert decision.expected.compute_s > 0


# -- decode -----------------------------------------------------------------------------------------------------------


def test_decode_without_room_comes_last_and_blocks_that_it_holds_need_none() -> None:
    full = worker("d0", "decode", num_free_blocks=100)
    busy = worker("d1", "decode", num_sequences=50)
    assert names(choose(demand(), {}, worker("p", "prefill"), full, busy))[1] == "d1"
    assert names(choose(demand(), {"d0": 200}, worker("p", "prefill"), full, busy))[1] == "d0"


def test_handoffs_on_their_way_count_as_sequences() -> None:
    promised = worker("d0", "decode", num_sequences=40, num_pending=40)
    running = worker("d1", "decode", num_sequences=20)
    assert names(choose(demand(), {}, worker("p", "prefill"), promised, running))[1] == "d1"


def test_a_cached_prefix_on_decode_is_worth_the_transfer_it_saves() -> None:
    workers = (worker("p", "prefill", transfer_bytes_s=1e8), worker("d0", "decode"), worker("d1", "decode"))
    for ordinal in range(4):
        assert names(choose(demand(ordinal=ordinal), {"d1": 200}, *workers))[1] == "d1"


# -- decode alone -----------------------------------------------------------------------------------------------------


def test_a_short_uncached_prompt_stays_on_decode_where_that_is_sooner() -> None:
    slow_link = worker("p", "prefill", transfer_bytes_s=1e8)
    auto = demand(256, local_prefill_tokens=None)
    assert names(choose(auto, {}, slow_link, worker("d", "decode"))) == (None, "d")
    assert names(choose(auto, {}, slow_link, worker("d", "decode", num_sequences=64))) == ("p", "d")
    queue = worker("p", "prefill", queued_tokens=100_000)
    assert names(choose(auto, {}, queue, worker("d", "decode", num_sequences=64))) == (None, "d")


def test_a_slow_link_is_avoided_by_another_decode_worker_or_by_decode_alone() -> None:
    near, far = worker("d0", "decode", num_sequences=40), worker("d1", "decode")
    one_slow = worker("p", "prefill", slow_links={"d1": 2e7})
    auto = demand(local_prefill_tokens=None)
    assert names(choose(auto, {}, one_slow, far)) == (None, "d1")
    assert names(choose(auto, {}, one_slow, near)) == ("p", "d0")
    assert names(choose(demand(), {}, one_slow, near, far)) == ("p", "d0")
    assert names(choose(demand(), {}, worker("p", "prefill"), near, far)) == ("p", "d1")


@pytest.mark.parametrize("num_streams", [0, 8, 200])
def test_decode_computes_a_long_prompt_if_prefill_is_busy_for_longer_than_its_streams_would_lose(
    num_streams: int,
) -> None:
    auto, decode = demand(4096, local_prefill_tokens=None), worker("d", "decode", num_sequences=num_streams)
    # By this fleet's speeds the prompt takes 0.2 s, and a queue of 100,000 tokens about 5 s.
    busy, idle = worker("p", "prefill", queued_tokens=100_000), worker("p", "prefill", transfer_bytes_s=1e12)
    assert names(choose(auto, {}, busy, decode)) == ((None, "d") if num_streams < 100 else ("p", "d"))
    assert num_streams == 0 or names(choose(auto, {}, idle, decode)) == ("p", "d")


def test_a_decode_worker_without_measurements_is_taken_to_be_as_fast_as_prefill() -> None:
    """It has none until it gets a prompt, so waiting for them would keep prompts away forever."""
    unmeasured = worker("d", "decode", step_cost=None)
    auto = demand(64, local_prefill_tokens=None)
    assert names(choose(auto, {}, worker("p", "prefill", queued_tokens=9000), unmeasured)) == (None, "d")


@pytest.mark.parametrize("policy", [policy for policy in get_args(PolicyName) if policy != "cost"])
def test_other_policies_go_by_the_threshold_alone(policy: PolicyName) -> None:
    pair = (worker("p", "prefill", queued_tokens=100_000), worker("d", "decode"))
    assert names(choose(demand(64, local_prefill_tokens=None), {}, *pair, policy=policy)) == ("p", "d")
    assert names(choose(demand(64, local_prefill_tokens=64), {}, *pair, policy=policy)) == (None, "d")


# -- others -----------------------------------------------------------------------------------------------------------


def test_prefix_only_goes_where_the_prefix_is_whatever_the_queue() -> None:
    workers = (worker("p0", "prefill"), worker("p1", "prefill", queued_tokens=10**6), worker("d", "decode"))
    assert names(choose(demand(), {"p1": 1}, *workers, policy="prefix_only"))[0] == "p1"


@given(st.sets(st.text("abcdef", min_size=1, max_size=3), min_size=2, max_size=6), st.data())
def test_sticky_moves_only_those_whose_worker_left(workers: set[str], data: st.DataObject) -> None:
    gone = data.draw(st.sampled_from(sorted(workers)))
    fleet = [worker(name, "prefill") for name in workers] + [worker("decode", "decode")]
    for session in range(20):
        wish = demand(affinity=f"session-{session}", ordinal=session)
        before = names(choose(wish, {}, *fleet, policy="sticky"))[0]
        smaller = [each for each in fleet if each.worker_id != gone]
        after = names(choose(wish, {}, *smaller, policy="sticky"))[0]
        assert after == before or before == gone


# -- whole fleets -----------------------------------------------------------------------------------------------------


def test_a_prefix_that_many_ask_for_is_computed_again_before_a_queue_has_grown() -> None:
    workers = (worker("p0", "prefill"), worker("p1", "prefill", queued_tokens=4000), worker("d", "decode"))
    assert names(choose(demand(), {"p1": 200}, *workers))[0] == "p1"
    assert names(choose(demand(popularity=50.0), {"p1": 200}, *workers))[0] == "p0"


def test_new_prompts_go_where_the_cache_turns_over_slowest() -> None:
    busy = worker("p0", "prefill", recent_tokens=60_000.0)
    workers = (busy, worker("p1", "prefill", recent_tokens=10_000.0), worker("d", "decode"))
    assert {names(choose(demand(ordinal=n), {}, *workers))[0] for n in range(4)} == {"p1"}


def test_prompts_that_share_nothing_go_by_queues_alone() -> None:
    """Neither what two workers measured differently nor what they had of late is a reason."""
    rested = worker("p0", "prefill", queued_tokens=500, step_cost=StepCost(5e-3, 4.5e-5, 5e-9))
    tired = worker("p1", "prefill", recent_tokens=60_000.0)
    assert names(choose(demand(512), {}, rested, tired, worker("d", "decode")))[0] == "p1"


def test_what_caches_are_good_for_says_how_much_their_balance_is_worth() -> None:
    tired = worker("p0", "prefill", recent_tokens=60_000.0)
    rested = worker("p1", "prefill", queued_tokens=1000)
    for reuse, expected in ((0.0, "p0"), (0.9, "p1")):
        assert names(choose(demand(reuse=reuse), {}, tired, rested, worker("d", "decode")))[0] == expected


def test_the_time_that_a_prompt_has_been_computed_for_is_done_but_no_more_than_all_of_it() -> None:
    fresh = worker("p0", "prefill", queued_tokens=2000, head_tokens=2000, head_since_s=7.0)
    halfway = msgspec.structs.replace(fresh, peer=peer("p1"), head_since_s=6.95)
    decode = worker("d", "decode")
    assert names(choose(demand(now_s=7.0), {}, fresh, halfway, decode))[0] == "p1"
    stuck = worker("p2", "prefill", queued_tokens=4000, head_tokens=2000, head_since_s=-1000.0)
    for each, queue_s in ((fresh, 0.105), (halfway, 0.055), (stuck, 0.105)):
        assert choose(demand(now_s=7.0), {}, each, decode).expected.queue_s == pytest.approx(queue_s)


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 2), st.integers(0, 3), st.floats(0.01, 5)), max_size=60))
def test_the_prompt_in_work_is_the_oldest_one_since_it_came_first(moves: list[tuple[int, int, int, float]]) -> None:
    """Against a list for each worker, in the order of sending."""
    now = 0.0
    load = OutstandingLoad(lambda: now)
    sequences = [Held() for _ in range(8)]
    queues: dict[int, list[tuple[int, int]]] = {number: [] for number in range(3)}
    since = dict.fromkeys(queues, 0.0)
    for sequence, target, num_tokens, pause_s in moves:
        now += pause_s
        load.move(sequences[sequence], peer(f"p{target}"), num_tokens, None)
        for number, queue in queues.items():
            waits = next((at for at, (who, _) in enumerate(queue) if who == sequence), None)
            if number == target and num_tokens:
                since[number] = since[number] if queue else now
                if waits is None:
                    queue.append((sequence, num_tokens))
                else:
                    queue[waits] = (sequence, num_tokens)
            elif waits is not None:
                del queue[waits]
                since[number] = now
        for number, queue in queues.items():
            found = load.in_work(worker_key(peer(f"p{number}")))
            assert (found.num_tokens, found.since_s) == ((queue[0][1], since[number]) if queue else (0, 0.0))
    for held in sequences:
        load.move(held, None, 0, None)
    assert load.is_empty
    load.check_integrity()


def test_a_reason_shows_only_the_beginning_of_what_a_client_chose() -> None:
    wish = demand(affinity="x" * 1024)
    pair = (worker("p", "prefill"), worker("d", "decode"))
    assert max(map(len, choose(wish, {}, *pair, policy="sticky").reasons)) < 200


# -- expected prefixes ------------------------------------------------------------------------------------------------
