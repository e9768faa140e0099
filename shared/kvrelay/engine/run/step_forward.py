"""The output of a step's backbone, and the hidden states of it that go through the head."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch

from kvrelay.backends.backend import PackedRows
from kvrelay.engine.run.device import to_device
from kvrelay.engine.sample.draft_rows import DraftRows
from kvrelay.step.batch import DeviceLost, WorkerRow

_PROMPT_SLICE = 512  # prompt positions whose logits exist at the same time


@dataclass(frozen=True, slots=True)
class PromptPart:
    """`count` positions of the row at `place`, from its position number `first` on."""

    place: int
    first: int
    count: int


def positions_to_score(rows: Sequence[WorkerRow]) -> dict[int, range]:
    """Numbers of the positions whose next token is scored, by place, as the rows state them."""
    return {
        place: range(row.first_scored, row.first_scored + row.num_scored)
        for place, row in enumerate(rows)
        if row.num_scored
    }


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

    def prompt_groups(self, scored: Mapping[int, range]) -> Iterator[tuple[torch.Tensor, list[PromptPart]]]:
        """The hidden states of the rows' positions `scored`, by place, `[positions, hidden]`: of several rows together,
        since a call of the head for each of many short rows takes longer. Each with the parts it consists of."""
        group: list[PromptPart] = []
        room = _PROMPT_SLICE
        for place, positions in scored.items():
            while positions:
                count = min(len(positions), room)
                group.append(PromptPart(place, positions.start, count))
                positions, room = positions[count:], room - count
                if not room:
                    yield self._hidden_of(group), group
                    group, room = [], _PROMPT_SLICE
        if group:
            yield self._hidden_of(group), group

    def _hidden_of(self, parts: Sequence[PromptPart]) -> torch.Tensor:
        starts = [int(self.packed.query_starts[part.place]) + part.first for part in parts]
        if len(parts) == 1:
            return self.hidden[starts[0] : starts[0] + parts[0].count]
        wanted = np.concatenate(
            [np.arange(start, start + part.count) for start, part in zip(starts, parts, strict=True)]
        )
        return self.hidden[to_device(wanted, self.hidden.device)]

    def sampled(self) -> tuple[list[int], DraftRows | None]:
        """The rows that sample a token, once for each place, and the places of drafts, if there are any."""
        wanted = [at for at, row in enumerate(self.rows) if row.sample and row.wanted is None]
        drafts = DraftRows.of(self.rows, wanted)
        return (wanted if drafts is None else drafts.rows.tolist()), drafts

    def with_candidates(self) -> list[int]:
        """The rows that give candidates in place of a token."""
        return [at for at, row in enumerate(self.rows) if row.sample and row.wanted is not None]

    def head_inputs(self) -> Iterator[torch.Tensor]:
        """The hidden states of each call of the head for a step of several ranks, in the order of the calls."""
        for hidden, _ in self.prompt_groups(positions_to_score(self.rows)):
            yield hidden
        places, drafts = self.sampled()
        if places:
            yield self.last_hidden(places, drafts)
        if places := self.with_candidates():
            yield self.last_hidden(places)


def pack_rows(rows: Sequence[WorkerRow]) -> PackedRows:
    """Returns the rows' lengths, positions and padded block tables as arrays."""
    table_lens = np.fromiter((len(row.block_ids) for row in rows), np.int64, len(rows))
    tables = np.zeros((len(rows), int(table_lens.max(initial=0))), np.int32)
    tables[np.arange(tables.shape[1]) < table_lens[:, None]] = np.concatenate([row.block_ids for row in rows])
    return PackedRows(
        query_lens=np.fromiter((len(row.token_ids) for row in rows), np.int32, len(rows)),
        positions=np.fromiter((row.position for row in rows), np.int32, len(rows)),
        block_tables=tables,
    )


class Lockstep:
    """The parts of the current step."""

    def __init__(self) -> None:
        self._num_begun = self._num_done = 0
        self._forward: StepForward | None = None

    def begin_step(self) -> None:
        """Forgets the step before."""
        self._num_begun = self._num_done = 0
        self._forward = None

    def run(self, part: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Computes a part, and counts it."""
        self._num_begun += 1
        result = part()
        self._num_done += 1
        return result

    def set_forward(self, forward: StepForward) -> None:
        """Keeps the backbone's output for the parts that follow."""
        self._forward = forward

    @property
    def has_begun(self) -> bool:
        """True if this rank has entered a collective of the step."""
        return self._num_begun > 0

    def complete(
        self, error: Exception, compute: Callable[[], StepForward], head: Callable[[torch.Tensor], object]
    ) -> None:
        """Computes what a failed step did not: the backbone, by `compute`, and calls of the head. Raises DeviceLost if
        the step failed inside a part, so that other ranks wait in a collective that this one left."""
        if self._num_begun != self._num_done:
            raise DeviceLost(f"a step failed between collectives, so the ranks are out of step: {error}") from error
        num_calls = max(0, self._num_done - 1)
        forward = compute() if self._forward is None else self._forward
        inputs: Iterable[torch.Tensor] = forward.head_inputs()
        for hidden in islice(inputs, num_calls, None):
            head(hidden)
