"""Orders the tokens of one sequence, from all its workers and attempts, so that each is delivered once. Pure.

A token is known by its output index. Tokens that were delivered before are dropped, and tokens behind a gap are held
until it is filled. Decode's first entry repeats prefill's first token: the one that arrives first is delivered.
"""

from __future__ import annotations

from kvrelay.protocol.messages import SequenceUsage, TokenEntry
from kvrelay.protocol.sampling import FinishReason
from kvrelay.state_machine import IllegalEvent
from kvrelay_router.dispatch.interface import SequenceDelta, join_deltas


class TokenIntake:
    """`prompt_logprobs_due`: the prompt's log-probabilities were asked for. They go out with the first tokens."""

    def __init__(self, sequence: int, *, is_beam_search: bool = False, prompt_logprobs_due: bool = False) -> None:
        self.output: list[int] = []  # tokens delivered, over all attempts
        self.prompt_logprobs_due = prompt_logprobs_due
        self._sequence = sequence
        self._is_beam_search = is_beam_search
        self._attempt = 1
        self._num_resumed = 0  # tokens that earlier attempts delivered
        self._held: dict[int, TokenEntry] = {}  # entries behind a gap, by the index of their first token
        self._usage: SequenceUsage | None = None  # to go out with the next delta
        self._cached_tokens: int | None = None  # to go out with the next delta
        self._cached_tokens_reported = False

    def handle(self, entry: TokenEntry) -> SequenceDelta | None:
        """Returns the tokens that can be delivered now, in one delta. Nothing follows a delta with a finish reason.

        `entry` must be of the current attempt or of a new one. Raises IllegalEvent, and then nothing has changed.
        """
        if self._is_beam_search and not _is_of_beam_search(entry):
            raise IllegalEvent("tokens of a beam search, or its end without texts")
        is_resumed = entry.attempt != self._attempt
        if entry.index < (len(self.output) if is_resumed else self._num_resumed):
            raise IllegalEvent(f"output index {entry.index} is older than attempt {entry.attempt}")
        if is_resumed:
            self._attempt, self._num_resumed = entry.attempt, len(self.output)
            self._held.clear()
        if entry.usage is not None:
            self._usage = entry.usage
        if self._is_early(entry):
            self._hold(entry)
            return None
        delta = self._accept(entry)
        return self._release_held(delta) if self._held else delta

    def _is_early(self, entry: TokenEntry) -> bool:
        """Tokens before it are missing, or the prompt's log-probabilities, which only prefill has."""
        return entry.index > len(self.output) or (self.prompt_logprobs_due and not entry.prompt_logprobs)

    def _hold(self, entry: TokenEntry) -> None:
        """Of two entries with the same first token, keeps the longer or later one."""
        held = self._held.get(entry.index)
        if held is None or len(held.token_ids) <= len(entry.token_ids):
            self._held[entry.index] = entry

    def _accept(self, entry: TokenEntry) -> SequenceDelta | None:
        output, token_ids, logprobs, finish = self.output, entry.token_ids, entry.logprobs, entry.finish
        if finish is FinishReason.ABORT:
            finish = None  # the attempt failed, and the sequence goes on with the next one
        if num_known := len(output) - entry.index:
            if num_known > len(token_ids):
                finish = None  # another worker has already gone beyond this end
            token_ids, logprobs = token_ids[num_known:], logprobs[num_known:]
        if entry.cached_tokens is not None and not self._cached_tokens_reported:
            self._cached_tokens, self._cached_tokens_reported = entry.cached_tokens, True
        if not token_ids and finish is None:
            return None
        output += token_ids
        delta = SequenceDelta(
            self._sequence,
            token_ids,
            logprobs,
            entry.prompt_logprobs if self.prompt_logprobs_due else [],
            self._cached_tokens,
            finish,
            self._usage,
            entry.beams if self._is_beam_search else [],
        )
        self.prompt_logprobs_due = False
        self._cached_tokens = self._usage = None
        return delta

    def _release_held(self, delta: SequenceDelta | None) -> SequenceDelta | None:
        """Adds the held entries whose gap this delta has filled."""
        deltas = [] if delta is None else [delta]
        while self._held and not (deltas and deltas[-1].finish is not None):
            index = min(self._held)
            if self._is_early(self._held[index]):
                break
            if (released := self._accept(self._held.pop(index))) is not None:
                deltas.append(released)
        return join_deltas(deltas) if deltas else None


def _is_of_beam_search(entry: TokenEntry) -> bool:
    has_end = entry.finish not in (None, FinishReason.ABORT)
    return not entry.token_ids and has_end == bool(entry.beams)
