"""The cost policy, and what surrounds all policies: prefixes replicate, bursts spread, who is never chosen."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.fleet import WorkerRecord
from kvrelay.kv.hashing import hash_blocks, root_hash
from kvrelay.protocol.messages import LoadReport, PeerRef, Status
from kvrelay.scheduling.step_cost import StepCost
from kvrelay_router.dispatch.interface import TooLate
from kvrelay_router.dispatch.load import Held, OutstandingLoad, worker_key
from kvrelay_router.dispatch.placement import Placement, PromptPrefixes, work_of
from kvrelay_router.fleet_view import FleetView
from kvrelay_router.routing import prefix_popularity
from kvrelay_router.routing.candidates import Candidate, CandidateWorkers, Decision, Demand, Role
from kvrelay_router.routing.expected_prefixes import ExpectedPrefixes
from kvrelay_router.routing.policy import PolicyName, decide
from kvrelay_router.routing.prefix_popularity import FORGET_S, HALF_LIFE_S, PrefixPopularity
from tests.unit.dispatch.world import peer

COST = StepCost(5e-3, 5e-5, 5e-9)
BLOCK = 16


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
    decision = decide(policy, wish, CandidateWorkers.of(workers), cached)
    assert isinstance(decision, Decision)
    return decision


def names(decision: Decision) -> tuple[str | None, str | None]:
    return (
        decision.prefill.worker_id if decision.prefill is not None else None,
        decision.decode.worker_id if decision.decode is not None else None,
    )


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


def test_only_the_uncached_part_must_be_short_and_never_more_than_a_step() -> None:
    queue, decode = worker("p", "prefill", queued_tokens=100_000), worker("d", "decode", num_sequences=8)
    auto = demand(4096, local_prefill_tokens=None)
    assert names(choose(auto, {"d": 250}, queue, decode)) == (None, "d")
    assert names(choose(auto, {}, queue, decode)) == ("p", "d")


def test_speeds_that_nobody_measured_decide_nothing() -> None:
    unknown = (worker("p", "prefill", queued_tokens=9000), worker("d", "decode", step_cost=None))
    assert names(choose(demand(64, local_prefill_tokens=None), {}, *unknown)) == ("p", "d")


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


class Fleet:
    """A real view and placement over workers that report when they are told to, and compute when time passes."""

    def __init__(self, *names: str, policy: PolicyName = "cost", draining: tuple[str, ...] = ()) -> None:
        self.load = OutstandingLoad()
        self.view = FleetView(self.load)
        self.records = {name: _record(name) for name in names}
        self.view.registered(self.records.values(), 0.0)
        self.silent_s: dict[str, float] = {}
        self.placement = Placement(
            self.view, policy, 0, silent_s=lambda peer: self.silent_s.get(peer.peer_id, 0.0), lately_s=1.5
        )
        for name in names:
            self.report(name, draining=name in draining)

    def report(self, name: str, *, draining: bool = False, **load: Any) -> None:
        record = self.records[name]
        report = LoadReport(step_cost=(COST.fixed_s, COST.token_s, COST.pair_s), **load)
        status = Status(query=1, draining=draining, queues={}, blocks={"free": 4096}, totals={}, load=report)
        self.view.answered(_peer(record), status, 0.0)

    def place(self, prompt_ids: list[int], number: int = 0) -> tuple[Decision, Held]:
        prompt = PromptPrefixes(prompt_ids)
        decision = self.placement.place(f"r{number}", prompt=prompt, needs_decode=True)
        assert isinstance(decision, Decision) and decision.decode is not None
        self.placement.placed(decision, prompt)
        held, work = Held(), work_of(decision, len(prompt_ids))
        computes = decision.prefill or decision.decode
        self.load.move(held, computes.peer, work.num_tokens, decision.decode.peer, num_pairs=work.num_pairs)
        return decision, held


@pytest.mark.parametrize("policy", get_args(PolicyName))
def test_a_worker_that_was_not_heard_lately_gets_nothing_while_others_are(policy: PolicyName) -> None:
    fleet = Fleet("p0", "p1", "d0", "d1", policy=policy)
    fleet.silent_s = {"p0": 1.6, "d1": 9.0, "d0": 1.4}
    for number in range(8):
        decision, _ = fleet.place([number] * 200, number)
        assert names(decision) == ("p1", "d0")
    prompt = PromptPrefixes([1] * 200)
    chosen = fleet.placement.place_decode("r", prompt, "f", frozenset({("d0", "1")}))
    assert chosen is not None and chosen.peer_id == "d1", "the last one there is"
    fleet.silent_s = {"p0": 3.0, "p1": 4.0, "d0": 5.0, "d1": 6.0}  # this router itself stood still
    assert {names(fleet.place([number] * 200, number)[0])[0] for number in range(8)} <= {"p0", "p1"}


def test_a_new_start_of_an_excluded_decode_worker_is_another_one() -> None:
    fleet = Fleet("p0", "d0")
    prompt = PromptPrefixes([1] * 200)
    assert fleet.placement.place_decode("r", prompt, "f", frozenset({("d0", "1")})) is None
    assert fleet.placement.has_decode("f") and not fleet.placement.has_decode("another")
    chosen = fleet.placement.place_decode("r", prompt, "f", frozenset({("d0", "0")}))
    assert chosen is not None and chosen.peer_id == "d0"


def _record(name: str, **changes: Any) -> WorkerRecord:
    plain = WorkerRecord(
        worker_id=name,
        role="prefill" if name.startswith("p") else "decode",
        incarnation="1",
        address=f"tcp://{name}",
        model="m",
        fingerprint="f",
        protocol_version=1,
        block_size=BLOCK,
        num_blocks=4096,
        max_model_len=1 << 16,
        vocab_size=1 << 16,
        token_budget=2048,
    )
    return msgspec.structs.replace(plain, **changes)


def _peer(record: WorkerRecord) -> PeerRef:
    return PeerRef(record.worker_id, record.incarnation, record.address)


def _chosen(decision: Decision) -> str:
    assert decision.prefill is not None
    return decision.prefill.worker_id


def test_a_burst_between_two_load_reports_spreads() -> None:
    fleet = Fleet(*(f"p{i}" for i in range(8)), *(f"d{i}" for i in range(4)))
    prompts = [[number] * 2000 for number in range(64)]
    decisions = [fleet.place(prompt, number)[0] for number, prompt in enumerate(prompts)]
    assert set(Counter(map(_chosen, decisions)).values()) == {8}
    decodes = Counter(decision.decode.worker_id for decision in decisions if decision.decode is not None)
    assert set(decodes.values()) == {16}


def test_what_another_router_has_sent_counts_once_a_worker_has_said_so() -> None:
    fleet = Fleet("p0", "p1", "d0")
    fleet.place([1] * 2000)
    first = _chosen(fleet.place([2] * 2000, 1)[0])
    other = "p0" if first == "p1" else "p1"
    # Both have this router's 2,000; another router's 50,000 make the difference, and ours are not counted twice.
    for name in ("p0", "p1"):
        foreign = 50_000 if name == other else 0
        fleet.report(name, queued_tokens=2000 + foreign, own_queued_tokens=2000, num_sequences=1, own_sequences=1)
    assert {_chosen(fleet.place([3 + i] * 2000, 2 + i)[0]) for i in range(8)} == {first}


def test_a_hot_prefix_replicates_under_load_and_stays_where_it_is_without() -> None:
    hot = list(range(8192))
    calm = Fleet("p0", "p1", "p2", "p3", "d0")
    for number in range(12):  # each is done before the next comes
        decision, held = calm.place([*hot, *[number] * 200], number)
        calm.load.move(held, None, 0, None)
        assert number == 0 or decision.num_cached_tokens == 8192
    busy = Fleet("p0", "p1", "p2", "p3", "d0")
    decisions = [busy.place([*hot, *[number] * 200], number)[0] for number in range(1000)]
    shares = Counter(map(_chosen, decisions))
    assert len(shares) == 4 and max(shares.values()) < 2 * min(shares.values())
    assert sum(decision.num_cached_tokens == 0 for decision in decisions) == 4, "each computes the prefix once"


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
    assert _chosen(late) != _chosen(soon)
    assert late.expected.ttft_s > 1.0 > soon.expected.ttft_s
    with pytest.raises(TooLate) as caught:
        fleet.placement.place("r", prompt=long, needs_decode=True, deadline_s=0.05)
    assert caught.value.retry_after_s == pytest.approx(soon.expected.ttft_s - 0.05)


def test_speeds_that_nobody_measured_refuse_nobody() -> None:
    fleet = Fleet("p0", "d0")
    for name, record in fleet.records.items():
        status = Status(query=1, draining=False, queues={}, blocks={"free": 4096}, totals={})
        fleet.view.answered(_peer(record), status, 0.0)
        assert name in fleet.records
    decision = fleet.placement.place("r", prompt=PromptPrefixes([1] * 4096), needs_decode=True, deadline_s=1e-6)
    assert isinstance(decision, Decision)


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


@given(st.lists(st.tuples(st.integers(0, 15), st.integers(1, 8), st.floats(0, 3)), max_size=60))
def test_popularity_is_the_decayed_count_of_uses(uses: list[tuple[int, int, float]]) -> None:
    popularity, now = PrefixPopularity(), 0.0
    history: list[tuple[float, list[bytes]]] = []
    for tree, length, gap in uses:
        now += gap
        popularity.used(CHAINS[tree][:length], now)
        history.append((now, CHAINS[tree][:length]))
    for chain in CHAINS:
        for number, each in enumerate(chain, 1):
            exact = sum(0.5 ** ((now - at) / HALF_LIFE_S) for at, used in history if each in used)
            tolerance = 2 * 0.5 ** (FORGET_S / HALF_LIFE_S) * (1 + len(uses))
            assert popularity.of(chain[:number], now) == pytest.approx(exact, abs=tolerance)


def test_memory_of_uses_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_popularity, "MAX_BLOCKS", 5)
    popularity = PrefixPopularity()
    popularity.used(CHAINS[0][:4], 0.0)
    popularity.used(CHAINS[15][:4], 0.0)
    assert [popularity.of(CHAINS[0][:number], 0.0) for number in range(1, 5)] == [1.0, 0.0, 0.0, 0.0]
    assert [popularity.of(CHAINS[15][:number], 0.0) for number in range(1, 5)] == [1.0] * 4


def test_choices_of_one_request_do_not_count_twice() -> None:
    fleet, prompt = Fleet("p0", "d0"), PromptPrefixes(list(range(64)))
    decision = fleet.placement.place("r", prompt=prompt, needs_decode=True)
    assert isinstance(decision, Decision)
    for _ in range(128):
        fleet.placement.placed(decision, prompt)
    now = time.monotonic()
    assert 0 < fleet.placement._popularity.of(prompt.hashes("f", 16)[:1], now) <= 1


def test_a_reason_shows_only_the_beginning_of_what_a_client_chose() -> None:
    wish = demand(affinity="x" * 1024)
    pair = (worker("p", "prefill"), worker("d", "decode"))
    assert max(map(len, choose(wish, {}, *pair, policy="sticky").reasons)) < 200


# -- expected prefixes ------------------------------------------------------------------------------------------------

CHAINS = [hash_blocks(root_hash(model="m"), [tree // 4] * 64 + [tree] * 64, 16) for tree in range(16)]


@given(st.lists(st.tuples(st.integers(0, 15), st.integers(1, 8), st.sampled_from("ab"))), st.integers(8, 40))
def test_expected_prefixes_are_closed_bounded_and_know_the_latest(
    sent: list[tuple[int, int, str]], capacity: int
) -> None:
    view = ExpectedPrefixes()
    for tree, length, name in sent:
        view.sent(name, CHAINS[tree][:length], capacity)
        assert view.match(CHAINS[tree])[name] >= length
    for chain in CHAINS:
        for name, num_held in view.match(chain).items():
            view._workers[name].check_integrity()
            assert view._workers[name].num_blocks <= capacity
            assert num_held <= len(chain)


@given(
    st.lists(st.tuples(st.integers(0, 15), st.integers(1, 8), st.integers(0, 3)), max_size=60),
    st.integers(0, 40),
    st.sampled_from([0, 1, 5, 20, None]),
)
def test_expected_prefixes_are_the_latest_blocks_of_a_table(
    sent: list[tuple[int, int, int]], capacity: int, lifetime: int | None
) -> None:
    """Of blocks in the order of their last use, a chain's end before its beginning."""
    view = ExpectedPrefixes(lifetime_s=lifetime)
    table: OrderedDict[bytes, int] = OrderedDict()
    now = 0
    for tree, length, gap in sent:
        now += gap
        view.now = now
        view.sent("a", CHAINS[tree][:length], capacity)
        if capacity:
            for each in reversed(CHAINS[tree][:length]):
                table[each] = now
                table.move_to_end(each)
        oldest = -1 if lifetime is None else now - lifetime
        while table and (len(table) > capacity or next(iter(table.values())) < oldest):
            table.popitem(last=False)
        for chain in CHAINS:
            num_held = next((i for i, each in enumerate(chain) if each not in table), len(chain))
            assert view.match(chain).get("a", 0) == num_held
        for known in view._workers.values():
            known.check_integrity()
            assert known.num_blocks == len(table)


