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

import numpy as np
import torch
from numpy.typing import NDArray

from kvrelay.engine.batch import RowsFailed, SequenceKey
from kvrelay.engine.device import HostCopy, to_device, to_host
from kvrelay.engine.logprobs import PendingLogprobs
from kvrelay.engine.sampler_state import Parameters, SamplerState
from kvrelay.engine.truncation import Limits, draw_from_more
from kvrelay.protocol.sampling import TokenLogprobs

_FORGETS = 0.05  # how much the last draw counts in `share_redrawn`


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
        return draw_from_more(self.weights[which], self.limits.of(which), self.uniforms[which])


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
        self.rows = rows
        self.token_ids = drawn.token_ids
        """`[rows]` int64 on the device, for ops that are asked for from now on. Not to be written to."""
        self.redrawn: NDArray[np.bool_] = np.zeros(len(rows.keys), np.bool_)
        """After `land`: rows whose token is not the one in `token_ids`. A step that followed one must run again."""
        self._draws = draws
        self._exact = drawn.exact
        self._logprobs = logprobs
        settled = () if drawn.settled is None else (drawn.settled,)
        self._copy: HostCopy | None = HostCopy(drawn.token_ids, drawn.peaks, *settled)
        draws.begun(self)

    def land(self) -> tuple[NDArray[np.int64], list[TokenLogprobs | None]]:
        """Waits for this draw alone; its tokens `[rows]` join the histories of those who are still known.

        Returns the tokens, and log-probabilities where asked for. If it fails, nothing is remembered.

        Raises:
            BadLogits: rows whose logits are not finite.
            RuntimeError: it has ended already, or an earlier draw of one of the sequences has not.
        """
        if self._copy is None:
            raise RuntimeError("this draw has landed, or was discarded")
        self._draws.check_first(self)
        copy, self._copy = self._copy, None
        try:
            with self._draws.waiting():
                token_ids, peaks, *settled = copy.read()
            check_finite(self.rows.keys, peaks)
            result = token_ids.astype(np.int64)
            if settled:
                self._draw_again(result, np.flatnonzero(settled[0] == 0))
            logprobs = self._read_logprobs(result)
        finally:
            self._draws.ended(self)
            self._exact = self._logprobs = None
        self._draws.remember(self.rows, result, changed=bool(self.redrawn.any()))
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
            self._draws.ended(self)
            self._exact = self._logprobs = None

    def _draw_again(self, token_ids: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
        if len(rows):
            assert self._exact is not None
            with self._draws.waiting(), torch.inference_mode():
                again = to_host(self._exact.draw(rows))[0].astype(np.int64)
            self.redrawn[rows] = again != token_ids[rows]
            token_ids[rows] = again

    def _read_logprobs(self, token_ids: NDArray[np.int64]) -> list[TokenLogprobs | None]:
        results: list[TokenLogprobs | None] = [None] * len(token_ids)
        if self._logprobs is not None:
            asked = np.flatnonzero(self.rows.parameters["logprobs"] >= 0)
            with self._draws.waiting(), torch.inference_mode():
                entries = self._logprobs.read(token_ids[asked], np.flatnonzero(self.redrawn[asked]))
            for row, entry in zip(asked.tolist(), entries, strict=True):
                results[row] = entry
        return results


class Draws:
    """The pending draws, and the token drawn last for a sequence, on the device or on the host.

    A sequence is known by its life, a number that nobody had before: its key or its slot may be another's by now.
    """

    def __init__(
        self, state: SamplerState, device: torch.device, waiting: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """`waiting` gives a context in which the sampler's lock is free."""
        self.waiting = waiting
        self._state = state
        self._device = device
        self._pending: list[PendingDraw] = []  # as they were begun
        self.share_redrawn = 0.0
        """Of the draws that landed lately, how many gave a token that was not the one on the device; 0 to 1."""

    def begun(self, draw: PendingDraw) -> None:
        """It is pending now."""
        self._pending.append(draw)

    def ended(self, draw: PendingDraw) -> None:
        """It is not pending any more."""
        self._pending.remove(draw)

    def check_first(self, draw: PendingDraw) -> None:
        """Raises RuntimeError if a draw that was begun earlier is pending for one of its sequences."""
        for earlier in self._pending[: self._pending.index(draw)]:
            if np.isin(earlier.rows.parameters["life"], draw.rows.parameters["life"]).any():
                raise RuntimeError("draws of a sequence must land in the order in which they were begun")

    def count_for(self, parameters: Parameters) -> bool:
        """Whether a draw is pending for one of these sequences that has penalties."""
        counted = parameters["life"][parameters["counts"] >= 0] if self._pending else ()
        return any(bool(np.isin(counted, draw.rows.parameters["life"]).any()) for draw in self._pending)

    def remember(self, rows: DrawnRows, token_ids: NDArray[np.int64], *, changed: bool) -> None:
        """These tokens `[rows]` were drawn, some of which were others on the device if they `changed`.

        What was dropped meanwhile is not remembered.
        """
        self.share_redrawn += _FORGETS * (changed - self.share_redrawn)
        stays = self._state.holds(rows.slots, rows.parameters["life"])
        self._state.set_last(rows.slots[stays], token_ids[stays])
        counts = rows.parameters["counts"]
        counted = stays & (counts >= 0)
        if counted.any():
            self._state.counts.append(counts[counted], token_ids[counted])

    def last(self, parameters: Parameters) -> torch.Tensor:
        """The tokens drawn last, `[rows]` int64 on the device, without a wait. Not to be written to."""
        lives = parameters["life"]
        if self._pending and np.array_equal(self._pending[-1].rows.parameters["life"], lives):
            return self._pending[-1].token_ids  # the rows of the step before, again
        # What the host knows and what each draw gave, one behind the other.
        parts, places, length = [to_device(parameters["last"].copy(), self._device)], np.arange(len(lives)), len(lives)
        for draw in self._pending:
            found, rows = _find(lives, draw.rows.parameters["life"])
            places[found] = length + rows
            parts.append(draw.token_ids)
            length += len(draw.token_ids)
        return torch.cat(parts).index_select(0, to_device(places, self._device)) if self._pending else parts[0]


def _find(wanted: NDArray[np.int64], among: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where in `wanted` something stands that is in `among`, and where it is there; `among` has nothing twice."""
    order = np.argsort(among)
    at = order[np.searchsorted(among, wanted, sorter=order).clip(max=len(among) - 1)]
    found = np.flatnonzero(among[at] == wanted)
    return found, at[found]
