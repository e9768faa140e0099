"""Draws that the device was asked for: what they gave is on the device at once, and on the host when they land.

1. Begun: the device computes, and a copy to the host lies behind that. Nobody has waited; a later step may be asked
   for, whose rows follow the tokens on the device.
2. Landed: the host has the tokens and remembers them. Rows that looked at too few tokens were drawn again.
3. Or given up (`discard`, or a land that failed): as if it had never been begun.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch
from numpy.typing import NDArray

from kvrelay.engine.batch import RowsFailed, SequenceKey
from kvrelay.engine.device import HostCopy, to_device, to_host
from kvrelay.engine.logprobs import PendingLogprobs
from kvrelay.engine.sampler_state import Parameters, SamplerState
from kvrelay.engine.truncation import Limits, draw_limited
from kvrelay.protocol.sampling import TokenLogprobs


class BadLogits(RowsFailed):
    """The model gave logits without a finite maximum (NaN or infinity) for the sequences in `keys`.

    Nothing was drawn or remembered: the step may be run again without them.
    """

    def __init__(self, keys: Sequence[SequenceKey]) -> None:
        super().__init__(f"the model's logits are not finite for {', '.join(map(str, keys))}", keys)


def check_finite(keys: Sequence[SequenceKey], peaks: NDArray[np.float64]) -> None:
    """Raises BadLogits for rows whose greatest logit, `[rows]`, is not finite."""
    finite = np.isfinite(peaks)
    if not finite.all():
        raise BadLogits([key for key, fine in zip(keys, finite.tolist(), strict=True) if not fine])


@dataclass(frozen=True, slots=True)
class DrawnRows:
    """Whose tokens a draw is about, and what the sampler knew of them when it was begun; all are `[rows]`."""

    keys: Sequence[SequenceKey]
    slots: NDArray[np.int64]
    parameters: Parameters


@dataclass(frozen=True, slots=True)
class ExactDraw:
    """What it takes to draw again for rows that may have looked at too few tokens.

    `rows`, ascending, are those of the draw; the tensors' first dimension is theirs. `weights` is `[rows, vocab]`
    float32, by far the most that a pending draw keeps.
    """

    rows: NDArray[np.int64]
    weights: torch.Tensor
    limits: Limits
    uniforms: torch.Tensor

    def draw(self, rows: NDArray[np.int64]) -> torch.Tensor:
        """Token ids of some of the rows."""
        which = to_device(np.searchsorted(self.rows, rows), self.weights.device)
        return draw_limited(self.weights[which], self.limits.of(which), self.uniforms[which])


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a device was asked for, `[rows]`; the values come later."""

    token_ids: torch.Tensor  # int64
    peaks: torch.Tensor  # the greatest logits, as the model gave them
    settled: torch.Tensor | None = None  # bool: false where more tokens must be looked at than were; None: all are
    exact: ExactDraw | None = None  # has the rows that may not be settled


