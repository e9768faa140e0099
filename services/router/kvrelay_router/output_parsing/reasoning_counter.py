"""Counts the tokens of an output's reasoning."""

from __future__ import annotations

from collections.abc import Sequence


class ReasoningCounter:
    """Counts up to the token that ends the reasoning, which is included, as is the one that begins it."""

    def __init__(self, begin_id: int, end_id: int, *, begins_inside: bool) -> None:
        self.num_tokens = 0
        self._begin_id, self._end_id = begin_id, end_id
        self._num_seen = 0
        self._is_inside = begins_inside
        self._is_behind = False

    def count(self, token_ids: Sequence[int]) -> None:
        if self._is_behind:
            return
        if not self._is_inside and self._begin_id in token_ids:
            self._is_inside = True
        if not self._is_inside:
            self._num_seen += len(token_ids)
            return
        if self._end_id in token_ids:
            self._is_behind = True
            token_ids = token_ids[: token_ids.index(self._end_id) + 1]
        self.num_tokens += self._num_seen + len(token_ids)
        self._num_seen = 0
