"""Draws one token per row, vectorised over the rows of a step.

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

from kvrelay.engine.batch import RowsFailed, SequenceKey
from kvrelay.engine.device import to_device, to_host
from kvrelay.engine.logprobs import token_logprobs
from kvrelay.engine.randoms import uniforms
from kvrelay.engine.sampler_state import SamplerState
from kvrelay.engine.truncation import Limits, draw, draw_from_few, draw_limited
from kvrelay.protocol.sampling import Sampling, TokenLogprobs

Parameters = np.ndarray[tuple[int], np.dtype[np.void]]

Seen = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]
"""Tokens that came before, flat over all rows: the row, the token id, how often it came in the output."""


class BadLogits(RowsFailed):
    """The model gave logits without a finite maximum (NaN or infinity) for the sequences in `keys`.

    Nothing was drawn or remembered: the step may be run again without them.
    """

    def __init__(self, keys: Sequence[SequenceKey]) -> None:
        super().__init__(f"the model's logits are not finite for {', '.join(map(str, keys))}", keys)


class Sampler:
    """Sampler state and draws. Not thread-safe; its owner locks, and gives the lock where others take it, too."""

    def __init__(
        self, vocab_size: int, eos_token_ids: Sequence[int], device: torch.device, lock: Lock | None = None
    ) -> None:
        """`lock` is held whenever a method is called; `sample` lets go of it while it waits for the device."""
        self._device = device
        self._lock = lock
        self._state = SamplerState(vocab_size, eos_token_ids)

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

    def last_drawn(self, keys: Sequence[SequenceKey]) -> NDArray[np.int64]:
        """The token that `sample` drew last for each key, `[keys]`.

        Raises:
            KeyError: an unknown key.
        """
        return self._state.last(keys)

    def sample(
        self, keys: Sequence[SequenceKey], positions: NDArray[np.int64], logits: torch.Tensor
    ) -> tuple[NDArray[np.int64], list[TokenLogprobs | None]]:
        """One token per row, drawn for `positions[row]` of its sequence and added to its history.

        `logits` is `[rows, vocab]` of any float type; keys are distinct. Returns token ids `[rows]`, and
        log-probabilities where asked for. What is dropped meanwhile gets a token, too, which is not remembered.

        Raises:
            BadLogits: rows whose logits are not finite.
            KeyError: an unknown key.
        """
        slots, parameters = self._state.gather(keys)
        if parameters["adjusted"].any() or parameters["temperature"].any():
            token_ids = self._draw(keys, slots, parameters, positions, logits)
        else:
            token_ids = self._most_likely(keys, logits)
        stays = self._state.holds(keys, slots)
        self._state.set_last(slots[stays], token_ids[stays])
        counts = parameters["counts"]
        counted = stays & (counts >= 0)
        if counted.any():
            self._state.counts.append(counts[counted], token_ids[counted])
        if (parameters["logprobs"] < 0).all():
            return token_ids, [None] * len(keys)
        with self.waiting():
            return token_ids, _logprobs(parameters["logprobs"], logits, token_ids)

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

    def _most_likely(self, keys: Sequence[SequenceKey], logits: torch.Tensor) -> NDArray[np.int64]:
        logits = logits.float()  # torch is several times slower to find the best of 16-bit numbers
        best = logits.argmax(dim=-1)
        peaks_there = logits.gather(1, best[:, None])[:, 0]
        with self.waiting():
            token_ids, peaks = to_host(best, peaks_there)
        check_finite(keys, peaks)  # argmax finds a NaN before any number
        return token_ids.astype(np.int64)

    def _draw(
        self,
        keys: Sequence[SequenceKey],
        slots: NDArray[np.int64],
        parameters: Parameters,
        positions: NDArray[np.int64],
        logits: torch.Tensor,
    ) -> NDArray[np.int64]:
        work = logits.to(torch.float32, copy=True)
        peaks = work.amax(dim=-1)
        self._penalise(work, parameters)
        self._add_biases(work, slots)
        self._forbid_ends(work, slots, parameters, positions)
        random = parameters["temperature"] > 0
        drawn = torch.empty(len(keys), dtype=torch.int64, device=self._device)
        settled = torch.ones(len(keys), dtype=torch.bool, device=self._device)
        if not random.all():
            _put(drawn, ~random, _some_rows(work, ~random).argmax(dim=-1))
        weights = self._weights(_some_rows(work, random), parameters[random])
        if random.any():
            numbers = uniforms(
                parameters["seed"][random],
                parameters["sequence_index"][random],
                positions[random].astype(np.uint64),
            )
            ids, is_settled = self._draw_random(weights, parameters[random], numbers)
            _put(drawn, random, ids)
            _put(settled, random, is_settled)
        # What was drawn from logits that are not finite is never used: only now does the host wait for the device.
        with self.waiting():
            token_ids, heights, fine = to_host(drawn, peaks, settled)
        check_finite(keys, heights)
        result = token_ids.astype(np.int64)
        left = fine[random] == 0
        if left.any():
            limits = self._limits(parameters[random][left])
            with self.waiting():
                again = draw_limited(_some_rows(weights, left), limits, to_device(numbers[left], self._device))
                result[np.flatnonzero(random)[left]] = to_host(again)[0]
        return result

    def _weights(self, logits: torch.Tensor, parameters: Parameters) -> torch.Tensor:
        """Relative to the most likely token's 1, at each row's temperature; `logits` is spoilt."""
        # The peak is subtracted first, so that a small temperature cannot overflow.
        logits.sub_(logits.amax(dim=-1, keepdim=True)).div_(self._column(parameters, "temperature")[:, None])
        return logits.exp_()

    def _draw_random(
        self, weights: torch.Tensor, parameters: Parameters, numbers: NDArray[np.float64]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A draw for each row, and whether it is settled: else more tokens must be looked at than were."""
        limited = (parameters["min_p"] > 0) | (parameters["top_k"] > 0) | (parameters["top_p"] < 1)
        ids = torch.empty(len(numbers), dtype=torch.int64, device=self._device)
        settled = torch.ones(len(numbers), dtype=torch.bool, device=self._device)
        if not limited.all():
            rest = to_device(numbers[~limited], self._device)
            _put(ids, ~limited, draw(_some_rows(weights, ~limited), rest))
        if limited.any():
            limits, rest = self._limits(parameters[limited]), to_device(numbers[limited], self._device)
            some, is_settled = draw_from_few(_some_rows(weights, limited), limits, rest)
            _put(ids, limited, some)
            _put(settled, limited, is_settled)
        return ids, settled

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
            logits[int(row), to_device(self._state.end_ids(int(slots[row])), self._device)] = float("-inf")

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


def check_finite(keys: Sequence[SequenceKey], peaks: NDArray[np.float64]) -> None:
    """Raises BadLogits for rows whose greatest logit, `[rows]`, is not finite."""
    finite = np.isfinite(peaks)
    if not finite.all():
        raise BadLogits([key for key, fine in zip(keys, finite.tolist(), strict=True) if not fine])


def _logprobs(
    num_top: NDArray[np.int64], logits: torch.Tensor, token_ids: NDArray[np.int64]
) -> list[TokenLogprobs | None]:
    results: list[TokenLogprobs | None] = [None] * len(token_ids)
    asked = np.flatnonzero(num_top >= 0)
    if len(asked):
        rows = to_device(asked, logits.device)
        for row, entry in zip(asked, token_logprobs(logits[rows], token_ids[asked], num_top[asked]), strict=True):
            results[row] = entry
    return results
