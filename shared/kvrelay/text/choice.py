"""One choice of an answer: takes tokens, and gives text or events and the records of the tokens to what writes it.

Text is withheld while it may still change: the bytes of an unfinished character, or the beginning of a stop string. The
result does not depend on how the tokens were grouped into deltas.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from kvrelay.protocol.messages import SequenceUsage
from kvrelay.protocol.packed_logprobs import CollectedLogprobs
from kvrelay.protocol.sampling import FinishReason, ScoredText, TokenLogprobs
from kvrelay.text.output_parsing.events import ContentText, Event
from kvrelay.text.output_parsing.reasoning import TokenCounter
from kvrelay.text.parsed_text import ParsedText, StopMatcher, TokenKind
from kvrelay.text.tokenizer import Detokenizer


class SequenceDelta(msgspec.Struct, frozen=True, gc=False):
    """New tokens of one sequence, in order, none twice. `logprobs` has one entry per token if asked for.

    `prompt_logprobs` (for prompt tokens 1, 2, ...) and `cached_tokens` come with a sequence's first delta.
    With `finish` STOP_TOKEN the last token is the end-of-sequence or stop token. With max_tokens 0 one delta comes,
    with no token, finish LENGTH and the prompt's logprobs. A search gives deltas without tokens: its `texts`, best
    first, with the best one's finish.
    """

    sequence: int
    token_ids: list[int]
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: Sequence[TokenLogprobs] | CollectedLogprobs = ()
    cached_tokens: int | None = None
    finish: FinishReason | None = None
    usage: SequenceUsage | None = None
    texts: Sequence[ScoredText] = ()


def join_deltas(deltas: list[SequenceDelta]) -> SequenceDelta:
    """Joins at least one delta of one sequence, in order."""
    if len(deltas) == 1:
        return deltas[0]
    first, last = deltas[0], deltas[-1]
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    cached_tokens = usage = None
    for delta in deltas:
        token_ids += delta.token_ids
        logprobs += delta.logprobs
        if cached_tokens is None:
            cached_tokens = delta.cached_tokens
        if delta.usage is not None:
            usage = delta.usage
    return SequenceDelta(
        first.sequence, token_ids, logprobs or (), first.prompt_logprobs, cached_tokens, last.finish, usage, last.texts
    )


MOST_SINGLE = 256


def single_tokens(delta: SequenceDelta) -> list[SequenceDelta]:
    """Returns a delta for each token, if tokens have log-probabilities. More than `MOST_SINGLE` stay together: they
    wait for a client that reads slowly, and an event for each would hold the loop for seconds."""
    if not 2 <= len(delta.logprobs) <= MOST_SINGLE:
        return [delta]
    parts = [
        SequenceDelta(delta.sequence, [token_id], [entry])
        for token_id, entry in zip(delta.token_ids, delta.logprobs, strict=True)
    ]
    parts[0] = replace(parts[0], prompt_logprobs=delta.prompt_logprobs, cached_tokens=delta.cached_tokens)
    parts[-1] = replace(parts[-1], finish=delta.finish, usage=delta.usage)
    return parts


TOOL_CALLS = "tool_calls"
"""The finish reason of a text with calls that was not cut."""


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

    def take_last(self) -> TokenRecords:
        """Returns the last token, and leaves the others."""
        last = TokenRecords(self.token_ids[-1:], self.logprobs[-1:], self.offsets[-1:], self.kinds[-1:])
        parts: tuple[list[Any], ...] = (self.token_ids, self.logprobs, self.offsets, self.kinds)
        for part in parts:
            del part[-1:]
        return last


class Choice:
    """The text of one sequence. `index` is its place in the answer. What nothing takes is kept for the end.

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
        self.scored: ScoredText | None = None  # set if a search found this text
        self.num_tokens = 0
        self.logprob_sum = 0.0
        self._detokenizer = detokenizer
        self._feed_tokens = detokenizer.feed
        self._stop = stop
        self._matcher = StopMatcher(stop.strings, include_in_output=stop.include_in_output) if stop.strings else None
        self._num_chars = text_offset
        self._keeps_token_ids = keeps_token_ids
        self._records = TokenRecords()
        self._texts: list[str] = []
        self._reasoning: TokenCounter | None = None
        self._parsed: ParsedText | None = None

    def parse_with(self, parsed: ParsedText, counter: TokenCounter | None = None) -> None:
        """Has the text parsed: stop strings count only in its content. `counter`: of the tokens of the reasoning."""
        self._parsed, self._reasoning = parsed, counter

    @property
    def is_plain(self) -> bool:
        """All text is content."""
        return self._parsed is None

    @property
    def num_reasoning_tokens(self) -> int | None:
        """None if they are not counted."""
        return None if self._reasoning is None else min(self._reasoning.num_tokens, self.num_tokens)

    @property
    def ending(self) -> dict[str, Any]:
        """The fields of OpenAI's choices about the end, with the scores that a text has if a search found it."""
        fields: dict[str, Any] = {"finish_reason": self.finish_reason, "stop_reason": self.stop_reason}
        if self.scored is not None:
            fields |= {"score": self.scored.score, "cumulative_logprob": self.scored.logprob}
        return fields

    def feed(self, delta: SequenceDelta) -> None:
        """Takes the next tokens. The delta's finish reason or a stop string finishes the choice."""
        token_ids, finish = delta.token_ids, delta.finish
        visible = token_ids if finish is None else self._visible(token_ids, finish)
        if self._reasoning is not None:
            self._reasoning.count(token_ids)
        if self._matcher is not None or delta.logprobs:
            self._feed_each(delta, len(visible))
        else:
            self.num_tokens += len(token_ids)
            if self._keeps_token_ids:
                self._records.token_ids += token_ids
            text = self._feed_tokens(visible)
            if self._parsed is None:
                self._texts.append(text)
            else:
                self._match(text)
        if finish is not None and self.finish_reason is None:
            self._finish(finish, token_ids)

    def feed_scored(self, text: ScoredText) -> None:
        """Takes the whole text that a search found."""
        self.scored = text
        self.feed(SequenceDelta(self.index, text.token_ids, finish=text.finish))

    def take_records(self) -> TokenRecords:
        """Returns the records of all tokens since the last call. Log-probabilities of a parsed text come once it is
        known what their tokens became."""
        records, self._records = self._records, TokenRecords()
        if self._parsed is not None:
            records.logprobs, records.kinds = self._parsed.take_scores()
        return records

    def take_text(self) -> str:
        """Returns the text since the last call, of a choice that is not parsed."""
        texts = self._texts
        text = texts[0] if len(texts) == 1 else "".join(texts)
        texts.clear()
        return text

    def take_events(self) -> list[Event]:
        """Returns what the text since the last call says."""
        if self._parsed is not None:
            return self._parsed.take_events()
        text = self.take_text()
        return [ContentText(text)] if text else []

    def _visible(self, token_ids: list[int], finish: FinishReason) -> list[int]:
        """A token that stopped the sequence has no text, unless stops belong to the output."""
        is_hidden = finish is FinishReason.STOP_TOKEN and not self._stop.include_in_output
        return token_ids[:-1] if is_hidden else token_ids

    def _feed_each(self, delta: SequenceDelta, num_visible: int) -> None:
        """Takes the tokens one by one: offsets and stop strings must not depend on the grouping of tokens."""
        records = self._records
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
                self._match(text)
            if self.finish_reason is not None:
                break  # a stop string: the tokens after it do not count

    def _match(self, text: str) -> None:
        """Keeps what the parser and the stop matcher release of a new text. A match finishes the choice."""
        self._num_chars += len(text)
        if self._parsed is not None:
            self._note_match(self._parsed.feed(text, self._active_matcher))
        elif (matcher := self._active_matcher) is None:
            self._texts.append(text)
        else:
            match = matcher.feed(text)
            self._texts.append(match.text)
            self._note_match(match.matched)

    @property
    def _active_matcher(self) -> StopMatcher | None:
        return None if self.num_tokens < self._stop.min_tokens else self._matcher

    def _note_match(self, matched: str | None) -> None:
        if matched is not None:
            self.finish_reason = self._stopped
            self.stop_reason = matched
            if self._parsed is not None:
                self._parsed.kinds.end()

    @property
    def _stopped(self) -> str:
        return TOOL_CALLS if self._parsed is not None and self._parsed.has_calls else "stop"

    def _finish(self, finish: FinishReason, token_ids: list[int]) -> None:
        flushed = self._detokenizer.flush()
        if self._parsed is not None:
            self._parsed.kinds.add(None, flushed)
        self._match(flushed)
        if self._parsed is not None and self.finish_reason is None:
            self._note_match(self._parsed.finish(self._active_matcher))
            self._parsed.kinds.end()
        if self.finish_reason is not None:
            return
        if self._matcher is not None and self._parsed is None:
            self._texts.append(self._matcher.flush())
        self.finish_reason = "length" if finish is FinishReason.LENGTH else self._stopped
        if finish is FinishReason.STOP_TOKEN and token_ids and token_ids[-1] in self._stop.token_ids:
            self.stop_reason = token_ids[-1]
