"""Orders the tokens of one sequence, from all its workers and attempts, so that each is delivered once. Pure.

A token is known by its output index. Tokens that were delivered before are dropped, and tokens behind a gap are held
until it is filled. Decode's first entry repeats prefill's first token: the one that arrives first is delivered.
"""

from __future__ import annotations

from typing import final

import msgspec

from kvrelay.protocol.messages import PromptLogprobs, SequenceUsage, TokenEntry
from kvrelay.protocol.packed_logprobs import CollectedLogprobs
from kvrelay.protocol.sampling import FinishReason, TokenLogprobs
from kvrelay.text.choice import SequenceDelta, join_deltas


@final
class ScoresReceived(msgspec.Struct, frozen=True):
    """A part of the prompt's log-probabilities came."""

    attempt: int
    body: PromptLogprobs


class TokenIntake:
    """`num_scores`: so many log-probabilities of the prompt were asked for. They go out with the first tokens.
    `opening`: tokens that the output begins with. They go out with the first ones of a worker, so that a request that
    fails before has no output."""

    def __init__(self, sequence: int, num_scores: int = 0, opening: tuple[int, ...] = ()) -> None:
        self.output: list[int] = list(opening)  # tokens delivered, over all attempts, and the opening
        self._opening = opening  # until it is delivered
        self.lacks_scores = num_scores > 0  # some of the prompt's log-probabilities are still to come
        self._scores_due = self.lacks_scores  # until they are delivered
        self._num_scores = num_scores
        self._scores = CollectedLogprobs()
        self._sequence = sequence
        self._attempt = 1
        self._held: dict[int, TokenEntry] = {}  # entries behind a gap, by the index of their first token
        self._usage: SequenceUsage | None = None  # sent with the next delta, then None
        self._cached_tokens: int | None = None  # sent with the next delta, then None
        self._cached_tokens_reported = False
        self._has_details = self._scores_due or bool(opening)  # the next delta brings more than an entry's tokens

    def handle(self, entry: TokenEntry | ScoresReceived) -> SequenceDelta | None:
        """Returns the tokens that can be delivered now, in one delta. Nothing follows a delta with a finish reason.

        `entry` must be of the current attempt or of a new one.
        """
        if type(entry) is ScoresReceived:  # `isinstance` takes ten times as long for a struct that is none
            return self._handle_scores(entry)
        output, token_ids = self.output, entry.token_ids
        if (
            not token_ids
            or entry.index != len(output)
            or entry.attempt != self._attempt
            or entry.logprobs
            or entry.usage is not None
            or entry.cached_tokens is not None
            or self._has_details
            or self._held
        ):
            return self._handle_unusual(entry)
        # Nearly all entries are the next tokens of the current attempt and nothing else.
        output += token_ids
        return SequenceDelta(self._sequence, token_ids, entry.logprobs, finish=entry.finish)

    def _handle_unusual(self, entry: TokenEntry) -> SequenceDelta | None:
        """Does what `handle` does, for entries of any kind."""
        if entry.attempt != self._attempt:
            self._begin_attempt(entry.attempt)
        num_known = len(self.output) - entry.index
        if num_known < 0 or self.lacks_scores:
            self._hold(entry)
            return None
        token_ids, logprobs, finish = entry.token_ids, entry.logprobs, entry.finish
        if num_known:
            if num_known > len(token_ids):
                finish = None  # another worker has already gone beyond this end
            token_ids, logprobs = token_ids[num_known:], logprobs[num_known:]
        if entry.usage is not None or entry.cached_tokens is not None:
            self._keep_details(entry)
        delta = None
        if token_ids or finish is not None:
            self.output += token_ids
            if self._has_details or entry.texts:
                delta = self._delta_with_details(entry, token_ids, logprobs, finish)
            else:
                delta = SequenceDelta(self._sequence, token_ids, logprobs, finish=finish)
        return self._release_held(delta) if self._held else delta

    def _keep_details(self, entry: TokenEntry) -> None:
        """Keeps the values that are not tokens for the next delta. Cached tokens are reported once."""
        if entry.usage is not None:
            self._usage, self._has_details = entry.usage, True
        if entry.cached_tokens is not None and not self._cached_tokens_reported:
            self._cached_tokens, self._cached_tokens_reported = entry.cached_tokens, True
            self._has_details = True

    def _delta_with_details(
        self, entry: TokenEntry, token_ids: list[int], logprobs: list[TokenLogprobs], finish: FinishReason | None
    ) -> SequenceDelta:
        opening, self._opening = self._opening, ()
        delta = SequenceDelta(
            self._sequence,
            [*opening, *token_ids] if opening else token_ids,
            logprobs,
            self._scores if self._scores_due else (),
            self._cached_tokens,
            finish,
            self._usage,
            entry.texts,
        )
        if self._scores_due:
            self._scores_due = False
            self._scores = CollectedLogprobs()
        self._has_details = False
        self._cached_tokens = self._usage = None
        return delta

    def _begin_attempt(self, attempt: int) -> None:
        """The entries held for the previous one are dropped. Its worker computes the prompt again, and with it the
        log-probabilities, unless all of them came before."""
        self._attempt = attempt
        self._held.clear()
        if self.lacks_scores:
            self._scores = CollectedLogprobs()

    def _handle_scores(self, event: ScoresReceived) -> SequenceDelta | None:
        """Keeps a part. The last one releases tokens that came before it from another worker."""
        if not self.lacks_scores:
            return None
        if event.attempt != self._attempt:
            self._begin_attempt(event.attempt)
        start, part, num_known = event.body.start, event.body.part, len(self._scores)
        if start + len(part) > num_known:  # a prompt that is computed again may have other parts
            self._scores.add(part.without_first(num_known - start) if num_known > start else part)
            self.lacks_scores = len(self._scores) < self._num_scores
        return self._release_held(None) if self._held and not self.lacks_scores else None

    def _hold(self, entry: TokenEntry) -> None:
        """Of two entries with the same first token, keeps the longer or later one."""
        held = self._held.get(entry.index)
        if held is None or len(held.token_ids) <= len(entry.token_ids):
            self._held[entry.index] = entry

    def _release_held(self, delta: SequenceDelta | None) -> SequenceDelta | None:
        """Adds the held entry behind this delta. That entry adds the next one."""
        index = min(self._held)
        if index > len(self.output) or (delta is not None and delta.finish is not None):
            return delta
        released = self.handle(self._held.pop(index))
        return join_deltas([each for each in (delta, released) if each is not None]) if released is not None else delta
