"""Drafts from earlier outputs: against a search by hand, by owner, within their memory, and what they choose."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from fractions import Fraction

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.kv.hashing import root_hash
from kvrelay.protocol.sampling import Sampling
from kvrelay.scheduling.scheduler_settings import SpeculationSettings
from kvrelay.scheduling.sequence import Sequence, TokenBuffer
from kvrelay.scheduling.speculation.earlier_outputs import OWNER_TOKENS, EarlierOutputs
from kvrelay.scheduling.speculation.speculator import Speculator, likeliest
from tests.fakes.sequences import new_sequence
from tests.thoroughness import examples

PLAIN = Sampling(temperature=0.0, max_tokens=400)
AMPLE = 1 << 16

texts = st.lists(st.integers(1, 3), min_size=1, max_size=12)


def drafter_of(method: str = "suffix", **changes: int) -> Speculator:
    return Speculator(msgspec.convert({"method": method, **changes}, SpeculationSettings))


def sequence_of(tokens: Seq[int], owner: str | None = "", salt: str = "", sampling: Sampling = PLAIN) -> Sequence:
    sequence = new_sequence(("r", 1, 0), tokens, sampling, 8, text_owner=owner)
    sequence.root = root_hash(model="test", cache_salt=salt)
    return sequence


def joined(speculator: Speculator, tokens: Seq[int], owner: str | None = "", salt: str = "") -> Sequence:
    sequence = sequence_of(tokens, owner, salt)
    speculator.begin(sequence)
    return sequence


def output(speculator: Speculator, tokens: Seq[int], owner: str | None = "", salt: str = "") -> None:
    """A sequence with this output runs and ends."""
    sequence = joined(speculator, [9], owner, salt)
    sequence.tokens.extend(np.array(tokens, np.int32))
    speculator.ended(sequence)


def drafts_of(speculator: Speculator, sequence: Sequence, most: int = 16) -> list[int]:
    speculator.begin_step(1, 1)
    drafts = speculator.draft(sequence, most)
    speculator.measured(1, 0.0, 0.0)
    return [] if drafts is None else drafts.tolist()


# -- which tokens -----------------------------------------------------------------------------------------------------


def likeliest_by_hand(paths: list[list[int]], count: int) -> tuple[list[int], list[Fraction]]:
    token_ids: list[int] = []
    shares: list[Fraction] = []
    while len(token_ids) < count:
        here = [path for path in paths if path[: len(token_ids)] == token_ids]
        following = [path[len(token_ids)] for path in here if len(path) > len(token_ids)]
        if not following:
            break
        best = max(following, key=lambda token: (following.count(token), -following.index(token)))
        shares.append(Fraction(following.count(best), len(here)))
        token_ids.append(best)
    return token_ids, shares


@settings(max_examples=examples(200))
@given(st.lists(st.lists(st.integers(1, 3), max_size=8), max_size=8), st.integers(1, 9))
def test_the_likeliest_path_is_found_as_by_hand(paths: list[list[int]], count: int) -> None:
    token_ids, shares = likeliest(paths, count)
    expected_ids, expected_shares = likeliest_by_hand(paths, count)
    assert token_ids == expected_ids
    assert shares == pytest.approx([float(share) for share in expected_shares])


def test_the_longest_match_counts_and_not_the_most_frequent_text() -> None:
    speculator = drafter_of()
    output(speculator, [5, 1, 2, 3, 50, 51])
    for _ in range(5):
        output(speculator, [6, 1, 2, 3, 60, 61])
    assert drafts_of(speculator, joined(speculator, [5, 1, 2, 3]), 2) == [50, 51]


def test_drafts_end_where_earlier_outputs_part() -> None:
    speculator = drafter_of()
    for number in range(8):
        output(speculator, [1, 2, 3, 4, 5, 100 + number, 6, 7, 8, 9])
    drafts = drafts_of(speculator, joined(speculator, [1, 2, 3]), 8)
    assert drafts[:2] == [4, 5] and len(drafts) <= 3
    alone = drafter_of()
    output(alone, [1, 2, 3, 4, 5, 100, 6, 7, 8, 9])
    assert len(drafts_of(alone, joined(alone, [1, 2, 3]), 8)) > 3


def test_the_own_text_and_earlier_outputs_compete() -> None:
    speculator = drafter_of()
    output(speculator, [1, 2, 3, 70, 71, 72, 73, 74])
    own = joined(speculator, [1, 2, 3, 80, 81, 1, 2, 3])
    assert own in speculator.sequences
    kinds = set()
    for _ in range(200):
        drafts = drafts_of(speculator, own, 4)
        if not drafts:
            continue
        kinds.add(drafts[0])
        speculator.verified(own, len(drafts), len(drafts) if drafts[0] == 80 else 0)
    assert drafts_of(speculator, own, 4)[0] == 80, "what was rejected gives way"


def test_no_draft_spans_two_outputs() -> None:
    speculator = drafter_of()
    output(speculator, [1, 2, 3, 4, 5])
    output(speculator, [6, 7, 8, 9])
    assert drafts_of(speculator, joined(speculator, [1, 2, 3]), 8) == [4, 5]
    assert drafts_of(speculator, joined(speculator, [1, 4, 5, 6, 7]), 8) == []


# -- whose text -------------------------------------------------------------------------------------------------------


@settings(max_examples=examples(100))
@given(st.lists(st.tuples(st.sampled_from(["", "a", "b"]), st.sampled_from(["", "s"]), texts), max_size=12), texts)
def test_drafts_are_those_without_the_outputs_of_others(
    outputs: list[tuple[str, str, list[int]]], prompt: list[int]
) -> None:
    everyone = drafter_of()
    for owner, salt, tokens in outputs:
        output(everyone, tokens, owner, salt)
    for asking, asking_salt in {("", ""), ("a", ""), ("a", "s"), ("c", "")}:
        alone = drafter_of()
        for owner, salt, tokens in outputs:
            if (owner, salt) == (asking, asking_salt):
                output(alone, tokens, owner, salt)
        got, expected = (
            drafts_of(speculator, joined(speculator, prompt, asking, asking_salt)) for speculator in (everyone, alone)
        )
        assert got == expected


def test_a_request_of_an_older_router_neither_leaves_nor_sees_outputs() -> None:
    speculator = drafter_of()
    output(speculator, [1, 2, 3, 4, 5], None)
    assert not speculator.earlier.num_tokens
    output(speculator, [1, 2, 3, 4, 5], "")
    assert speculator.earlier.num_tokens
    assert drafts_of(speculator, joined(speculator, [1, 2, 3], None)) == []
    assert drafts_of(speculator, joined(speculator, [1, 2, 3], "")) == [4, 5]


@pytest.mark.parametrize("method", ["off", "ngram"])
def test_only_requests_with_this_method_leave_and_see_outputs(method: str) -> None:
    speculator = drafter_of(method)
    output(speculator, [1, 2, 3, 4, 5])
    assert not speculator.earlier.num_tokens
    suffix = msgspec.structs.replace(PLAIN, speculation="suffix")
    first, second = (sequence_of([1, 2, 3], sampling=suffix) for _ in range(2))
    speculator.begin(first)
    first.tokens.extend(np.array([4, 1, 2, 3, 5, 6], np.int32))
    speculator.ended(first)
    speculator.begin(second)
    assert drafts_of(speculator, second, 2) == [5, 6]
    assert not drafts_of(speculator, joined(speculator, [1, 2, 3]))


def test_prompts_are_not_kept() -> None:
    speculator = drafter_of()
    first = joined(speculator, [1, 2, 3, 4, 5, 6])
    first.tokens.extend(np.array([7, 8, 9, 10], np.int32))
    speculator.ended(first)
    assert drafts_of(speculator, joined(speculator, [1, 2, 3])) == []
    assert drafts_of(speculator, joined(speculator, [7, 8, 9])) == [10]


# -- memory -----------------------------------------------------------------------------------------------------------


def check_size(kept: EarlierOutputs, max_tokens: int) -> None:
    parts = [part for own in kept._owners.values() for part in own]
    assert kept.num_tokens == sum(len(part.tokens) for part in parts) + OWNER_TOKENS * len(kept._owners)
    assert kept.num_tokens <= max_tokens
    assert set(kept._not_indexed) <= set(parts), "what was dropped is freed"
    for own in kept._owners.values():
        assert len(own) <= 2 and sum(len(part.tokens) for part in own) <= max_tokens // 4


@settings(max_examples=examples(100))
@given(st.data())
def test_memory_is_bounded_and_one_owner_takes_a_quarter(data: st.DataObject) -> None:
    max_tokens = data.draw(st.sampled_from([0, 1, 600, 1024, 4096]))
    kept = EarlierOutputs(max_tokens, 2, 8)
    rng = random.Random(data.draw(st.integers(0, 1000)))
    for _ in range(60):
        tokens = rng.choices(range(1, 5), k=rng.choice([1, 5, 40, 300]))
        kept.add(rng.choice("abcdefghijklmnopqrstuvwxyz"[: rng.choice([1, 26])]), np.array(tokens, np.int32))
        kept.index(rng.choice([0, 10, 10_000]))
        check_size(kept, max_tokens)


def test_the_owner_that_was_idle_for_longest_is_dropped_first() -> None:
    kept = EarlierOutputs(1024, 2, 8)
    text = np.arange(1, 40, dtype=np.int32)
    for owner in "abcdefghijkl":
        kept.add(owner, text)
        kept.of("a")
    assert kept.of("a") and kept.of("l")
    assert not kept.of("b")


def test_the_newest_outputs_of_an_owner_stay() -> None:
    kept = EarlierOutputs(4096, 3, 16)
    for number in range(100):
        kept.add("a", np.arange(1000 * number, 1000 * number + 50, dtype=np.int32))
    kept.index(AMPLE)
    newest = TokenBuffer(np.array([99_000, 99_001, 99_002], np.int32))
    oldest = TokenBuffer(np.array([0, 1, 2], np.int32))
    assert any(part.index.find_all(newest)[1] for part in kept.of("a"))
    assert not any(part.index.find_all(oldest)[1] for part in kept.of("a"))


def test_an_output_longer_than_a_part_leaves_its_end() -> None:
    kept = EarlierOutputs(1024, 3, 16)
    kept.add("a", np.arange(5000, dtype=np.int32))
    check_size(kept, 1024)
    kept.index(AMPLE)
    text = TokenBuffer(np.array([4990, 4991, 4992], np.int32))
    (part,) = kept.of("a")
    (place,) = part.index.find_all(text)[1]
    assert part.following(place, 4) == [4993, 4994, 4995, 4996]
    assert part.following(place, 99) == list(range(4993, 5000))


def test_many_outputs_that_end_at_once_are_indexed_over_several_steps() -> None:
    kept = EarlierOutputs(AMPLE, 3, 16)
    for number in range(4):
        kept.add(number, np.arange(number * 1000, number * 1000 + 500, dtype=np.int32))
    counts = []
    while num_new := kept.index(300):
        counts.append(num_new)
    assert max(counts) <= 300 and sum(counts) == 4 * (501 - 3)
