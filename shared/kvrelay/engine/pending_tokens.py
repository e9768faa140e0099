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

from kvrelay.engine.batch import RowsFailed
from kvrelay.engine.device import HostCopy, to_device, to_host
from kvrelay.engine.pending_logprobs import PendingLogprobs
from kvrelay.engine.sampler_state import Parameters, SamplerState
from kvrelay.engine.truncation import Limits, sample_from_more
from kvrelay.protocol.sampling import TokenLogprobs
from kvrelay.protocol.sequence_key import SequenceKey

_NEWEST_WEIGHT = 0.05  # weight of the newest step in the moving average `share_resampled`


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
class SampledRows:
    """Whose tokens a draw is about, and what the sampler knew of them when it was begun; all are `[rows]`."""

    keys: Sequence[SequenceKey]
    slots: NDArray[np.int64]
    parameters: Parameters


@dataclass(frozen=True, slots=True)
class ExactSampling:
    """What it takes to draw again for rows that may have looked at too few tokens.

    `rows`, ascending, are those of the draw; the tensors' first dimension is theirs. `weights` is `[rows, vocab]`
    float32, by far the most that a pending draw keeps.
    """

    rows: NDArray[np.int64]
    weights: torch.Tensor
    limits: Limits
    uniforms: torch.Tensor

    def sample(self, rows: NDArray[np.int64]) -> torch.Tensor:
        """Token ids of some of the rows."""
        which = to_device(np.searchsorted(self.rows, rows), self.weights.device)
        return sample_from_more(self.weights[which], self.limits.of(which), self.uniforms[which])


@dataclass(frozen=True, slots=True)
class SampledOnDevice:
    """What a device was asked for, `[rows]`; the values come later."""

    token_ids: torch.Tensor  # int64
    peaks: torch.Tensor  # the greatest logits, as the model gave them
    settled: torch.Tensor | None = None  # bool: false where more tokens must be looked at than were; None: all are
    exact: ExactSampling | None = None  # has the rows that may not be settled


class PendingTokens:
    """A draw that was begun; it is to be landed or discarded, either with the sampler's lock.

    Until then it keeps on the device the token ids, and `[rows, vocab]` float32 for rows with top_p, top_k or min_p
    alone: they may have to be drawn again. Where such a row also asks for log-probabilities, those of the whole
    vocabulary stay for all rows that ask.
    """

    def __init__(
        self, owner: SampledTokens, rows: SampledRows, sampled: SampledOnDevice, logprobs: PendingLogprobs | None
    ) -> None:
        self.rows = rows
        self.token_ids = sampled.token_ids
        """`[rows]` int64 on the device, for ops that are asked for from now on. Not to be written to."""
        self.resampled: NDArray[np.bool_] = np.zeros(len(rows.keys), np.bool_)
        """After `land`: rows whose token is not the one in `token_ids`. A step that followed one must run again."""
        self._owner = owner
        self._exact = sampled.exact
        self._logprobs = logprobs
        settled = () if sampled.settled is None else (sampled.settled,)
        self._copy: HostCopy | None = HostCopy(sampled.token_ids, sampled.peaks, *settled)
        owner.begun(self)

    def land(self) -> tuple[NDArray[np.int64], list[TokenLogprobs | None]]:
        """Waits for this draw alone; its tokens `[rows]` join the histories of those who are still known.

        Returns the tokens, and log-probabilities where asked for. If it fails, nothing is remembered.

        Raises:
            BadLogits: rows whose logits are not finite.
            RuntimeError: it has ended already, or an earlier draw of one of the sequences has not.
        """
        if self._copy is None:
            raise RuntimeError("this draw has landed, or was discarded")
        self._owner.check_first(self)
        copy, self._copy = self._copy, None
        try:
            with self._owner.waiting():
                token_ids, peaks, *settled = copy.read()
            check_finite(self.rows.keys, peaks)
            result = token_ids.astype(np.int64)
            if settled:
                self._resample(result, np.flatnonzero(settled[0] == 0))
            logprobs = self._read_logprobs(result)
        finally:
            self._owner.ended(self)
            self._exact = self._logprobs = None
        self._owner.remember(self.rows, result, changed=bool(self.resampled.any()))
        return result, logprobs

    def discard(self) -> None:
        """Waits for this draw, of which nothing is remembered. Fine for one that has landed or failed."""
        copy, self._copy = self._copy, None
        if copy is None:
            return
        try:
            with self._owner.waiting():
                copy.wait()
        finally:
            self._owner.ended(self)
            self._exact = self._logprobs = None

    def _resample(self, token_ids: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
        if len(rows):
            assert self._exact is not None
            with self._owner.waiting(), torch.inference_mode():
                again = to_host(self._exact.sample(rows))[0].astype(np.int64)
            self.resampled[rows] = again != token_ids[rows]
            token_ids[rows] = again

    def _read_logprobs(self, token_ids: NDArray[np.int64]) -> list[TokenLogprobs | None]:
        results: list[TokenLogprobs | None] = [None] * len(token_ids)
        if self._logprobs is not None:
            asked = np.flatnonzero(self.rows.parameters["logprobs"] >= 0)
            with self._owner.waiting(), torch.inference_mode():
                entries = self._logprobs.read(token_ids[asked], np.flatnonzero(self.resampled[asked]))
            for row, entry in zip(asked.tolist(), entries, strict=True):
                results[row] = entry
        return results


class SampledTokens:
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
        self._pending: list[PendingTokens] = []  # as they were begun
        self.share_resampled = 0.0
        """Of the draws that landed lately, how many gave a token that was not the one on the device; 0 to 1."""

    def begun(self, pending: PendingTokens) -> None:
        """It is pending now."""
        self._pending.append(pending)

    def ended(self, pending: PendingTokens) -> None:
        """It is not pending any more."""
        self._pending.remove(pending)

    def check_first(self, pending: PendingTokens) -> None:
        """Raises RuntimeError if a draw that was begun earlier is pending for one of its sequences."""
        for earlier in self._pending[: self._pending.index(pending)]:
            if np.isin(earlier.rows.parameters["life"], pending.rows.parameters["life"]).any():
                raise RuntimeError("draws of a sequence must land in the order in which they were begun")

    def count_for(self, parameters: Parameters) -> bool:
        """Whether a draw is pending for one of these sequences that has penalties."""
        counted = parameters["life"][parameters["counts"] >= 0] if self._pending else ()
        return any(bool(np.isin(counted, pending.rows.parameters["life"]).any()) for pending in self._pending)

    def remember(self, rows: SampledRows, token_ids: NDArray[np.int64], *, changed: bool) -> None:
        """These tokens `[rows]` were drawn, some of which were others on the device if they `changed`.

        What was dropped meanwhile is not remembered.
        """
        self.share_resampled += _NEWEST_WEIGHT * (changed - self.share_resampled)
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
        for pending in self._pending:
            found, rows = _find(lives, pending.rows.parameters["life"])
            places[found] = length + rows
            parts.append(pending.token_ids)
            length += len(pending.token_ids)
        return torch.cat(parts).index_select(0, to_device(places, self._device)) if self._pending else parts[0]


def _find(wanted: NDArray[np.int64], among: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where in `wanted` something stands that is in `among`, and where it is there; `among` has nothing twice."""
    order = np.argsort(among)
    at = order[np.searchsorted(among, wanted, sorter=order).clip(max=len(among) - 1)]
    found = np.flatnonzero(among[at] == wanted)
    return found, at[found]