class Index:
    def match(self, hashes: Any) -> dict[str, int]:
        return {"a": 3}


def test_a_decision_stands_in_for_the_index_for_a_while_and_ends_with_its_worker() -> None:
    view = ExpectedPrefixes(Index(), lifetime_s=10.0)
    view.sent("a", CHAINS[0], 100)
    view.sent("b", CHAINS[0][:2], 100)
    assert view.match(CHAINS[0]) == {"a": 8, "b": 2}
    view.gone("b")
    assert view.match(CHAINS[0]) == {"a": 8}
    view.now = 11.0
    assert view.match(CHAINS[0]) == {"a": 3}


def test_the_choices_of_a_request_add_their_prompt_once() -> None:
    fleet = Fleet("p0", "d0")
    num_tokens = 10 * BLOCK + 3
    prompt = PromptPrefixes(list(range(num_tokens)))
    decision = fleet.placement.place("r", prompt=prompt, needs_decode=True)
    assert isinstance(decision, Decision)
    works = []
    for _ in range(4):
        works.append(work_of(decision, num_tokens, prompt.sent_to))
        fleet.placement.placed(decision, prompt)
    assert [work.num_tokens for work in works] == [num_tokens, 3, 3, 3]
    assert [work.num_decode_blocks for work in works] == [11, 1, 1, 1]
    assert works[1].num_pairs < works[0].num_pairs / 5
