"""Masks for a budget of reasoning that stands in channels among other messages."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

from kvrelay.grammar.grammar_compiler import GrammarError, GrammarMatcher, TokenMask, allow_all, allow_only
from kvrelay.protocol.sampling import ReasoningChannels


class Place(Enum):
    OUTSIDE = auto()  # in a header, or in a message without reasoning
    NAME = auto()  # the name of a channel is next
    HEADER = auto()  # behind the name of the channel with the reasoning
    REASONING = auto()
    CLOSING = auto()  # the reasoning was ended by the budget, and the next header begins
    ANSWER = auto()


class ChannelMatcher:
    """A `GrammarMatcher`: a budget for reasoning, and what a grammar of the whole output allows.

    Its state depends on the output tokens alone, so every attempt, handoff and guess finds the same masks. What a model
    would write behind its answer is not limited.
    """

    def __init__(self, channels: ReasoningChannels, grammar: GrammarMatcher | None, all_tokens: TokenMask) -> None:
        """`all_tokens`: the mask of the vocabulary."""
        self._channels, self._grammar, self._all_tokens = channels, grammar, all_tokens
        self._place = Place.REASONING if channels.is_open else Place.OUTSIDE
        self._num_tokens = 0  # of the reasoning, without its markers
        self._num_closing = 0  # tokens of `closing_ids` that were written

    def copy(self) -> ChannelMatcher:
        grammar = None if self._grammar is None else self._grammar.copy()
        copied = ChannelMatcher(self._channels, grammar, self._all_tokens)
        copied._place, copied._num_tokens, copied._num_closing = self._place, self._num_tokens, self._num_closing
        return copied

    def accept(self, token_ids: Sequence[int]) -> None:
        if self._grammar is not None:
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
        return self._has_to_end and self._grammar is not None

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
        return self._place is Place.ANSWER and self._grammar is None

    def forced(self) -> Sequence[int]:
        only = self._only_ids()
        if only is None:
            return () if self._grammar is None else self._grammar.forced()
        if self._place is Place.NAME:
            return only if len(only) == 1 and self._grammar is None else ()
        if self._may_exceed and not self._grammar_allows(only[0]):
            return ()
        return self._channels.closing_ids[self._num_closing :]

    def _grammar_allows(self, token_id: int) -> bool:
        assert self._grammar is not None
        try:
            self._grammar.copy().accept([token_id])
        except GrammarError:
            return False
        return True

    def fill(self, mask: TokenMask) -> None:
        only = self._only_ids()
        if self._grammar is None:
            allow_all(mask, self._all_tokens)
        else:
            self._grammar.fill(mask)
        if only is None:
            return
        allowed = [token_id for token_id in only if mask[token_id >> 5] >> (token_id & 31) & 1]
        if not allowed:
            if self._may_exceed:
                return
            raise GrammarError("no token can continue the output within the budget for reasoning")
        allow_only(mask, *allowed)
