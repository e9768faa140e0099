"""What a router expects of prefixes: how popular each is, and which worker will hold it."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.kv.hashing import hash_blocks, root_hash
from kvrelay_router.dispatch.placement import PromptPrefixes, work_of
from kvrelay_router.routing import expected_prefixes
from kvrelay_router.routing.estimates import BlockNaming, Decision
from kvrelay_router.routing.expected_prefixes import FORGET_S, HALF_LIFE_S, ExpectedPrefixes, PrefixPopularity
from tests.unit.dispatch.routed_fleet import BLOCK, Fleet, names


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
    monkeypatch.setattr(expected_prefixes, "MAX_BLOCKS", 5)
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
    assert 0 < fleet.placement._popularity.of(prompt.hashes(BlockNaming("f", "", 16))[:1], now) <= 1


CHAINS = [hash_blocks(root_hash(model="m"), [tree // 4] * 64 + [tree] * 64, 16) for tree in range(16)]


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


def test_decode_reuses_what_prefill_computed_otherwise_only_behind_such_prefill() -> None:
    fleet = Fleet("p0", "d0", numerics={"p0": "amx", "d0": "avx"})
    prompt_ids = [7] * 20 * BLOCK
    fleet.place(prompt_ids)
    again, _ = fleet.place(prompt_ids, 1)
    assert again.num_cached_blocks == 20, "that prefill need not send"
    assert again.num_cached_tokens == 19 * BLOCK
    fleet.report("p0", draining=True)
    alone, _ = fleet.place(prompt_ids, 2)
    assert alone.prefill is None and alone.num_cached_tokens == 0
    assert fleet.place(prompt_ids, 3)[0].num_cached_tokens == 19 * BLOCK, "what it has computed itself"


def test_blocks_of_a_handoff_are_at_decode_once_it_is_committed() -> None:
    fleet, prompt_ids = Fleet("p0", "d0", local_prefill_tokens=None), list(range(100 * BLOCK))
    fleet.report("d0", num_sequences=32)  # streams that a prompt there would delay
    first, _ = fleet.place(prompt_ids)
    again, _ = fleet.place(prompt_ids, 1)
    for decision, num_cached in ((first, 0), (again, 99 * BLOCK)):
        assert names(decision) == ("p0", "d0") and decision.num_cached_tokens == num_cached
    assert again.num_cached_blocks == 100, "those of the first are there before"
    fleet.report("p0", queued_tokens=10**6)
    alone, _ = fleet.place(prompt_ids, 2)
    assert names(alone) == (None, "d0") and alone.num_cached_tokens == 0, "prefill takes longer than all of it here"
    other = Fleet("p0", "d0", local_prefill_tokens=None)
    other.report("d0", num_sequences=32)
    handed_over, _ = other.place(prompt_ids)
    other.placement.handed_over(handed_over, PromptPrefixes(prompt_ids))
    other.report("p0", queued_tokens=10**6)
    alone, _ = other.place(prompt_ids, 1)
    assert names(alone) == (None, "d0") and alone.num_cached_tokens == 99 * BLOCK
