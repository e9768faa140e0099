"""Matchers beside and around a grammar's: budgets for reasoning, and the tokens that a request allows or forbids.

Their state depends on the output tokens alone, so every attempt, handoff and guess finds the same masks. If there
is no grammar, `AllTokens` takes its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np
from numpy.typing import NDArray

from kvrelay.grammar.grammar_compiler import (
    GrammarError,
    GrammarMatcher,
    TokenMask,
    allow,
    allow_all,
    allow_only,
    remove,
)
from kvrelay.protocol.sampling import ReasoningChannels, ReasoningSpan, Sampling


class AllTokens:
    """A `GrammarMatcher` that allows every token of the vocabulary, whose mask it is given."""

    allows_all = True

    def __init__(self, mask: TokenMask) -> None:
        self._mask = mask

    def copy(self) -> AllTokens:
        return self

    def accept(self, token_ids: Sequence[int]) -> None: ...

    def forced(self) -> Sequence[int]:
        return ()

    def fill(self, mask: TokenMask) -> None:
        allow_all(mask, self._mask)


class Phase(Enum):
    BEFORE = auto()
    INSIDE = auto()
    BEHIND = auto()


class ReasoningMatcher:
    """A `GrammarMatcher`: a budget for the reasoning that comes first, behind which a grammar may begin.

    With a grammar only the first token can begin the reasoning, and an end-of-sequence token cannot end the output
    within it. Without a grammar all tokens are allowed but behind the budget.
    """

    def __init__(
        self, span: ReasoningSpan, behind: GrammarMatcher, all_tokens: TokenMask, eos_token_ids: Sequence[int]
    ) -> None:
        """`behind`: the grammar of the output behind the reasoning. `all_tokens`: the mask of the vocabulary."""
        self._span, self._behind = span, behind
        self._has_grammar = not behind.allows_all
        self._all_tokens, self._eos_token_ids = all_tokens, eos_token_ids
        self._phase = Phase.INSIDE if span.is_open else Phase.BEFORE
        self._num_tokens = 0  # tokens of reasoning, without its markers

    def copy(self) -> ReasoningMatcher:
        copied = copy(self)
        copied._behind = self._behind.copy()
        return copied

    def accept(self, token_ids: Sequence[int]) -> None:
        for index, token_id in enumerate(token_ids):
            if self._phase is Phase.BEHIND:
                self._behind.accept(token_ids[index:])
                return
            self._accept_one(token_id)

    def _accept_one(self, token_id: int) -> None:
        if self._phase is Phase.BEFORE:
            if token_id == self._span.begin_id:
                self._phase = Phase.INSIDE
            elif self._has_grammar:
                self._behind.accept([token_id])
                self._phase = Phase.BEHIND
        elif token_id == self._span.end_id:
            self._phase = Phase.BEHIND
        elif self._is_used_up or (self._has_grammar and token_id in self._eos_token_ids):
            raise GrammarError(f"token {token_id} is not allowed in the reasoning")
        else:
            self._num_tokens += 1

    @property
    def _is_used_up(self) -> bool:
        return self._span.token_budget is not None and self._num_tokens >= self._span.token_budget

    @property
    def allows_all(self) -> bool:
        return self._phase is Phase.BEHIND and not self._has_grammar

    def forced(self) -> Sequence[int]:
        if self._phase is Phase.INSIDE:
            return [self._span.end_id] if self._is_used_up else ()
        return self._behind.forced() if self._phase is Phase.BEHIND else ()

    def fill(self, mask: TokenMask) -> None:
        if self._phase is not Phase.INSIDE:
            self._behind.fill(mask)
            if self._phase is Phase.BEFORE:
                allow(mask, self._span.begin_id)
        elif self._is_used_up:
            allow_only(mask, self._span.end_id)
        else:
            allow_all(mask, self._all_tokens)
            if self._has_grammar:
                remove(mask, self._eos_token_ids)


class Place(Enum):
    OUTSIDE = auto()  # in a header, or in a message without reasoning
    NAME = auto()  # the name of a channel is next
    HEADER = auto()  # behind the name of the channel with the reasoning
    REASONING = auto()
    CLOSING = auto()  # the reasoning was ended by the budget, and the next header begins
    ANSWER = auto()


class ChannelMatcher:
    """A `GrammarMatcher` with a budget for reasoning that is written in channels, among other messages, and with a
    grammar of the whole output. The budget does not apply once the answer has begun.
    """

    def __init__(self, channels: ReasoningChannels, grammar: GrammarMatcher) -> None:
        self._channels, self._grammar = channels, grammar
        self._has_grammar = not grammar.allows_all
        self._place = Place.REASONING if channels.is_open else Place.OUTSIDE
        self._num_tokens = 0  # tokens of reasoning, without its markers
        self._num_closing = 0  # tokens of `closing_ids` that were written

    def copy(self) -> ChannelMatcher:
        copied = copy(self)
        copied._grammar = self._grammar.copy()
        return copied

    def accept(self, token_ids: Sequence[int]) -> None:
        self._grammar.accept(token_ids)
        for token_id in token_ids:
            if self._place is Place.ANSWER:
                return
            self._accept_one(token_id)

    def _accept_one(self, token_id: int) -> None:
        channels, place = self._channels, self._place
        if (only := self._only_ids()) is not None and token_id not in only and not self._may_exceed:
            raise GrammarError(f"token {token_id} is not allowed by the budget for reasoning")
        if place is Place.CLOSING or (self._has_to_end and token_id == channels.closing_ids[0]):
            self._num_closing += 1
            is_closed = self._num_closing == len(channels.closing_ids)
            self._place = Place.NAME if is_closed else Place.CLOSING
            self._num_closing = 0 if is_closed else self._num_closing
        elif token_id == channels.channel_id:
            self._place = Place.NAME
        elif place is Place.NAME:
            named = {channels.reasoning_id: Place.HEADER, channels.answer_id: Place.ANSWER}
            self._place = named.get(token_id, Place.OUTSIDE)
        elif token_id in (channels.start_id, channels.closing_ids[0]):
            self._place = Place.OUTSIDE
        elif place is Place.HEADER and token_id == channels.message_id:
            self._place = Place.REASONING
        elif place is Place.REASONING:
            self._num_tokens += 1

    @property
    def _is_used_up(self) -> bool:
        return self._num_tokens >= self._channels.token_budget

    @property
    def _has_to_end(self) -> bool:
        return self._place is Place.REASONING and self._is_used_up

    @property
    def _may_exceed(self) -> bool:
        """Grammars take no marker in the middle of a character: the tokens that complete it come first."""
        return self._has_to_end and self._has_grammar

    def _only_ids(self) -> Sequence[int] | None:
        """The tokens that may come next. None: the budget limits nothing here."""
        channels = self._channels
        if self._place is Place.CLOSING:
            return (channels.closing_ids[self._num_closing],)
        if self._place is Place.NAME:
            # Always, so that no name is spelled in other tokens, whose reasoning would not be found.
            thinking = () if self._is_used_up else (channels.reasoning_id,)
            return (*thinking, channels.answer_id, *channels.other_ids)
        return channels.closing_ids[:1] if self._has_to_end else None

    @property
    def allows_all(self) -> bool:
        return self._place is Place.ANSWER and not self._has_grammar

    def forced(self) -> Sequence[int]:
        only = self._only_ids()
        if only is None:
            return self._grammar.forced()
        if self._place is Place.NAME:
            return only if len(only) == 1 and not self._has_grammar else ()
        if self._may_exceed and not self._grammar_allows(only[0]):
            return ()
        return self._channels.closing_ids[self._num_closing :]

    def _grammar_allows(self, token_id: int) -> bool:
        try:
            self._grammar.copy().accept([token_id])
        except GrammarError:
            return False
        return True

    def fill(self, mask: TokenMask) -> None:
        only = self._only_ids()
        self._grammar.fill(mask)
        if only is None:
            return
        allowed = [token_id for token_id in only if mask[token_id >> 5] >> (token_id & 31) & 1]
        if not allowed:
            if self._may_exceed:
                return
            raise GrammarError("no token can continue the output within the budget for reasoning")
        allow_only(mask, *allowed)


class NoTokenLeft(GrammarError):
    """No token can continue the output."""


@dataclass(frozen=True, slots=True)
class TokenLimits:
    """The tokens that a request allows, and the words that it forbids."""

    mask: TokenMask  # without the bad words of several tokens
    words: dict[int, list[tuple[list[int], int]]]  # key: the last token but one; the tokens before the last, the last
    most: int  # tokens before the last of the longest word

    @classmethod
    def of(cls, sampling: Sampling, vocab_size: int) -> TokenLimits:
        allowed = np.full(vocab_size, not sampling.allowed_token_ids)
        allowed[list(sampling.allowed_token_ids)] = True
        words: dict[int, list[tuple[list[int], int]]] = {}
        for word in sampling.bad_words:
            *before, last = word
            if before:
                words.setdefault(before[-1], []).append((before, last))
            else:
                allowed[last] = False
        return cls(packed(allowed), words, max((len(word) - 1 for word in sampling.bad_words), default=0))


class LimitedMatcher:
    """A `GrammarMatcher`: what limits leave of what a grammar or a budget for reasoning allows."""

    allows_all = False

    def __init__(self, limits: TokenLimits, matcher: GrammarMatcher) -> None:
        """`matcher`: what else decides."""
        self._limits, self._matcher = limits, matcher
        self._tail: list[int] = []  # the newest output tokens, as many as words need

    def copy(self) -> LimitedMatcher:
        copied = copy(self)
        copied._matcher = self._matcher.copy()
        return copied

    def accept(self, token_ids: Sequence[int]) -> None:
        self._matcher.accept(token_ids)
        if self._limits.most:
            self._tail = [*self._tail, *token_ids][-self._limits.most :]

    def forced(self) -> Sequence[int]:
        return ()  # the limits may forbid what the others force

    def fill(self, mask: TokenMask) -> None:
        self._matcher.fill(mask)
        mask[: len(self._limits.mask)] &= self._limits.mask
        mask[len(self._limits.mask) :] = 0  # a tokenizer may have more tokens than the model
        tail = self._tail
        for before, last in self._limits.words.get(tail[-1], ()) if tail else ():
            if tail[-len(before) :] == before:
                remove(mask, [last])
        if not mask.any():
            raise NoTokenLeft(
                "no token can continue the output: its grammar, allowed_token_ids and bad_words contradict each other"
            )


def add_limits(
    matcher: GrammarMatcher,
    sampling: Sampling,
    vocab_size: int,
    all_tokens: TokenMask,
    eos_token_ids: Sequence[int],
) -> GrammarMatcher:
    """The matcher of a request: what its other fields leave of what `matcher` allows."""
    if isinstance(sampling.reasoning, ReasoningSpan):
        matcher = ReasoningMatcher(sampling.reasoning, matcher, all_tokens, eos_token_ids)
    elif sampling.reasoning is not None:
        matcher = ChannelMatcher(sampling.reasoning, matcher)
    if sampling.limits_tokens:
        matcher = LimitedMatcher(TokenLimits.of(sampling, vocab_size), matcher)
    return matcher


def packed(allowed: NDArray[np.bool_]) -> TokenMask:
    """The mask of a flag for each token."""
    bits = np.zeros(-(-len(allowed) // 32) * 32, np.bool_)
    bits[: len(allowed)] = allowed
    return np.packbits(bits, bitorder="little").view(np.int32)
