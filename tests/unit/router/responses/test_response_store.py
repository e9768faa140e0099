"""The bounded store of responses."""

from __future__ import annotations

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from kvrelay_router.responses.response_store import ResponseStore, StoredResponse

KEYS = st.tuples(st.sampled_from("ab"), st.sampled_from("123"))
SIZES = st.integers(min_value=1, max_value=12)
CALLS = st.lists(st.tuples(st.sampled_from(["put", "get", "delete"]), KEYS, SIZES), max_size=40)


@given(CALLS)
def test_it_keeps_what_was_used_last(calls: list[tuple[str, tuple[str, str], int]]) -> None:
    store, oracle = ResponseStore(20), OrderedDict[tuple[str, str], StoredResponse]()
    for call, key, size in calls:
        if call == "put" and size <= 20:
            stored = StoredResponse(b"x" * (size // 2), (b"x" * (size - size // 2),))
            store.put(*key, stored)
            oracle.pop(key, None)
            oracle[key] = stored
            while sum(each.num_bytes for each in oracle.values()) > 20:
                oracle.popitem(last=False)
        elif call == "get":
            assert store.get(*key) is oracle.get(key)
            if key in oracle:
                oracle.move_to_end(key)
        elif call == "delete":
            assert store.delete(*key) == (oracle.pop(key, None) is not None)
        assert store.num_bytes == sum(each.num_bytes for each in oracle.values()) <= 20


def test_what_is_too_large_alone_is_not_kept() -> None:
    store = ResponseStore(20)
    store.put("a", "1", StoredResponse(b"x" * 20, ()))
    store.put("a", "2", StoredResponse(b"x" * 20, (b"x",)))
    assert store.get("a", "1") is not None and store.get("a", "2") is None
    assert not ResponseStore(0).is_open
