"""The output of a step's backbone, and the hidden states of it that go through the head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvrelay.backends.backend import PackedRows
from kvrelay.engine.batch import WorkerRow
from kvrelay.engine.device import to_device
from kvrelay.engine.draft_rows import DraftRows

_PROMPT_SLICE = 512  # prompt positions whose logits exist at the same time


@dataclass(frozen=True, slots=True)
class StepForward:
    """`hidden`, `[tokens, hidden]`, is valid until the next forward."""

    rows: Sequence[WorkerRow]
    packed: PackedRows
    hidden: torch.Tensor

    def last_hidden(self, places: Sequence[int], drafts: DraftRows | None = None) -> torch.Tensor:
        """The hidden states of the last token of these rows, or at the places of drafts, `[rows, hidden]`."""
        if drafts is None and len(places) == len(self.hidden):
            return self.hidden  # rows of one token, all of which sample
        last = self.packed.query_starts[1:][places].astype(np.int64) - 1
        if drafts is not None:
            last += drafts.offsets
        return self.hidden[to_device(last, self.hidden.device)]

    def prompt_slices(self, place: int, first: int, count: int) -> Iterator[tuple[int, torch.Tensor]]:
        """The hidden states of `count` tokens of a row from number `first` on, in slices, each with the number of its
        first token in the row."""
        start = int(self.packed.query_starts[place])
        for at in range(first, first + count, _PROMPT_SLICE):
            yield at, self.hidden[start + at : start + min(at + _PROMPT_SLICE, first + count)]

    def sampled(self) -> tuple[list[int], DraftRows | None]:
        """The rows that sample, once for each place, and the places of drafts, if there are any. Beams are left out."""
        wanted = [at for at, row in enumerate(self.rows) if row.sample and row.beam is None]
        drafts = DraftRows.of(self.rows, wanted)
        return (wanted if drafts is None else drafts.rows.tolist()), drafts

    def beams(self) -> list[int]:
        """The beams' rows that sample."""
        return [at for at, row in enumerate(self.rows) if row.sample and row.beam is not None]

    def head_inputs(self) -> Iterator[torch.Tensor]:
        """The hidden states of each call of the head for a step of several ranks, in the order of the calls."""
        for place, row in enumerate(self.rows):
            for _, hidden in self.prompt_slices(place, row.first_scored, row.num_scored):
                yield hidden
        places, drafts = self.sampled()
        if places:
            yield self.last_hidden(places, drafts)
        if beams := self.beams():
            yield self.last_hidden(beams)
