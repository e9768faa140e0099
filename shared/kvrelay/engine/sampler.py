"""Samples one token per row, vectorised over the rows of a step.

In order: penalties, logit_bias, min_tokens, temperature, min_p, top_k, top_p (of what is left), the draw. Steps that
are greedy and unadjusted take one argmax.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Lock

import numpy as np
import torch
from numpy.typing import NDArray

from kvrelay.engine.device import to_device
from kvrelay.engine.pending_logprobs import PendingLogprobs
from kvrelay.engine.pending_tokens import ExactSampling, PendingTokens, SampledOnDevice, SampledRows, SampledTokens
from kvrelay.engine.randoms import uniforms
from kvrelay.engine.sampler_state import Parameters, SamplerState
from kvrelay.engine.truncation import Limits, sample_from_all, sample_from_few
from kvrelay.protocol.sampling import Sampling, TokenLogprobs
from kvrelay.protocol.sequence_key import SequenceKey

Seen = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]
"""Tokens that came before, flat over all rows: the row, the token id, how often it came in the output."""

_WORTH_IT = 0.1  # of the draws: a step launched ahead wins about that part of a step


class Sampler:
    """Sampler state and draws. Not thread-safe; its owner locks, and gives the lock where others take it, too."""

    def __init__(
        self, vocab_size: int, eos_token_ids: Sequence[int], device: torch.device, lock: Lock | None = None
    ) -> None:
        """`lock` is held whenever a method is called, and those of pending draws: they let go of it while they wait."""
        self._device = device
        self._lock = lock
        self._state = SamplerState(vocab_size, eos_token_ids)
        self._sampled = SampledTokens(self._state, device, self.waiting)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The lock is free in here. On a GPU the wait for what is drawn is the wait for the whole step."""
        if self._lock is None:
            yield
            return
        self._lock.release()
        try:
            yield
        finally:
            self._lock.acquire()

    def __contains__(self, key: SequenceKey) -> bool:
        return key in self._state

    def add(self, key: SequenceKey, sampling: Sampling, token_ids: Sequence[int], num_prompt: int) -> None:
        """Makes a sequence known; `token_ids` from `num_prompt` on are output already. A known key keeps its state."""
        self._state.add(key, sampling, token_ids, num_prompt)

    def drop(self, key: SequenceKey) -> None:
        """Forgets a sequence; unknown keys are ignored."""
        self._state.drop(key)

    def last_sampled(self, keys: Sequence[SequenceKey]) -> NDArray[np.int64]:
        """The token drawn last for each key, `[keys]`, of the draws that have landed; 0 where there is none.

        Raises:
            KeyError: an unknown key.
        """
        last: NDArray[np.int64] = self._state.gather(keys)[1]["last"]
        return last

    def last_on_device(self, keys: Sequence[SequenceKey]) -> torch.Tensor:
        """The token that the draw begun last gave for each key, `[keys]` int64 on the device, without a wait.

        Draws that have landed count with the tokens that they landed with, those that were given up do not count; 0
        where none is left. A sequence that was dropped and added again begins anew. Not to be written to.

        Raises:
            KeyError: an unknown key.
        """
        return self._sampled.last(self._state.gather(keys)[1])

    @property
    def resamples_often(self) -> bool:
        """Whether steps that follow draws on the device have lately been in vain too often to be worth it.

        With flat distributions and a large top_p, draws look at too few tokens time and again, and what follows the
        token on the device must run once more, which takes as long as several steps win by being launched ahead.
        """
        return self._sampled.share_resampled > _WORTH_IT

    def sample(
        self, keys: Sequence[SequenceKey], positions: NDArray[np.int64], logits: torch.Tensor
    ) -> tuple[NDArray[np.int64], list[TokenLogprobs | None]]:
        """One token per row, drawn for `positions[row]` of its sequence and added to its history.

        `logits` is `[rows, vocab]` of any float type; keys are distinct. Returns token ids `[rows]`, and
        log-probabilities where asked for. What is dropped meanwhile gets a token, too, which is not remembered.

        Raises:
            BadLogits: rows whose logits are not finite.
            KeyError: an unknown key.
            RuntimeError: a draw for one of the keys is pending.
        """
        return self.begin(keys, positions, logits).land()

    def begin(self, keys: Sequence[SequenceKey], positions: NDArray[np.int64], logits: torch.Tensor) -> PendingTokens:
        """Asks the device for what `sample` gives, and waits for nothing.

        Raises:
            KeyError: an unknown key.
            RuntimeError: penalties would miss tokens of a draw that has not landed.
        """
        slots, parameters = self._state.gather(keys)
        if self._sampled.count_for(parameters):
            raise RuntimeError("penalties look at tokens of a draw that has not landed")
        if parameters["adjusted"].any() or parameters["temperature"].any():
            sampled = self._sample(slots, parameters, positions, logits)
        else:
            sampled = _most_likely(logits)
        logprobs = None
        if (parameters["logprobs"] >= 0).any():
            with self.waiting():  # a CPU computes them now
                logprobs = _ask_logprobs(parameters["logprobs"], logits, sampled)
        return PendingTokens(self._sampled, SampledRows(tuple(keys), slots, parameters), sampled, logprobs)

    def adjust(
        self, keys: Sequence[SequenceKey], positions: NDArray[np.int64], scores: torch.Tensor, seen: Seen
    ) -> None:
        """Applies penalties, biases and min_tokens to `scores`, `[rows, vocab]` float32, in place; draws nothing.

        Keys may repeat. `seen`: what the rows' penalties look at. Raises KeyError for an unknown key.
        """
        slots, parameters = self._state.gather(keys)
        if parameters["adjusted"].any():
            if len(seen[0]):
                self._penalise_seen(scores, parameters, seen)
            self._add_biases(scores, slots)
            self._forbid_ends(scores, slots, parameters, positions)

    def penalises(self, keys: Sequence[SequenceKey]) -> NDArray[np.bool_]:
        """By row, whether it has a penalty, `[rows]`. Raises KeyError for an unknown key."""
        _, parameters = self._state.gather(keys)
        penalised: NDArray[np.bool_] = (
            (parameters["presence"] != 0) | (parameters["frequency"] != 0) | (parameters["repetition"] != 1)
        )
        return penalised

    def _sample(
        self, slots: NDArray[np.int64], parameters: Parameters, positions: NDArray[np.int64], logits: torch.Tensor
    ) -> SampledOnDevice:
        # What is drawn from logits that are not finite is never used: that is seen when it lands.
        work = logits.to(torch.float32, copy=True)
        peaks = work.amax(dim=-1)
        self._penalise(work, parameters)
        self._add_biases(work, slots)
        self._forbid_ends(work, slots, parameters, positions)
        random = parameters["temperature"] > 0
        token_ids = torch.empty(len(slots), dtype=torch.int64, device=self._device)
        if not random.all():
            _put(token_ids, ~random, _some_rows(work, ~random).argmax(dim=-1))
        if not random.any():
            return SampledOnDevice(token_ids, peaks)
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
        """Relative to the most likely token's 1, at each row's temperature; `logits` is spoilt."""
        # The peak is subtracted first, so that a small temperature cannot overflow.
        logits.sub_(logits.amax(dim=-1, keepdim=True)).div_(self._column(parameters, "temperature")[:, None])
        return logits.exp_()

    def _limits(self, parameters: Parameters) -> Limits:
        return Limits(*(self._column(parameters, name) for name in ("min_p", "top_k", "top_p")))

    def _penalise(self, logits: torch.Tensor, parameters: Parameters) -> None:
        some = np.flatnonzero(parameters["counts"] >= 0)
        if len(some):
            which, token_ids, in_output = self._state.counts.seen(parameters["counts"][some])
            self._penalise_seen(logits, parameters, (some[which], token_ids, in_output))

    def _penalise_seen(self, logits: torch.Tensor, parameters: Parameters, seen: Seen) -> None:
        """Repetition scales seen tokens of prompt and output; presence and frequency subtract for output tokens."""
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
        """Before min_tokens, neither end-of-sequence nor stop tokens."""
        for row in np.flatnonzero(parameters["adjusted"] & (positions < parameters["min_length"])):
            # Not by an assignment: on a GPU, that would copy the number there, and wait for it.
            logits[int(row)].index_fill_(0, to_device(self._state.end_ids(int(slots[row])), self._device), -torch.inf)

    def _column(self, parameters: Parameters, name: str) -> torch.Tensor:
        return to_device(parameters[name].copy(), self._device)


def _some_rows(tensor: torch.Tensor, chosen: NDArray[np.bool_]) -> torch.Tensor:
    """The chosen rows; without a copy where all are."""
    if chosen.all():
        return tensor
    return tensor[to_device(np.flatnonzero(chosen), tensor.device)]


def _put(target: torch.Tensor, chosen: NDArray[np.bool_], values: torch.Tensor) -> None:
    """`target[chosen] = values`, without asking the device how many there are."""
    target.index_copy_(0, to_device(np.flatnonzero(chosen), target.device), values)


def _most_likely(logits: torch.Tensor) -> SampledOnDevice:
    logits = logits.float()  # torch is several times slower to find the best of 16-bit numbers
    best = logits.argmax(dim=-1)
    return SampledOnDevice(best, logits.gather(1, best[:, None])[:, 0])  # argmax finds a NaN before any number


def _ask_logprobs(num_top: NDArray[np.int64], logits: torch.Tensor, sampled: SampledOnDevice) -> PendingLogprobs:
    asked = num_top >= 0
    keep = sampled.exact is not None and bool(asked[sampled.exact.rows].any())
    return PendingLogprobs(_some_rows(logits, asked), _some_rows(sampled.token_ids, asked), num_top[asked], keep=keep)
