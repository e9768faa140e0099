"""The places of a step at which tokens are sampled, if some of its rows have drafts.

A draft is verified by sampling at its place, as a step without drafts would: the random numbers depend on the place
alone, and penalties, biases and masks are those behind the drafts before it. It is accepted if it is the token that is
sampled there. So the output is the same with and without drafts, for greedy and for random sampling. (Speculative
sampling, Leviathan et al., ICML 2023, keeps only the distribution.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kvrelay.step.batch import WorkerRow

_NUM_DRAFTS = attrgetter("num_drafts")


@dataclass(frozen=True, slots=True)
class DraftRows:
    """The places in the order of the batch. All fields are `[places]`.

    `rows`: the row of the batch. `offsets`: tokens of the row behind the place, as a negative number. `depths`: drafts
    of the row before the place. `drafts`: the draft behind the place, which is verified there; -1 for none.
    """

    rows: NDArray[np.int64]
    offsets: NDArray[np.int64]
    depths: NDArray[np.int64]
    drafts: NDArray[np.int64]

    @classmethod
    def of(cls, batch: Sequence[WorkerRow], wanted: Sequence[int]) -> Self | None:
        """The places of these rows of a batch; None if no row has drafts."""
        counts = list(map(_NUM_DRAFTS, map(batch.__getitem__, wanted)))  # runs in C for all rows
        if not any(counts):
            return None
        num_drafts = np.array(counts, np.int64)
        ends = np.cumsum(num_drafts + 1)
        rows = np.repeat(np.array(wanted, np.int64), num_drafts + 1)
        offsets = np.arange(len(rows)) - np.repeat(ends - 1, num_drafts + 1)
        drafts = np.full(len(rows), -1, np.int64)
        tokens = [row.token_ids[len(row.token_ids) - row.num_drafts :] for row in map(batch.__getitem__, wanted)]
        drafts[offsets < 0] = np.concatenate(tokens)
        return cls(rows, offsets, offsets + np.repeat(num_drafts, num_drafts + 1), drafts)

    def take(self, places: Sequence[int]) -> DraftRows:
        """Some of the places: those of whole rows."""
        at = np.array(places, np.int64)
        return DraftRows(self.rows[at], self.offsets[at], self.depths[at], self.drafts[at])

    def earlier(self, places: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The drafts before each of `places`, flat: index into `places`, token id. Without those that were taken out:
        the places behind them give no token."""
        depths = self.depths[places]
        which = np.repeat(np.arange(len(places)), depths)
        back = np.arange(len(which)) - np.repeat(np.cumsum(depths) - depths, depths)  # 0, 1, .. for each place
        token_ids = self.drafts[places[which] - 1 - back]
        stays = token_ids >= 0
        return which[stays], token_ids[stays]

    def accepted(self, token_ids: NDArray[np.int64], is_valid: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Whether each place is reached: all drafts before it are the tokens sampled at their places, `[places]`.

        `is_valid`: whether the logits of a place are finite; an output stops before one where they are not.
        """
        is_first = self.depths == 0
        follows = is_first.copy()
        follows[1:] |= (token_ids[:-1] == self.drafts[:-1]) & is_valid[1:]
        # A place is reached if nothing between it and the first place of its row is missing.
        missing = np.cumsum(~follows)
        reached: NDArray[np.bool_] = missing == np.maximum.accumulate(np.where(is_first, missing, 0))
        return reached