class PendingDraw:
    """A draw that was begun; it is to be landed or discarded, either with the sampler's lock.

    Until then it keeps on the device the token ids, and `[rows, vocab]` float32 for rows with top_p, top_k or min_p
    alone: they may have to be drawn again. Where such a row also asks for log-probabilities, those of the whole
    vocabulary stay for all rows that ask.
    """

    def __init__(self, draws: Draws, rows: DrawnRows, drawn: Drawn, logprobs: PendingLogprobs | None) -> None:
        self.token_ids = drawn.token_ids
        """`[rows]` int64 on the device, for ops that are asked for from now on. Not to be written to."""
        self.redrawn: NDArray[np.bool_] = np.zeros(len(rows.keys), np.bool_)
        """After `land`: rows whose token is not the one in `token_ids`. A step that followed one must run again."""
        self._draws = draws
        self._rows = rows
        self._exact = drawn.exact
        self._logprobs = logprobs
        settled = () if drawn.settled is None else (drawn.settled,)
        self._copy: HostCopy | None = HostCopy(drawn.token_ids, drawn.peaks, *settled)
        self._number, self._before = draws.enter(rows, drawn.token_ids)

    @torch.inference_mode()
    def land(self) -> tuple[NDArray[np.int64], list[TokenLogprobs | None]]:
        """Waits for this draw alone; its tokens `[rows]` join the histories of those who are still known.

        Returns the tokens, and log-probabilities where asked for. If it fails, nothing is remembered.

        Raises:
            BadLogits: rows whose logits are not finite.
            RuntimeError: it has ended already, or an earlier draw of one of the sequences has not.
        """
        if self._copy is None:
            raise RuntimeError("this draw has landed, or was discarded")
        self._draws.check_first(self._before[0])
        copy, self._copy = self._copy, None
        remembered = False
        try:
            with self._draws.waiting():
                token_ids, peaks, *settled = copy.read()
            check_finite(self._rows.keys, peaks)
            result = token_ids.astype(np.int64)
            if settled:
                self._draw_again(result, np.flatnonzero(settled[0] == 0))
            logprobs = self._read_logprobs(result)
            self._draws.remember(self._number, self._rows, result)
            remembered = True
        finally:
            if not remembered:
                self._draws.forget(self._number, self._rows, self._before)
            self._exact = self._logprobs = None
        return result, logprobs

    def discard(self) -> None:
        """Waits for this draw, of which nothing is remembered. Fine for one that has landed or failed."""
        copy, self._copy = self._copy, None
        if copy is None:
            return
        try:
            with self._draws.waiting():
                copy.wait()
        finally:
            self._draws.forget(self._number, self._rows, self._before)
            self._exact = self._logprobs = None

    def _draw_again(self, token_ids: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
        if len(rows):
            assert self._exact is not None
            with self._draws.waiting():
                again = to_host(self._exact.draw(rows))[0].astype(np.int64)
            self.redrawn[rows] = again != token_ids[rows]
            token_ids[rows] = again

    def _read_logprobs(self, token_ids: NDArray[np.int64]) -> list[TokenLogprobs | None]:
        results: list[TokenLogprobs | None] = [None] * len(token_ids)
        if self._logprobs is not None:
            asked = np.flatnonzero(self._rows.parameters["logprobs"] >= 0)
            with self._draws.waiting():
                entries = self._logprobs.read(token_ids[asked], np.flatnonzero(self.redrawn[asked]))
            for row, entry in zip(asked.tolist(), entries, strict=True):
                results[row] = entry
        return results


class Draws:
    """Which draws are pending, and by sequence which of them was begun last."""

    def __init__(
        self, state: SamplerState, device: torch.device, waiting: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """`waiting` gives a context in which the sampler's lock is free."""
        self.waiting = waiting
        self._state = state
        self._device = device
        self._numbers = count(1)
        self._token_ids: dict[int, torch.Tensor] = {}  # of the pending ones, by number

    def enter(
        self, rows: DrawnRows, token_ids: torch.Tensor
    ) -> tuple[int, tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """A number for a draw that begins, and which draw of each row was the last one before it (see `forget`)."""
        number = next(self._numbers)
        before = self._state.draws(rows.slots)
        stays = self._state.holds(rows.slots, rows.parameters["life"])
        self._state.set_draws(rows.slots[stays], number, np.flatnonzero(stays))
        self._token_ids[number] = token_ids
        return number, before

    def check_first(self, before: NDArray[np.int64]) -> None:
        """Raises RuntimeError if one of these draws is pending, beside the one that asks."""
        if len(self._token_ids) > 1 and not self._token_ids.keys().isdisjoint(before.tolist()):
            raise RuntimeError("draws of a sequence must land in the order in which they were begun")

    def remember(self, number: int, rows: DrawnRows, token_ids: NDArray[np.int64]) -> None:
        """The draw landed. What was dropped meanwhile is not remembered, whoever has its key or its slot now."""
        del self._token_ids[number]
        stays = self._state.holds(rows.slots, rows.parameters["life"])
        self._state.set_last(rows.slots[stays], token_ids[stays])
        counts = rows.parameters["counts"]
        counted = stays & (counts >= 0)
        if counted.any():
            self._state.counts.append(counts[counted], token_ids[counted])
        ends = rows.slots[stays & (self._state.draws(rows.slots)[0] == number)]
        self._state.set_draws(ends, 0, 0)

    def forget(self, number: int, rows: DrawnRows, before: tuple[NDArray[np.int64], NDArray[np.int64]]) -> None:
        """The draw was given up: the last one of its rows is again the one before it, or what the host knows."""
        del self._token_ids[number]
        ends = self._state.holds(rows.slots, rows.parameters["life"]) & (self._state.draws(rows.slots)[0] == number)
        draws, places = before
        pending = np.isin(draws, list(self._token_ids))
        self._state.set_draws(rows.slots[ends], np.where(pending, draws, 0)[ends], places[ends])

    def last(self, parameters: Parameters) -> torch.Tensor:
        """The tokens drawn last, `[rows]` int64 on the device, without a wait. Not to be written to."""
        draws, places = parameters["draw"], parameters["draw_row"]
        numbers = np.unique(draws).tolist()
        if numbers == [0]:
            return to_device(parameters["last"].copy(), self._device)
        if len(numbers) == 1:
            sources = self._token_ids[numbers[0]]
            if np.array_equal(places, np.arange(len(sources))):
                return sources  # the rows of the step before, again
        else:
            # What the host knows and what each of the draws gave, one behind the other.
            places, parts, length = places.copy(), [], 0
            for number in numbers:
                its = draws == number
                if number:
                    part = self._token_ids[number]
                else:
                    part, places[its] = to_device(parameters["last"][its], self._device), np.arange(its.sum())
                places[its] += length
                length += len(part)
                parts.append(part)
            sources = torch.cat(parts)
        return sources.index_select(0, to_device(places.copy(), self._device))
