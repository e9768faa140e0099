"""Guesses the next tokens of sequences from text that repeats. The step that computes the guesses verifies them.

Where drafts do not pay, the token that would be the first one is remembered, and compared with the token that comes.
So the acceptance rates stay true without drafts that cost time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvrelay.scheduling.sequence import Sequence
from kvrelay.scheduling.speculation.draft_length import AcceptanceRates, DraftLength, Pause
from kvrelay.scheduling.speculation.ngram_index import NgramIndex
from kvrelay.scheduling.speculation.speculation_settings import SpeculationSettings
from kvrelay.scheduling.step_cost import CalibratedCost, StepCost

INDEXED_PER_STEP = 8192
"""Tokens that are indexed before a step, at most: a few milliseconds. The rest of long prompts is indexed before the
next ones."""


@dataclass(frozen=True, slots=True)
class _Guess:
    """`token_id` may come at `position`, behind a match of `length` tokens."""

    position: int
    token_id: int
    length: int


class SequenceDrafts:
    """What the drafter knows of one sequence. `length`: of the match whose drafts were made last."""

    __slots__ = ("guess", "index", "length", "pause", "rates")

    def __init__(self, index: NgramIndex) -> None:
        self.index = index
        self.rates = AcceptanceRates()
        self.pause = Pause()
        self.guess: _Guess | None = None
        self.length = 0


class Drafter:
    """Makes drafts for the sequences of one scheduler."""

    def __init__(self, settings: SpeculationSettings) -> None:
        self._settings = settings
        self._lengths = DraftLength()
        self._cost = CalibratedCost()
        self._num_to_index = 0
        self._step = 0

    def begin(self, sequence: Sequence) -> None:
        """A sequence joins. Prefill workers, beams and prompts that are only scored have no drafts."""
        sampling, settings = sequence.sampling, self._settings
        method = sampling.speculation or settings.method
        if method == "off" or sequence.prefill_only or sampling.beams is not None or sampling.max_tokens < 2:
            return
        index = NgramIndex(sequence.tokens, settings.prompt_lookup_min, settings.prompt_lookup_max)
        sequence.drafts = SequenceDrafts(index)

    def begin_step(self, num_sequences: int, num_tokens: int) -> None:
        """Drafts are wanted for a step that has so many sequences and tokens already."""
        self._num_to_index = INDEXED_PER_STEP
        self._step += 1
        self._lengths.begin_step(self._cost.current, num_sequences, num_tokens)

    def draft(self, sequence: Sequence, most: int) -> NDArray[np.int32] | None:
        """Returns guesses of the tokens behind the newest one, at most `most`, or None. They have no stop token."""
        known = sequence.drafts
        if known is None:
            return None
        length, place = self._find(sequence, known)
        most = min(most, self._settings.num_speculative_tokens)
        if not place or most < 1:
            return None
        count = self._lengths.choose(known.rates, length, most)
        if not count:
            self._guess(sequence, known, length, place)
            known.pause.begin(self._step)
            return None
        known.length = length
        return _before_stop(known.index.following(place, count), sequence.stop_tokens)

    def expects(self, sequence: Sequence) -> bool:
        """Whether there are likely to be drafts behind the token that the step in flight samples."""
        known = sequence.drafts
        if known is None:
            return False
        length, place = self._find(sequence, known)
        if not place:
            return False
        self._guess(sequence, known, length, place)
        if self._lengths.choose(known.rates, length, 1):
            return True
        known.pause.begin(self._step)
        return False

    def _guess(self, sequence: Sequence, known: SequenceDrafts, length: int, place: int) -> None:
        """Remembers the token that is likely to come behind the match."""
        known.guess = _Guess(sequence.num_tokens, int(known.index.following(place, 1)[0]), length)

    def _find(self, sequence: Sequence, known: SequenceDrafts) -> tuple[int, int]:
        """The length of a match and the position behind it; (0, 0) if there is none, the sequence pauses, or no drafts
        pay in a step of this size."""
        guess, index = known.guess, known.index
        if guess is not None and sequence.num_tokens > guess.position:
            known.guess = None
            is_right = int(sequence.tokens.view(guess.position, guess.position + 1)[0]) == guess.token_id
            self._lengths.verified(known.rates, guess.length, 1, int(is_right))
            if is_right:
                known.pause.shorten(self._step)
        if not (self._lengths.may_pay and known.pause.is_over(self._step)):
            return 0, 0
        self._num_to_index -= index.extend(self._num_to_index)
        return index.find() if index.is_current else (0, 0)

    def verified(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        """A step verified drafts of a sequence."""
        known = sequence.drafts
        if known is not None:
            self._lengths.verified(known.rates, known.length, num_drafts, num_accepted)
            if num_accepted:
                known.pause.end()

    def calibrate(self, cost: StepCost) -> None:
        """Starts from this cost. Measured steps correct it: steps of one size do not tell what one more token costs."""
        self._cost = CalibratedCost(cost)

    def measured(self, num_tokens: int, num_pairs: float, forward_s: float) -> None:
        """A step took `forward_s`."""
        self._cost.observe(num_tokens, num_pairs, forward_s)


def _before_stop(drafts: NDArray[np.int32], stop_tokens: frozenset[int]) -> NDArray[np.int32] | None:
    """The drafts before the first stop token: nothing follows it, and the step samples it without its draft."""
    if stop_tokens and not stop_tokens.isdisjoint(drafts.tolist()):
        at = next(at for at, token in enumerate(drafts.tolist()) if token in stop_tokens)
        return drafts[:at] if at else None
    return drafts
