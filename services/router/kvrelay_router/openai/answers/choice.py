"""One choice of an answer as it grows: tokens in, text and token records out.

A token's text may be withheld (bytes of an unfinished character, a possible stop string), and its record then waits
with it, so that streaming and plain answers are made of the same outputs.
"""

from __future__ import annotations

import msgspec

from kvrelay.protocol.failure_kind import FailureKind
from kvrelay.protocol.sampling import BeamResult, FinishReason, TokenLogprobs
from kvrelay_router.dispatch.interface import RequestFailed, SequenceDelta
from kvrelay_router.text.detokenizer import Detokenizer
from kvrelay_router.text.stop_strings import StopMatcher


class StopRules(msgspec.Struct, frozen=True):
    """What ends a choice beside its length."""

    strings: list[str]
    token_ids: frozenset[int]
    min_tokens: int
    include_in_output: bool


class ChoiceOutput(msgspec.Struct):
    """What a delta added to a choice. `offsets` are where in the text the tokens of `logprobs` start."""

    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    offsets: list[int] = []
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    beam: BeamResult | None = None  # of a beam search: the whole text


class Choice:
    """The text of one sequence. `index` is its place in the answer."""

    def __init__(self, index: int, detokenizer: Detokenizer, stop: StopRules, *, text_offset: int = 0) -> None:
        self.index = index
        self.finish_reason: str | None = None
        self.num_tokens = 0
        self.started = False  # whether a output of it went out
        self.logprob_sum = 0.0
        self._detokenizer = detokenizer
        self._stop = stop
        self._matcher = StopMatcher(stop.strings, include_in_output=stop.include_in_output) if stop.strings else None
        self._num_chars = text_offset
        self._waiting = ChoiceOutput()

    def feed(self, delta: SequenceDelta) -> ChoiceOutput:
        """Takes a delta in. The output has all that can go out now; a matched stop string finishes it."""
        if delta.finish is FinishReason.ABORT:
            raise RequestFailed("the request was aborted", FailureKind.WORKER_LOST)
        visible = self._visible(delta)
        if self._matcher is None and not delta.logprobs:
            waiting = self._waiting
            waiting.token_ids += delta.token_ids
            waiting.text += self._detokenizer.feed(visible)
            self.num_tokens += len(delta.token_ids)
        else:
            self._feed_each(delta, len(visible))
        if delta.finish is not None and self.finish_reason is None:
            self._finish(delta.finish, delta.token_ids)
        return self._take()

    def next_text(self, delta: SequenceDelta) -> str | None:
        """A short cut for what nearly every delta is, tokens and nothing else, of a choice that has begun: the text
        that `feed` would let out. None, and nothing done: the delta is for `feed`, as all are with stop strings."""
        if (
            self._matcher is not None
            or not self.started
            or self.finish_reason is not None
            or delta.finish is not None
            or delta.logprobs
            or delta.prompt_logprobs
            or delta.cached_tokens is not None
        ):
            return None
        self.num_tokens += len(delta.token_ids)
        return self._detokenizer.feed(delta.token_ids)

    def _visible(self, delta: SequenceDelta) -> list[int]:
        """Tokens whose text counts: a token that stopped the sequence has none, unless stops are to be shown."""
        hidden = delta.finish is FinishReason.STOP_TOKEN and not self._stop.include_in_output
        return delta.token_ids[:-1] if hidden else delta.token_ids

    def _feed_each(self, delta: SequenceDelta, num_visible: int) -> None:
        """Token by token, so that neither offsets nor matches depend on how tokens were batched."""
        waiting = self._waiting
        for position, token_id in enumerate(delta.token_ids):
            waiting.token_ids.append(token_id)
            self.num_tokens += 1
            if delta.logprobs:
                entry = delta.logprobs[position]
                waiting.logprobs.append(entry)
                waiting.offsets.append(self._num_chars)
                self.logprob_sum += entry.logprob
            if position < num_visible:
                self._grow(self._detokenizer.feed([token_id]))
            if self.finish_reason is not None:
                return

    def _grow(self, text: str) -> None:
        """Text that the detokenizer released; the matcher may withhold it, or end the choice."""
        self._num_chars += len(text)
        if self._matcher is None or self.num_tokens < self._stop.min_tokens:
            self._waiting.text += text
            return
        match = self._matcher.feed(text)
        self._waiting.text += match.text
        if match.matched is not None:
            self.finish_reason = self._waiting.finish_reason = "stop"
            self._waiting.stop_reason = match.matched

    def _finish(self, finish: FinishReason, token_ids: list[int]) -> None:
        self._grow(self._detokenizer.flush())
        if self.finish_reason is not None:
            return
        if self._matcher is not None:
            self._waiting.text += self._matcher.flush()
        self.finish_reason = self._waiting.finish_reason = "length" if finish is FinishReason.LENGTH else "stop"
        if finish is FinishReason.STOP_TOKEN and token_ids and token_ids[-1] in self._stop.token_ids:
            self._waiting.stop_reason = token_ids[-1]

    def _take(self) -> ChoiceOutput:
        """Without new text nothing goes out yet, unless this is the end."""
        if not self._waiting.text and self.finish_reason is None:
            return ChoiceOutput()
        output, self._waiting = self._waiting, ChoiceOutput()
        return output
