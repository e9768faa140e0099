"""What a bounded store of responses keeps, by its definition."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from hypothesis import strategies as st

Key = tuple[str, str]
KEYS = st.tuples(st.sampled_from("ab"), st.sampled_from("1234"))
CALLS = st.lists(st.tuples(st.sampled_from(["put", "put", "get", "delete"]), KEYS, st.integers(1, 12)), max_size=40)


class ResponseOracle:
    """`tie`: of owners with equally many bytes, the one for which it is greatest drops."""

    def __init__(self, max_bytes: int, max_responses: int, tie: Callable[[str], str] = lambda owner: owner) -> None:
        self._max_bytes, self._max_responses, self._tie = max_bytes, max_responses, tie
        self.sizes: dict[Key, int] = {}  # those that were not used for the longest time first

    def put(self, key: Key, size: int) -> bool:
        if size > self._max_bytes:
            return False
        self.sizes.pop(key, None)
        self.sizes[key] = size
        while sum(self.sizes.values()) > self._max_bytes or len(self.sizes) > self._max_responses:
            owners: Counter[str] = Counter()
            for (owner, _), each in self.sizes.items():
                owners[owner] += each
            largest = max(owners, key=lambda owner: (owners[owner], self._tie(owner)))
            del self.sizes[next(key for key in self.sizes if key[0] == largest)]
        return True

    def get(self, key: Key) -> bool:
        if key not in self.sizes:
            return False
        self.sizes[key] = self.sizes.pop(key)
        return True

    def delete(self, key: Key) -> bool:
        return self.sizes.pop(key, None) is not None
