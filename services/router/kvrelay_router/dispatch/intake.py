"""A sequence's tokens as both its workers send them, over all attempts: each is delivered once, and in order.

Tokens are taken by (attempt, output index) alone: what was delivered before is dropped, what comes too early is held.
D's first entry repeats P's first token, so whichever of the two comes first is delivered.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvrelay.protocol.messages import FirstToken, SequenceUsage, TokenEntry
from kvrelay.protocol.sampling import FinishReason, TokenLogprobs
from kvrelay.state_machine import IllegalEvent
from kvrelay_router.dispatch.interface import SequenceDelta

Arrival = FirstToken | TokenEntry


@dataclass(slots=True)
class TokenIntake:
    """Of one sequence. `check` an arrival, then `take` it."""

    sequence: int
    is_beam_search: bool = False
    prompt_logprobs_due: bool = False
    output: list[int] = field(default_factory=list)  # tokens delivered, over all attempts
    num_resumed: int = 0  # of them, those of earlier attempts
    usage: SequenceUsage | None = None  # to go with the next delta
    _cached_tokens: int | None = None  # to go with the next delta
    _cached_tokens_told: bool = False
    _held: dict[int, Arrival] = field(default_factory=dict)  # came before the tokens in front of them

    def begin_attempt(self) -> None:
        """What was held is of an attempt that has ended."""
        self._held.clear()
        self.num_resumed = len(self.output)

    def check(self, arrival: Arrival, *, has_prompt: bool) -> None:
        """Raises IllegalEvent. `has_prompt`: the sender computed the prompt, so it has the prompt's logprobs."""
        if self.is_beam_search and not _is_of_beam_search(arrival):
            raise IllegalEvent("tokens came of a beam search, or an end without texts")
        if arrival.index < self.num_resumed:
            raise IllegalEvent(f"output index {arrival.index} is older than the attempt, {self.num_resumed}")
        if has_prompt and arrival.index == self.num_resumed and self._lacks_prompt_logprobs(arrival):
            raise IllegalEvent("the prompt's logprobs were asked for and did not come")

    def next_delta(self, entry: TokenEntry) -> SequenceDelta | None:
        """What `check` and `take` would deliver of an entry that is the next tokens and nothing else, while nothing
        waits to go with them: nearly all are. None, and nothing done: it is for those two."""
        if (
            entry.index != len(self.output)
            or not self.output
            or not entry.token_ids
            or entry.logprobs
            or entry.cached_tokens is not None
            or entry.finish is not None
            or entry.usage is not None
            or self._held
            or self._cached_tokens is not None
            or self.usage is not None
            or self.prompt_logprobs_due
            or self.is_beam_search
        ):
            return None
        self.output += entry.token_ids
        return SequenceDelta(self.sequence, entry.token_ids)

    def take(self, arrival: Arrival) -> list[SequenceDelta]:
        """What an arrival and all that was held for it give to deliver. Nothing comes after a delta with `finish`."""
        if self._is_early(arrival):
            held = self._held.get(arrival.index)
            if held is None or len(_tokens_of(held)[0]) <= len(_tokens_of(arrival)[0]):
                self._held[arrival.index] = arrival
            return []
        delta = self._accept(arrival)
        deltas = [] if delta is None else [delta]
        while self._held and not (deltas and deltas[-1].finish is not None):
            index = min(self._held)
            if self._is_early(self._held[index]):
                break
            if (delta := self._accept(self._held.pop(index))) is not None:
                deltas.append(delta)
        return deltas

    def _is_early(self, arrival: Arrival) -> bool:
        """Tokens before it are missing, or the prompt's logprobs, which only P has and which belong in front."""
        return arrival.index > len(self.output) or self._lacks_prompt_logprobs(arrival)

    def _lacks_prompt_logprobs(self, arrival: Arrival) -> bool:
        return self.prompt_logprobs_due and not arrival.prompt_logprobs

    def _accept(self, arrival: Arrival) -> SequenceDelta | None:
        token_ids, logprobs = _tokens_of(arrival)
        num_known = len(self.output) - arrival.index
        finish = arrival.finish if arrival.finish is not FinishReason.ABORT else None
        if num_known:
            if num_known > len(token_ids):
                finish = None  # of a past that another worker has gone beyond
            token_ids, logprobs = token_ids[num_known:], logprobs[num_known:]
        if arrival.cached_tokens is not None and not self._cached_tokens_told:
            self._cached_tokens, self._cached_tokens_told = arrival.cached_tokens, True
        if not token_ids and finish is None:
            return None
        self.output += token_ids
        delta = SequenceDelta(
            self.sequence,
            token_ids,
            logprobs,
            arrival.prompt_logprobs if self.prompt_logprobs_due else [],
            self._cached_tokens,
            finish,
            self.usage,
            arrival.beams if finish is not None and self.is_beam_search else [],
        )
        self.prompt_logprobs_due = False
        self._cached_tokens = self.usage = None
        return delta


def _tokens_of(arrival: Arrival) -> tuple[list[int], list[TokenLogprobs]]:
    if isinstance(arrival, TokenEntry):
        return arrival.token_ids, arrival.logprobs
    token_ids = [] if arrival.token_id is None else [arrival.token_id]
    return token_ids, [] if arrival.logprobs is None else [arrival.logprobs]


def _is_of_beam_search(arrival: Arrival) -> bool:
    has_end = arrival.finish not in (None, FinishReason.ABORT)
    return not _tokens_of(arrival)[0] and has_end == bool(arrival.beams)
