"""Verdicts on grammars are remembered up to a number and up to a size."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvrelay_router.text.grammar_check import KnownVerdicts
from kvrelay_router.text.grammar_process import Verdict

MAX_ENTRIES, MAX_BYTES = 4, 12
KEYS = st.sampled_from([bytes([key]) for key in range(6)])
VERDICTS = st.builds(Verdict, st.text("aé", max_size=14)) | st.builds(Verdict, opening=st.binary(max_size=14))
STEPS = st.lists(st.tuples(KEYS, st.none() | VERDICTS))


def size_of(verdict: Verdict) -> int:
    return len(verdict.refusal.encode()) + len(verdict.opening)


@given(STEPS)
def test_those_asked_for_last_are_kept_within_both_bounds(steps: list[tuple[bytes, Verdict | None]]) -> None:
    known, slow = KnownVerdicts(MAX_ENTRIES, MAX_BYTES), dict[bytes, Verdict]()
    for key, verdict in steps:
        if verdict is None:
            expected = slow.pop(key, None)
            if expected is not None:
                slow[key] = expected
            assert known.get(key) == expected
            continue
        slow.pop(key, None)
        slow[key] = verdict
        while len(slow) > MAX_ENTRIES or sum(size_of(each) for each in slow.values()) > MAX_BYTES:
            del slow[next(iter(slow))]
        known.put(key, verdict)
        assert len(known) == len(slow)
        assert known.num_bytes == sum(size_of(each) for each in slow.values()) <= MAX_BYTES
