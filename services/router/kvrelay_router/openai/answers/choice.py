"""One choice of an answer: takes tokens, returns text, and keeps the records of the tokens.

Text is withheld while it may still change: the bytes of an unfinished character, or the beginning of a stop string. The
result does not depend on how the tokens were grouped into deltas.
"""

from __future__ import annotations

import msgspec

from kvrelay.protocol.sampling import BeamResult, FinishReason, TokenLogprobs
from kvrelay_router.dispatch.interface import SequenceDelta
from kvrelay_router.openai.answers.parsed_text import ParsedText
from kvrelay_router.openai.answers.token_kinds import TokenKind
from kvrelay_router.output_parsing.events import ContentText, Event
from kvrelay_router.output_parsing.reasoning_counter import TokenCounter
from kvrelay_router.text.detokenizer import Detokenizer
from kvrelay_router.text.stop_strings import StopMatcher


class StopRules(msgspec.Struct, frozen=True):
    """Stop conditions other than the maximum length."""

    strings: list[str]
    token_ids: frozenset[int]
    min_tokens: int
    include_in_output: bool


class TokenRecords(msgspec.Struct):
    """The tokens of a text. `logprobs` and `offsets` are empty unless log-probabilities were asked for.

    `offsets[i]` is the position in the text at which the token of `logprobs[i]` starts. Texts that are parsed have
    `kinds` instead: what the token of `logprobs[i]` became.
    """

    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    offsets: list[int] = []
    kinds: list[TokenKind] = []


class Choice:
    """The text of one sequence. `index` is its place in the answer.

    `text_offset` is the length of an echoed prompt. Without `keeps_token_ids`, records may lack the ids of tokens that
    have no log-probabilities.
    """

    def __init__(
        self,
        index: int,
        detokenizer: Detokenizer,
        stop: StopRules,
        *,
        text_offset: int = 0,
        keeps_token_ids: bool = True,
    ) -> None:
        self.index = index
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.beam: BeamResult | None = None  # set if a beam search found this text
        self.num_tokens = 0
        self.logprob_sum = 0.0
        self._detokenizer = detokenizer
        self._feed_tokens = detokenizer.feed
        self._stop = stop
        self._matcher = StopMatcher(stop.strings, include_in_output=stop.include_in_output) if stop.strings else None
        self._num_chars = text_offset
        self._keeps_token_ids = keeps_token_ids
        self._records = TokenRecords()
        self._reasoning: TokenCounter | None = None
        self._parsed: ParsedText | None = None

    def parse_with(self, parsed: ParsedText) -> None:
        """Has the text parsed: it comes as the events of `take_events` instead, and stop strings count only in its
        content."""
        self._parsed = parsed

    def count_reasoning(self, counter: TokenCounter | None) -> None:
        """Has the tokens of the reasoning counted, if there is a counter."""
        self._reasoning = counter

    @property
    def num_reasoning_tokens(self) -> int | None:
        """None if they are not counted."""
        return None if self._reasoning is None else min(self._reasoning.num_tokens, self.num_tokens)

    def feed(self, delta: SequenceDelta) -> str:
        """Returns the text that can go out now. The delta's finish reason or a stop string finishes the choice."""
        token_ids, finish = delta.token_ids, delta.finish
        visible = token_ids if finish is None else self._visible(token_ids, finish)
        if self._reasoning is not None:
            self._reasoning.count(token_ids)
        if self._matcher is not None or delta.logprobs:
            text = self._feed_each(delta, len(visible))
        else:
            self.num_tokens += len(token_ids)
            if self._keeps_token_ids:
                self._records.token_ids += token_ids
            text = self._feed_tokens(visible)
            if self._parsed is not None:
                text = self._match(text)
        if finish is None or self.finish_reason is not None:
            return text
        return text + self._finish(finish, token_ids)

    def feed_beam(self, beam: BeamResult) -> str:
        """Returns the whole text that a beam search found."""
        self.beam = beam
        return self.feed(SequenceDelta(self.index, beam.token_ids, finish=beam.finish))

    def take_records(self) -> TokenRecords:
        """Returns the records of all tokens since the last call. Log-probabilities of a parsed text come once it is
        known what their tokens became."""
        records, self._records = self._records, TokenRecords()
        if self._parsed is not None:
            records.logprobs, records.kinds = self._parsed.take_scores()
        return records

    def take_events(self, text: str) -> list[Event]:
        """Returns the events since the last call. `text`: what `feed` returned."""
        if self._parsed is not None:
            return self._parsed.take_events()
        return [ContentText(text)] if text else []

    def _visible(self, token_ids: list[int], finish: FinishReason) -> list[int]:
        """A token that stopped the sequence has no text, unless stops belong to the output."""
        is_hidden = finish is FinishReason.STOP_TOKEN and not self._stop.include_in_output
        return token_ids[:-1] if is_hidden else token_ids

    def _feed_each(self, delta: SequenceDelta, num_visible: int) -> str:
        """Takes the tokens one by one: offsets and stop strings must not depend on the grouping of tokens."""
        records, pieces = self._records, []
        for position, token_id in enumerate(delta.token_ids):
            records.token_ids.append(token_id)
            self.num_tokens += 1
            text = self._detokenizer.feed([token_id]) if position < num_visible else ""
            if delta.logprobs:
                entry = delta.logprobs[position]
                self.logprob_sum += entry.logprob
                if self._parsed is not None:
                    self._parsed.kinds.add(entry, text)
                else:
                    records.logprobs.append(entry)
                    records.offsets.append(self._num_chars)
            if position < num_visible:
                pieces.append(self._match(text))
            if self.finish_reason is not None:
                break  # a stop string: the tokens after it do not count
        return "".join(pieces)

    def _match(self, text: str) -> str:
        """Returns what the stop matcher releases of a new text, unless it is parsed. A match finishes the choice."""
        self._num_chars += len(text)
        if self._parsed is not None:
            self._note_match(self._parsed.feed(text, self._active_matcher))
            return ""
        if (matcher := self._active_matcher) is None:
            return text
        match = matcher.feed(text)
        self._note_match(match.matched)
        return match.text

    @property
    def _active_matcher(self) -> StopMatcher | None:
        return None if self.num_tokens < self._stop.min_tokens else self._matcher

    def _note_match(self, matched: str | None) -> None:
        if matched is not None:
            self.finish_reason = "stop"
            self.stop_reason = matched
            if self._parsed is not None:
                self._parsed.kinds.end()

    def _finish(self, finish: FinishReason, token_ids: list[int]) -> str:
        flushed = self._detokenizer.flush()
        if self._parsed is not None:
            self._parsed.kinds.add(None, flushed)
        text = self._match(flushed)
        if self._parsed is not None and self.finish_reason is None:
            self._note_match(self._parsed.finish(self._active_matcher))
            self._parsed.kinds.end()
        if self.finish_reason is not None:
            return text
        if self._matcher is not None and self._parsed is None:
            text += self._matcher.flush()
        self.finish_reason = "length" if finish is FinishReason.LENGTH else "stop"
        if finish is FinishReason.STOP_TOKEN and token_ids and token_ids[-1] in self._stop.token_ids:
            self.stop_reason = token_ids[-1]
        return text
