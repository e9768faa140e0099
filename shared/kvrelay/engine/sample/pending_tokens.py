"""Tokens that were launched on the device and may not be on the host yet.

1. LAUNCHED   The device samples, and a copy to the host is queued behind. The host has not waited. A later step may be
              launched whose rows take these tokens from device memory.
2. LANDED     The host has the tokens and has recorded them. Rows for which sampling looked at too few tokens were
              sampled again.
3. DISCARDED  By `discard`, or by a `land` that failed. Nothing is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kvrelay.engine.masks.token_masks import TokenMasks
from kvrelay.engine.run.device import HostCopy, to_device, to_host
from kvrelay.engine.sample.draft_rows import DraftRows
from kvrelay.engine.sample.logprobs import PendingLogprobs, check_finite
from kvrelay.engine.sample.random_sampling import Limits, sample_from_more
from kvrelay.engine.sample.sampler_state import Parameters, SamplerState
from kvrelay.protocol.sampling import TokenLogprobs
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.step.batch import GrammarWork

_NEWEST_WEIGHT = 0.05  # weight of the newest step in the moving average `share_resampled`


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The sequences for which tokens are sampled, and their sampler parameters at the launch. All fields
    are `[rows]`."""

    keys: Sequence[SequenceKey]
    slots: NDArray[np.int64]
    parameters: Parameters
    jumps: NDArray[np.bool_]  # tokens that a grammar forces behind the sampled one may join the output with it
    drafts: DraftRows | None = None  # None: no row has drafts, so each sequence has one row

    @property
    def are_plain(self) -> bool:
        """Whether all rows are greedy, with neither adjusted logits nor log-probabilities."""
        return bool(self.parameters["plain"].all())


@dataclass(frozen=True, slots=True)
class ExactSampling:
    """The inputs for sampling again, for rows that may have looked at too few tokens.

    `rows`, ascending, are row numbers of the batch; they are the first dimension of the tensors. `weights`, `[rows,
    vocab]` float32, is by far the largest part of a pending result.
    """

    rows: NDArray[np.int64]
    weights: torch.Tensor
    limits: Limits
    uniforms: torch.Tensor

    def sample(self, rows: NDArray[np.int64]) -> torch.Tensor:
        """Returns token ids of some of the rows."""
        which = to_device(np.searchsorted(self.rows, rows), self.weights.device)
        return sample_from_more(self.weights[which], self.limits.of(which), self.uniforms[which])


@dataclass(frozen=True, slots=True)
class SampledOnDevice:
    """The tensors that a launch of the sampler returns, `[rows]`. Their values come later."""

    token_ids: torch.Tensor  # int64
    peaks: torch.Tensor  # the greatest logits, as the model gave them
    settled: torch.Tensor | None = None  # bool: False if sampling must look at more tokens; None: all are settled
    exact: ExactSampling | None = None  # exact sampling of rows that may not be settled


