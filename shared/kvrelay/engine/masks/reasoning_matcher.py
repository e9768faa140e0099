"""Reasoning before an output: free text with a budget of tokens, behind which a grammar may begin."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

from kvrelay.grammar.grammar_compiler import (
    GrammarError,
    GrammarMatcher,
    TokenMask,
    allow,
    allow_all,
    allow_only,
    remove,
)
from kvrelay.protocol.sampling import ReasoningSpan


class Stage(Enum):
    BEFORE = auto()
    INSIDE = auto()
    BEHIND = auto()


class ReasoningMatcher:
    """A `GrammarMatcher`. Its state depends on the output tokens alone, so every attempt, handoff and guess finds the
    same masks.

    With a grammar only the first token can begin the reasoning, and an end-of-sequence token cannot end the output
    within it. Without a grammar all tokens are allowed but behind the budget.
    """

    def __init__(
        self,
        span: ReasoningSpan,
        behind: GrammarMatcher | None,
        all_tokens: TokenMask,
        eos_token_ids: Sequence[int],
    ) -> None:
        """`behind`: the grammar of the output behind the reasoning. `all_tokens`: the mask of the vocabulary."""
        self._span, self._behind = span, behind
        self._all_tokens, self._eos_token_ids = all_tokens, eos_token_ids
        self._stage = Stage.INSIDE if span.is_open else Stage.BEFORE
        self._num_tokens = 0  # of the reasoning, without its markers

    def copy(self) -> ReasoningMatcher:
        behind = None if self._behind is None else self._behind.copy()
        copied = ReasoningMatcher(self._span, behind, self._all_tokens, self._eos_token_ids)
        copied._stage, copied._num_tokens = self._stage, self._num_tokens
        return copied

    def accept(self, token_ids: Sequence[int]) -> None:
        for index, token_id in enumerate(token_ids):
            if self._stage is Stage.BEHIND:
                if self._behind is not None:
                    self._behind.accept(token_ids[index:])
                return
            self._accept_one(token_id)

    def _accept_one(self, token_id: int) -> None:
        if self._stage is Stage.BEFORE:
            if token_id == self._span.begin_id:
                self._stage = Stage.INSIDE
            elif self._behind is not None:
                self._behind.accept([token_id])
                self._stage = Stage.BEHIND
        elif token_id == self._span.end_id:
            self._stage = Stage.BEHIND
        elif self._is_used_up or (self._behind is not None and token_id in self._eos_token_ids):
            raise GrammarError(f"token {token_id} is not allowed in the reasoning")
        else:
            self._num_tokens += 1

    @property
    def _is_used_up(self) -> bool:
        return self._span.token_budget is not None and self._num_tokens >= self._span.token_budget

    @property
    def allows_all(self) -> bool:
        return self._stage is Stage.BEHIND and self._behind is None

    def forced(self) -> Sequence[int]:
        if self._stage is Stage.INSIDE:
            return [self._span.end_id] if self._is_used_up else ()
        if self._stage is Stage.BEHIND and self._behind is not None:
            return self._behind.forced()
        return ()

    def fill(self, mask: TokenMask) -> None:
        if self._stage is Stage.INSIDE and self._is_used_up:
            allow_only(mask, self._span.end_id)
            return
        if self._behind is None or self._stage is Stage.INSIDE:
            allow_all(mask, self._all_tokens)
            if self._behind is not None:
                remove(mask, self._eos_token_ids)
            return
        self._behind.fill(mask)
        if self._stage is Stage.BEFORE:
            allow(mask, self._span.begin_id)
