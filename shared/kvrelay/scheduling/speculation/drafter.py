"""Guesses the next tokens of sequences from text that repeats. The step that computes the guesses verifies them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvrelay.scheduling.sequence import Sequence
from kvrelay.scheduling.speculation.draft_length import AcceptanceRate, DraftLength, Pause
from kvrelay.scheduling.speculation.ngram_index import NgramIndex
from kvrelay.scheduling.speculation.speculation_settings import SpeculationSettings
from kvrelay.scheduling.step_cost import CalibratedCost

INDEXED_PER_STEP = 8192
"""Tokens that are indexed before a step, at most: a few milliseconds. The rest of long prompts is indexed before the
next ones."""


class SequenceDrafts:
    """What the drafter knows of one sequence."""

    __slots__ = ("index", "pause", "rate")

    def __init__(self, index: NgramIndex) -> None:
        self.index = index
        self.rate = AcceptanceRate()
        self.pause = Pause()


class Drafter:
    """Makes drafts for the sequences of one scheduler."""

    def __init__(self, settings: SpeculationSettings) -> None:
        self._settings = settings
        self._lengths = DraftLength()
        self._cost = CalibratedCost()
        self._num_to_index = 0

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
        self._lengths.begin_step(self._cost.current, num_sequences, num_tokens)

    def draft(self, sequence: Sequence, most: int) -> NDArray[np.int32] | None:
        """Returns guesses of the tokens behind the newest one, at most `most`, or None. They have no stop token."""
        known = sequence.drafts
        if known is None or not known.pause.is_over():
            return None
        place = self._find(known)
        most = min(most, self._settings.num_speculative_tokens)
        if not place or most < 1:
            return None
        count = self._lengths.choose(known.rate, most)
        if not count:
            if not known.pause.begin():
                return None
            count = 1
        return _before_stop(known.index.following(place, count), sequence.stop_tokens)

    def expects(self, sequence: Sequence) -> bool:
        """Whether there are likely to be drafts behind the token that the step in flight samples."""
        known = sequence.drafts
        if known is None or not known.pause.is_over():
            return False
        return bool(self._find(known)) and self._lengths.choose(known.rate, 1) > 0

    def _find(self, known: SequenceDrafts) -> int:
        index = known.index
        self._num_to_index -= index.extend(self._num_to_index)
        return index.find()[1] if index.is_current else 0

    def verified(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        """A step verified drafts of a sequence."""
        known = sequence.drafts
        if known is not None:
            self._lengths.verified(known.rate, num_drafts, num_accepted)
            if num_accepted:
                known.pause.end()

    def measured(self, num_tokens: int, num_pairs: float, forward_s: float) -> None:
        """A step took `forward_s`."""
        self._cost.observe(num_tokens, num_pairs, forward_s)


def _before_stop(drafts: NDArray[np.int32], stop_tokens: frozenset[int]) -> NDArray[np.int32] | None:
    """The drafts before the first stop token: nothing follows it, and the step samples it without its draft."""
    if stop_tokens and not stop_tokens.isdisjoint(drafts.tolist()):
        at = next(at for at, token in enumerate(drafts.tolist()) if token in stop_tokens)
        return drafts[:at] if at else None
    return drafts