class PendingTokens:
    """Tokens that were launched. Exactly one of `land` and `discard` ends them, with the sampler's lock held.

    Until then it keeps the token ids on the device, and `[rows, vocab]` float32 for the rows with top_p, top_k or
    min_p, because those may have to be sampled again. If such a row also asks for log-probabilities, it keeps those of
    the whole vocabulary for all rows that ask.
    """

    def __init__(
        self, owner: SampledTokens, rows: SampledRows, sampled: SampledOnDevice, logprobs: PendingLogprobs | None
    ) -> None:
        self.rows = rows
        self.token_ids = sampled.token_ids
        """`[rows]` int64 on the device, for work that is launched from now on. Read only."""
        self.resampled: NDArray[np.bool_] = np.zeros(len(rows.keys), np.bool_)
        """After `land`: the rows whose token differs from `token_ids`. A step that used one of those must run again."""
        self.accepted: NDArray[np.bool_] | None = None
        """After `land`, `[rows]`: whether the row's token joined the output. None: all did. Others lie behind rejected
        drafts."""
        self.forced: dict[int, list[int]] = {}
        """After `land`, by row: the tokens that grammars force behind the sampled ones, also in the histories."""
        self.grammar_work: GrammarWork | None = None
        """After `land`: the work for grammars since a batch landed last; None without any."""
        self._owner = owner
        self._exact = sampled.exact
        self._logprobs = logprobs
        settled = () if sampled.settled is None else (sampled.settled,)
        self._copy: HostCopy | None = HostCopy(sampled.token_ids, sampled.peaks, *settled)
        owner.started(self)

    def check(self) -> None:
        """Waits for these tokens alone. Raises BadLogits, as `land` would, and records nothing."""
        assert self._copy is not None
        with self._owner.waiting():
            _, peaks, *_ = self._copy.read()
        self._check_finite(peaks)

    def _check_finite(self, peaks: NDArray[np.float64]) -> None:
        # Behind a draft, logits that are not finite only end the run: the draft may be wrong.
        drafts = self.rows.drafts
        check_finite(self.rows.keys, peaks if drafts is None else np.where(drafts.depths > 0, 0, peaks))

    def land(self) -> tuple[NDArray[np.int64], list[TokenLogprobs | None]]:
        """Waits for these tokens alone, and appends them `[rows]` to the histories of the sequences that are still
        known, without those behind rejected drafts.

        Returns the tokens, and log-probabilities for the rows that ask for them. If it fails, nothing is recorded.

        Raises:
            BadLogits: rows whose logits are not finite.
            RuntimeError: it has ended already, or earlier tokens of one of the sequences have not landed.
        """
        if self._copy is None:
            raise RuntimeError("these tokens have landed already, or were discarded")
        self._owner.check_first(self)
        copy, self._copy = self._copy, None
        try:
            with self._owner.waiting():
                token_ids, peaks, *settled = copy.read()
            result, drafts = token_ids.astype(np.int64), self.rows.drafts
            self._check_finite(peaks)
            if settled:
                self._resample(result, np.flatnonzero((settled[0] == 0) & np.isfinite(peaks)))
            if drafts is not None:
                self.accepted = drafts.accepted(result, np.isfinite(peaks))
            logprobs = self._read_logprobs(result)
        finally:
            self._owner.ended(self)
            self._exact = self._logprobs = None
        self.forced = self._owner.remember(
            self.rows, result, changed=bool(self.resampled.any()), accepted=self.accepted
        )
        self.grammar_work = self._owner.take_grammar_work()
        return result, logprobs

    def discard(self) -> None:
        """Waits for these tokens and drops them. Does nothing after `land` or a failure."""
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
    """The pending tokens, and each sequence's newest token, on the device or on the host.

    A sequence is identified by its life, a number that is never reused, because its key or its slot may belong to
    another sequence by now.
    """

    def __init__(
        self,
        state: SamplerState,
        device: torch.device,
        waiting: Callable[[], AbstractContextManager[None]],
        masks: TokenMasks,
    ) -> None:
        """`waiting` returns a context in which the sampler's lock is released."""
        self.waiting = waiting
        self._state = state
        self._masks = masks
        self._device = device
        self._pending: list[PendingTokens] = []  # ordered by launch
        self._runs: dict[int, tuple[int, list[int]]] = {}
        """By slot: the life of its sequence, and the tokens that joined last, if a grammar forced some of them."""
        self.share_resampled = 0.0
        """Moving average, 0 to 1, of the landed batches in which a token differed from the one on the device."""

    def started(self, pending: PendingTokens) -> None:
        """Adds a launched batch of tokens."""
        self._pending.append(pending)

    def ended(self, pending: PendingTokens) -> None:
        """Removes a batch that landed or was discarded."""
        self._pending.remove(pending)

    def check_first(self, pending: PendingTokens) -> None:
        """Raises RuntimeError if tokens launched earlier are pending for one of its sequences."""
        for earlier in self._pending[: self._pending.index(pending)]:
            if np.isin(earlier.rows.parameters["life"], pending.rows.parameters["life"]).any():
                raise RuntimeError("tokens of a sequence must land in the order in which they were launched")

    def miss_tokens(self, parameters: Parameters) -> bool:
        """Returns whether tokens are pending for one of these sequences that has penalties, a grammar or bad words."""
        counted = parameters["life"][(parameters["counts"] >= 0) | parameters["follows"]] if self._pending else ()
        return any(bool(np.isin(counted, pending.rows.parameters["life"]).any()) for pending in self._pending)

    def remember(
        self,
        rows: SampledRows,
        token_ids: NDArray[np.int64],
        *,
        changed: bool,
        accepted: NDArray[np.bool_] | None = None,
    ) -> dict[int, list[int]]:
        """Records the tokens `[rows]`, and those that grammars force behind them, which it returns by the last row of
        their sequence. `changed`: some of `token_ids` differ from those on the device. `accepted`: the rows whose
        tokens join the output; None: all.

        A sequence with several new tokens has a row for each, in their order. Sequences that were dropped meanwhile are
        left out.
        """
        self.share_resampled += _NEWEST_WEIGHT * (changed - self.share_resampled)
        stays = self._state.holds(rows.slots, rows.parameters["life"])
        if accepted is None and rows.are_plain and stays.all():  # nothing but the newest token is recorded of these
            self._state.append(rows.slots, token_ids)
            return {}
        if accepted is not None:
            stays &= accepted
        self._append(rows, np.flatnonzero(stays), token_ids[stays])
        constrained = np.flatnonzero(stays & rows.parameters["follows"])
        if not len(constrained):
            return {}
        runs = self._masks.accept(rows.slots[constrained], token_ids[constrained], rows.jumps[constrained])
        forced = {int(constrained[at]): run for at, run in runs.items()}
        if self._runs:
            for slot in rows.slots[constrained].tolist():
                self._runs.pop(slot, None)
        if forced:
            for row, run in forced.items():
                life = int(rows.parameters["life"][row])
                self._runs[int(rows.slots[row])] = life, [int(token_ids[row]), *run]
            token_ids = np.array([token for run in forced.values() for token in run], np.int64)
            which = np.repeat(np.array(list(forced), np.int64), [len(run) for run in forced.values()])
            stays = self._state.holds(rows.slots[which], rows.parameters["life"][which])
            self._append(rows, which[stays], token_ids[stays])
        return forced

    def take_grammar_work(self) -> GrammarWork | None:
        """Returns the grammar counters (masks, compilations, forced tokens) since the last call, None if all are 0."""
        return self._masks.take_work()

    def _append(self, rows: SampledRows, which: NDArray[np.int64], token_ids: NDArray[np.int64]) -> None:
        """Appends `token_ids[i]` to the sequence of row `which[i]`."""
        self._state.append(rows.slots[which], token_ids)
        counts = rows.parameters["counts"][which]
        if (counted := counts >= 0).any():
            self._state.counts.append(counts[counted], token_ids[counted])

    def landed(
        self, slots: NDArray[np.int64], parameters: Parameters, positions: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """The token at each position, `[rows]`, which is the sequence's newest one, or the one before tokens that a
        grammar forced behind it. Any token for a position that the sequence has not reached."""
        token_ids: NDArray[np.int64] = parameters["last"].copy()
        if self._runs:
            num_behind = (parameters["length"] - positions - 1).tolist()
            for row, (slot, count) in enumerate(zip(slots.tolist(), num_behind, strict=True)):
                life, run = self._runs.get(slot, (0, []))
                if 0 < count < len(run) and life == parameters["life"][row]:
                    token_ids[row] = run[-1 - count]
        return token_ids

    def last(self, parameters: Parameters, landed: NDArray[np.int64]) -> torch.Tensor:
        """The newest tokens, `[rows]` int64 on the device, without a wait. Read only. `landed`, `[rows]`: those on the
        host."""
        lives = parameters["life"]
        if self._pending and np.array_equal(self._pending[-1].rows.parameters["life"], lives):
            return self._pending[-1].token_ids  # the same rows as in the previous step
        # Concatenate the host's tokens and those of each pending batch, then pick each row's newest.
        parts, places, length = [to_device(landed, self._device)], np.arange(len(lives)), len(lives)
        for pending in self._pending:
            found, rows = _find(lives, pending.rows.parameters["life"])
            places[found] = length + rows
            parts.append(pending.token_ids)
            length += len(pending.token_ids)
        return torch.cat(parts).index_select(0, to_device(places, self._device)) if self._pending else parts[0]


def _find(wanted: NDArray[np.int64], among: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Indices of elements of `wanted` that occur in `among`, and the index of the last one of each there."""
    order = np.argsort(among, kind="stable")
    at = order[(np.searchsorted(among, wanted, side="right", sorter=order) - 1).clip(min=0)]
    found = np.flatnonzero(among[at] == wanted)
    return found, at[found]
