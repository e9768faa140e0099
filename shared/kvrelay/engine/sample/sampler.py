"""Samples one token per row, vectorised over the rows of a step.

The order is penalties, logit_bias, min_tokens, grammars and limits of tokens, temperature, min_p, top_k, top_p (of what
is left), then sampling. Steps that are greedy and unadjusted take one argmax.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Lock

import numpy as np
import torch
from numpy.typing import NDArray

from kvrelay.engine.masks.apply import apply_masks, most_likely, to_weights
from kvrelay.engine.masks.token_masks import TokenMasks
from kvrelay.engine.run.device import to_device
from kvrelay.engine.sample.draft_rows import DraftRows
from kvrelay.engine.sample.logprobs import PendingLogprobs
from kvrelay.engine.sample.pending_tokens import (
    ExactSampling,
    PendingTokens,
    SampledOnDevice,
    SampledRows,
    SampledTokens,
)
from kvrelay.engine.sample.random_sampling import Limits, sample_from_all, sample_from_few, uniforms
from kvrelay.engine.sample.sampler_state import Parameters, SamplerState
from kvrelay.grammar.grammar_compiler import GrammarCompiler, GrammarError, TokenMask
from kvrelay.protocol.sampling import Sampling
from kvrelay.protocol.sequence_key import SequenceKey

Seen = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]
"""Earlier tokens, flat over all rows: the row, the token id, how often it occurred in the output."""

_WORTH_IT = 0.1  # share of batches: a step launched ahead gains about this share of a step
_LOG2_E = 1 / math.log(2)


class Sampler:
    """Sampler state and sampling. Not thread-safe: the owner locks and passes the lock."""

    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        device: torch.device,
        lock: Lock | None = None,
        make_compiler: Callable[[], GrammarCompiler] | None = None,
    ) -> None:
        """`lock` is held during every call of a method, and of a method of pending tokens. They release it while they
        wait. `make_compiler` makes the compiler of grammars at the first use; None: there is none.
        """
        self._device = device
        self._lock = lock
        self._state = SamplerState(vocab_size, eos_token_ids)
        self._masks = TokenMasks(make_compiler or _no_compiler, vocab_size, eos_token_ids, self.waiting)
        self._sampled = SampledTokens(self._state, device, self.waiting, self._masks)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Releases the lock. On a GPU, waiting for the tokens means waiting for the whole step."""
        if self._lock is None:
            yield
            return
        self._lock.release()
        try:
            yield
        finally:
            self._lock.acquire()

    def prepare_grammars(self) -> None:
        """Makes the compiler of grammars. Raises GrammarError."""
        self._masks.prepare()

    def __contains__(self, key: SequenceKey) -> bool:
        return key in self._state

    def add(self, key: SequenceKey, sampling: Sampling, token_ids: Sequence[int], num_prompt: int) -> None:
        """Adds a sequence. The `token_ids` from `num_prompt` on are output already. A known key keeps its state."""
        if key not in self._state:
            self._state.add(key, sampling, token_ids, num_prompt)
            self._masks.add(self._state.slot_of(key), sampling, token_ids[num_prompt:])

    def drop(self, key: SequenceKey) -> None:
        """Drops a sequence. Unknown keys are ignored."""
        slot = self._state.drop(key)
        if slot is not None:
            self._masks.drop(slot)

    def last_sampled(
        self, keys: Sequence[SequenceKey], positions: NDArray[np.int64] | None = None
    ) -> NDArray[np.int64]:
        """The newest landed token of each key, `[keys]`; 0 if there is none. With `positions`, `[keys]`: the token
        there, behind which a grammar may have forced others. Any token if the sequence has none there. Raises KeyError
        for an unknown key."""
        slots, parameters = self._state.gather(keys)
        if positions is not None:
            return self._sampled.landed(slots, parameters, positions)
        last: NDArray[np.int64] = parameters["last"]
        return last

    def num_landed_from(self, keys: Sequence[SequenceKey], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many landed tokens each sequence has at its position and behind it, `[keys]`: 0 if the token there is the
        next one, negative if one before it is missing. Raises KeyError for an unknown key."""
        num_tokens: NDArray[np.int64] = self._state.gather(keys)[1]["length"] - positions
        return num_tokens

    def last_on_device(self, keys: Sequence[SequenceKey], positions: NDArray[np.int64] | None = None) -> torch.Tensor:
        """The newest token of each key, or of each position, `[keys]` int64 on the device, without a wait. Read only.

        `positions` are as for `last_sampled`. Includes pending tokens and ignores discarded ones. A landed token has
        its final value. 0: the sequence has no token. A sequence that was dropped and added again starts without
        tokens. Raises KeyError for an unknown key.
        """
        slots, parameters = self._state.gather(keys)
        landed = parameters["last"].copy() if positions is None else self._sampled.landed(slots, parameters, positions)
        return self._sampled.last(parameters, landed)

    def begin_masks(self, key: SequenceKey, drafts: Sequence[int]) -> None:
        """Has the masks at the places of drafts computed, if the sequence has a grammar. Unknown keys are ignored."""
        if key in self._state:
            self._masks.draft(self._state.slot_of(key), drafts)

    @property
    def resamples_often(self) -> bool:
        """Whether steps that use tokens in device memory had to run again too often lately to be worth launching ahead.

        With flat distributions and a large top_p, sampling often looks at too few tokens. A step that used such a token
        must run again, which costs as much as launching several steps ahead gains.
        """
        return self._sampled.share_resampled > _WORTH_IT

    def begin(
        self,
        keys: Sequence[SequenceKey],
        positions: NDArray[np.int64],
        logits: torch.Tensor,
        jumps: NDArray[np.bool_] | None = None,
        drafts: DraftRows | None = None,
        *,
        may_overwrite: bool = False,
    ) -> PendingTokens:
        """Launches sampling of one token per row, for `positions[row]` of its sequence, and does not wait. The tokens
        join the histories when they land.

        `logits` is `[rows, vocab]` of any float type. A key may repeat, for consecutive positions in their order: all
        its rows are penalised for the tokens before the first of them. `jumps`, `[rows]`: the rows for which tokens
        that a grammar forces may follow the sampled one. `drafts`: the places of the rows. Each row of a sequence is
        sampled as if the drafts before it were in its history; only accepted ones join it. `may_overwrite`: the caller
        needs `logits` no longer.

        Raises:
            GrammarFailed: rows whose grammars cannot go on, or that no token is left to.
            KeyError: an unknown key.
            RuntimeError: penalties, grammars or bad words would miss tokens that have not landed.
        """
        slots, parameters = self._state.gather(keys)
        no_jumps = np.zeros(len(keys), np.bool_)
        rows = SampledRows(tuple(keys), slots, parameters, no_jumps if jumps is None else jumps, drafts)
        if rows.are_plain and (best := _most_likely(logits, {})) is not None:
            return PendingTokens(self._sampled, rows, best, None)
        if self._sampled.miss_tokens(parameters):
            raise RuntimeError("penalties, grammars or bad words would miss tokens that have not landed")
        asks_logprobs = bool(
            (parameters["logprobs"] >= 0).any()
        )  # log-probabilities are computed from unadjusted logits
        masks = self._masks.masks(keys, slots, self._ends_of_masked(slots, parameters, positions), drafts)
        sampled = None
        if not parameters["temperature"].any() and not self._adjusts(slots, parameters, positions):
            sampled = _most_likely(logits, masks)
        if sampled is None:
            work = logits.to(torch.float32, copy=asks_logprobs or not may_overwrite)
            sampled = self._sample(work, masks, slots, parameters, positions, drafts)
        logprobs = None
        if asks_logprobs:
            with self.waiting():  # a CPU computes them here
                logprobs = _ask_logprobs(parameters["logprobs"], logits, sampled, self._state.logprob_ids(slots))
        return PendingTokens(self._sampled, rows, sampled, logprobs)

    def adjust(
        self, keys: Sequence[SequenceKey], positions: NDArray[np.int64], scores: torch.Tensor, seen: Seen
    ) -> None:
        """Applies penalties, biases and min_tokens to `scores`, `[rows, vocab]` float32, in place. Does not sample.

        Keys may repeat. `seen`: the earlier tokens for the rows' penalties. Raises KeyError for an unknown key.
        """
        slots, parameters = self._state.gather(keys)
        if parameters["adjusted"].any():
            if len(seen[0]):
                self._penalise_seen(scores, parameters, seen)
            self._add_biases(scores, slots)
            self._forbid_ends(scores, slots, parameters, positions)

    def needs_landed(self, keys: Sequence[SequenceKey]) -> NDArray[np.bool_]:
        """Whether each row can only be sampled when all earlier tokens have landed, `[rows]`: with penalties, a grammar
        or bad words of several tokens. Raises KeyError for an unknown key."""
        _, parameters = self._state.gather(keys)
        follows: NDArray[np.bool_] = parameters["follows"]
        return follows | self._penalised(parameters)

    def can_sample_all(self, keys: Sequence[SequenceKey]) -> bool:
        """Returns whether all keys are known and no sequence has a grammar, so that none is late."""
        return self._masks.is_unused and self._state.has_all(keys)

    def late(self, keys: Sequence[SequenceKey], num_others: int) -> NDArray[np.bool_]:
        """The rows that cannot be sampled yet, `[rows]`, because the masks of their grammars are not ready. Waits a
        little for those, on which `begin` would wait long. `num_others`: rows that the step computes beside these.

        Raises KeyError for an unknown key.
        """
        return self._masks.late(self._state.gather(keys)[0], num_others)

    def penalises(self, keys: Sequence[SequenceKey]) -> NDArray[np.bool_]:
        """Whether each row has a penalty, `[rows]`. Raises KeyError for an unknown key."""
        return self._penalised(self._state.gather(keys)[1])

    def _penalised(self, parameters: Parameters) -> NDArray[np.bool_]:
        penalised: NDArray[np.bool_] = (
            (parameters["presence"] != 0) | (parameters["frequency"] != 0) | (parameters["repetition"] != 1)
        )
        return penalised

    def _adjusts(self, slots: NDArray[np.int64], parameters: Parameters, positions: NDArray[np.int64]) -> bool:
        """Returns whether anything but masks changes the logits of a row."""
        if not parameters["adjusted"].any():
            return False
        changes = (parameters["counts"] >= 0) | _early_without_masks(parameters, positions)
        return bool(changes.any() or self._state.biases(slots))

    def _sample(
        self,
        work: torch.Tensor,
        masks: dict[int, TokenMask],
        slots: NDArray[np.int64],
        parameters: Parameters,
        positions: NDArray[np.int64],
        drafts: DraftRows | None = None,
    ) -> SampledOnDevice:
        """Overwrites `work`, the logits in float32."""
        # Tokens sampled from logits that are not finite are never used: landing them raises.
        peaks = work.amax(dim=-1)
        self._penalise(work, parameters, drafts)
        self._add_biases(work, slots)
        self._forbid_ends(work, slots, parameters, positions)
        if masks:
            apply_masks(work, [*masks], [*masks.values()])
        random = parameters["temperature"] > 0
        if not random.any():
            return SampledOnDevice(_argmax(work), peaks)
        # Of all rows: a copy of those that are not random would take longer.
        token_ids = torch.empty_like(peaks, dtype=torch.int64) if random.all() else _argmax(work)
        weights = self._weights(_some_rows(work, random), parameters[random])
        numbers = uniforms(
            parameters["seed"][random], parameters["sequence_index"][random], positions[random].astype(np.uint64)
        )
        limited = (parameters["min_p"] > 0) | (parameters["top_k"] > 0) | (parameters["top_p"] < 1)
        if (rest := random & ~limited).any():
            sampled = sample_from_all(
                _some_rows(weights, ~limited[random]), to_device(numbers[~limited[random]], self._device)
            )
            _put(token_ids, rest, sampled)
        limited &= random
        if not limited.any():
            return SampledOnDevice(token_ids, peaks)
        exact = ExactSampling(
            np.flatnonzero(limited),
            _some_rows(weights, limited[random]),
            self._limits(parameters[limited]),
            to_device(numbers[limited[random]], self._device),
        )
        sampled, is_settled = sample_from_few(exact.weights, exact.limits, exact.uniforms)
        _put(token_ids, limited, sampled)
        settled = torch.ones(len(slots), dtype=torch.bool, device=self._device)
        _put(settled, limited, is_settled)
        return SampledOnDevice(token_ids, peaks, settled, exact)

    def _weights(self, logits: torch.Tensor, parameters: Parameters) -> torch.Tensor:
        """Weights relative to the most likely token's 1, at each row's temperature. Overwrites `logits`."""
        # The peak is subtracted first, so that a small temperature cannot overflow.
        scales = 1 / parameters["temperature"]
        if not to_weights(logits, scales.astype(np.float32)):
            # On a CPU torch's exp takes 7 to 40 times as long for minus infinity and for results near 0, exp2 does not.
            in_powers = to_device((_LOG2_E * scales).astype(np.float32), self._device)
            logits.sub_(logits.amax(dim=-1, keepdim=True)).mul_(in_powers[:, None]).exp2_()
        return logits

    def _limits(self, parameters: Parameters) -> Limits:
        return Limits(*(self._column(parameters, name) for name in ("min_p", "top_k", "top_p")))

    def _penalise(self, logits: torch.Tensor, parameters: Parameters, drafts: DraftRows | None) -> None:
        some = np.flatnonzero(parameters["counts"] >= 0)
        if len(some):
            which, token_ids, in_output = self._state.counts.seen(parameters["counts"][some])
            if drafts is not None:
                which, token_ids, in_output = _with_drafts(which, token_ids, in_output, *drafts.earlier(some))
            self._penalise_seen(logits, parameters, (some[which], token_ids, in_output))

    def _penalise_seen(self, logits: torch.Tensor, parameters: Parameters, seen: Seen) -> None:
        """Repetition scales all earlier tokens of prompt and output. Presence and frequency subtract for
        output tokens."""
        which, token_ids, in_output = seen
        where = (to_device(which, self._device), to_device(token_ids, self._device))
        repetition = to_device(parameters["repetition"][which], self._device)
        minus = parameters["frequency"][which] * in_output + parameters["presence"][which] * (in_output > 0)
        values = logits[where]
        values = torch.where(values > 0, values / repetition, values * repetition)
        logits[where] = values - to_device(minus.astype(np.float32), self._device)

    def _add_biases(self, logits: torch.Tensor, slots: NDArray[np.int64]) -> None:
        biases = self._state.biases(slots)
        if biases:
            ids = np.concatenate([bias.token_ids for _, bias in biases])
            rows = np.repeat([row for row, _ in biases], [len(bias.token_ids) for _, bias in biases])
            values = to_device(np.concatenate([bias.values for _, bias in biases]), self._device)
            logits[to_device(rows, self._device), to_device(ids, self._device)] += values

    def _forbid_ends(
        self, logits: torch.Tensor, slots: NDArray[np.int64], parameters: Parameters, positions: NDArray[np.int64]
    ) -> None:
        """Forbids end-of-sequence and stop tokens before min_tokens in rows without masks."""
        for row in np.flatnonzero(_early_without_masks(parameters, positions)):
            # An assignment would copy the number to the GPU and wait for the copy.
            logits[int(row)].index_fill_(0, to_device(self._state.end_ids(int(slots[row])), self._device), -torch.inf)

    def _ends_of_masked(
        self, slots: NDArray[np.int64], parameters: Parameters, positions: NDArray[np.int64]
    ) -> dict[int, NDArray[np.int64]]:
        """The end-of-sequence and stop tokens of the rows with masks that are before min_tokens."""
        early = np.flatnonzero(parameters["masked"] & (positions < parameters["min_length"]))
        return {row: self._state.end_ids(int(slots[row])) for row in early.tolist()}

    def _column(self, parameters: Parameters, name: str) -> torch.Tensor:
        return to_device(parameters[name].copy(), self._device)


def _early_without_masks(parameters: Parameters, positions: NDArray[np.int64]) -> NDArray[np.bool_]:
    """The rows before min_tokens whose end-of-sequence and stop tokens no mask forbids, `[rows]`."""
    early: NDArray[np.bool_] = parameters["adjusted"] & ~parameters["masked"] & (positions < parameters["min_length"])
    return early


def _with_drafts(
    which: NDArray[np.int64],
    token_ids: NDArray[np.int64],
    in_output: NDArray[np.int32],
    draft_rows: NDArray[np.int64],
    draft_ids: NDArray[np.int64],
) -> Seen:
    """Adds drafts to the tokens seen before each row, as if they were output."""
    rows, ids = np.concatenate([which, draft_rows]), np.concatenate([token_ids, draft_ids])
    counts = np.concatenate([in_output, np.ones(len(draft_ids), np.int32)])
    width = int(ids.max(initial=0)) + 1
    distinct, places = np.unique(rows * width + ids, return_inverse=True)
    return distinct // width, distinct % width, np.bincount(places, counts, len(distinct)).astype(np.int32)


def _no_compiler() -> GrammarCompiler:
    raise GrammarError("this model has no tokenizer to compile grammars for")


def _some_rows(tensor: torch.Tensor, chosen: NDArray[np.bool_]) -> torch.Tensor:
    """The chosen rows, without a copy if all rows are chosen."""
    if chosen.all():
        return tensor
    return tensor[to_device(np.flatnonzero(chosen), tensor.device)]


def _put(target: torch.Tensor, chosen: NDArray[np.bool_], values: torch.Tensor) -> None:
    """`target[chosen] = values`, without reading the number of rows back from the device."""
    target.index_copy_(0, to_device(np.flatnonzero(chosen), target.device), values)


def _most_likely(logits: torch.Tensor, masks: dict[int, TokenMask]) -> SampledOnDevice | None:
    """Greedy sampling in one pass over the logits. None if there are masks and the kernel cannot be used."""
    logits = logits.float()  # torch is several times slower at an argmax over 16-bit numbers
    found = most_likely(logits, masks)
    if found is not None:
        return SampledOnDevice(*found)
    if masks:
        return None
    best = _argmax(logits)
    return SampledOnDevice(best, logits.gather(1, best[:, None])[:, 0])  # argmax prefers a NaN to any number


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    if logits.device.type == "cpu":
        # numpy's argmax is vectorised, torch's is not: 0.14 ms and 0.69 ms for 32 rows of 32,000.
        return torch.from_numpy(logits.numpy().argmax(axis=1))
    return logits.argmax(dim=-1)


def _ask_logprobs(
    num_top: NDArray[np.int64],
    logits: torch.Tensor,
    sampled: SampledOnDevice,
    wanted_ids: Mapping[int, NDArray[np.int64]],
) -> PendingLogprobs:
    """`wanted_ids`, by row: in place of the most likely tokens."""
    asked = num_top >= 0
    keep = sampled.exact is not None and bool(asked[sampled.exact.rows].any())
    places = np.cumsum(asked) - 1
    wanted = {int(places[row]): token_ids for row, token_ids in wanted_ids.items() if asked[row]}
    token_ids = _some_rows(sampled.token_ids, asked)
    return PendingLogprobs(_some_rows(logits, asked), token_ids, num_top[asked], keep=keep, wanted_ids=wanted)
