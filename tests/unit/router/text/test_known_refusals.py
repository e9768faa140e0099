"""Refusals of grammars are remembered up to a number and up to a size."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvrelay_router.text.grammar_check import KnownRefusals

MAX_ENTRIES, MAX_BYTES = 4, 12
KEYS = st.sampled_from([bytes([key]) for key in range(6)])
STEPS = st.lists(st.tuples(KEYS, st.none() | st.text("aé", max_size=14)))


@given(STEPS)
def test_those_asked_for_last_are_kept_within_both_bounds(steps: list[tuple[bytes, str | None]]) -> None:
    known, slow = KnownRefusals(MAX_ENTRIES, MAX_BYTES), dict[bytes, str]()
    for key, refusal in steps:
        if refusal is None:
            expected = slow.pop(key, None)
            if expected is not None:
                slow[key] = expected
            assert known.get(key) == expected
            continue
        slow.pop(key, None)
        slow[key] = refusal
        while len(slow) > MAX_ENTRIES or sum(len(each.encode()) for each in slow.values()) > MAX_BYTES:
            del slow[next(iter(slow))]
        known.put(key, refusal)
        assert len(known) == len(slow)
        assert known.num_bytes == sum(len(each.encode()) for each in slow.values()) <= MAX_BYTES
