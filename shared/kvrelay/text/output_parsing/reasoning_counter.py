"""Counts the tokens of an output's reasoning."""

from __future__ import annotations

from collections.abc import Sequence


class ReasoningCounter:
    """`num_tokens`: those of the reasoning so far, with the tokens that begin and end it."""

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


class HarmonyCounter:
    """Counts the messages of the channel `analysis`, with their markers."""

    def __init__(self, channel_id: int, analysis_id: int, start_id: int, *, begins_inside: bool) -> None:
        self.num_tokens = 0
        self._channel_id, self._analysis_id, self._start_id = channel_id, analysis_id, start_id
        self._is_inside = begins_inside
        self._num_held = 0  # tokens of a header whose channel is not known yet
        self._names_channel = False

    def count(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if self._names_channel:
                self._names_channel = False
                self._is_inside = token_id == self._analysis_id
                if self._is_inside:
                    self.num_tokens += self._num_held + 1
                self._num_held = 0
            elif token_id in (self._start_id, self._channel_id):
                self._num_held = self._num_held + 1 if token_id == self._channel_id else 1
                self._names_channel = token_id == self._channel_id
                self._is_inside = False
            elif self._is_inside:
                self.num_tokens += 1
            elif self._num_held:
                self._num_held += 1


TokenCounter = ReasoningCounter | HarmonyCounter
