"""Draws one token per row, vectorised over the rows of a step.

In order: penalties, logit_bias, min_tokens, temperature, min_p, top_k, top_p (of what is left), the draw. Steps that
are greedy and unadjusted take one argmax.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from kvrelay.engine.batch import SequenceKey
from kvrelay.engine.logprobs import token_logprobs
from kvrelay.engine.randoms import uniforms
from kvrelay.engine.sampler_state import SamplerState
from kvrelay.engine.truncation import draw, keep_min_p, keep_top_k, keep_top_p
from kvrelay.protocol.sampling import Sampling, TokenLogprobs

Parameters = np.ndarray[tuple[int], np.dtype[np.void]]


class BadLogits(Exception):
    """The model gave logits without a finite maximum (NaN or infinity) for the sequences in `keys`.

    Nothing was drawn or remembered: the step may be run again without them.
    """

    def __init__(self, keys: Sequence[SequenceKey]) -> None:
        super().__init__(f"the model's logits are not finite for {', '.join(map(str, keys))}")
        self.keys = tuple(keys)


class Sampler:
    """Sampler state and draws. Not thread-safe; its owner locks."""

    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int], device: torch.device) -> None:
        self._device = device
        self._state = SamplerState(vocab_size, eos_token_ids, device)

    def __contains__(self, key: SequenceKey) -> bool:
        return key in self._state

    def add(self, key: SequenceKey, sampling: Sampling, token_ids: Sequence[int], num_prompt: int) -> None:
        """Makes a sequence known; `token_ids` from `num_prompt` on are output already. A known key keeps its state."""
        self._state.add(key, sampling, token_ids, num_prompt)

    def drop(self, key: SequenceKey) -> None:
        """Forgets a sequence; unknown keys are ignored."""
        self._state.drop(key)

    def sample(
        self, keys: Sequence[SequenceKey], positions: NDArray[np.int64], logits: torch.Tensor
    ) -> tuple[NDArray[np.int64], list[TokenLogprobs | None]]:
        """One token per row, drawn for `positions[row]` of its sequence and added to its history.

        `logits` is `[rows, vocab]` of any float type; keys are distinct. Returns token ids `[rows]`, and
        log-probabilities where asked for.

        Raises:
            BadLogits: rows whose logits are not finite.
            KeyError: an unknown key.
        """
        slots, parameters = self._state.gather(keys)
        if parameters["adjusted"].any() or parameters["temperature"].any():
            token_ids = self._draw(keys, slots, parameters, positions, logits)
        else:
            token_ids = self._most_likely(keys, logits)
        counts = parameters["counts"]
        if (counts >= 0).any():
            self._state.counts.append(counts[counts >= 0], token_ids[counts >= 0])
        return token_ids, _logprobs(parameters["logprobs"], logits, token_ids)

    def _most_likely(self, keys: Sequence[SequenceKey], logits: torch.Tensor) -> NDArray[np.int64]:
        best = logits.argmax(dim=-1)
        _check_finite(keys, logits.gather(1, best[:, None])[:, 0])  # argmax finds a NaN before any number
        return _to_numpy(best)

    def _draw(
        self,
        keys: Sequence[SequenceKey],
        slots: NDArray[np.int64],
        parameters: Parameters,
        positions: NDArray[np.int64],
        logits: torch.Tensor,
    ) -> NDArray[np.int64]:
        _check_finite(keys, logits.amax(dim=-1))
        work = logits.to(torch.float32, copy=True)
        self._penalise(work, parameters)
        self._add_biases(work, slots)
        self._forbid_ends(work, slots, parameters, positions)
        token_ids = _to_numpy(work.argmax(dim=-1))
        random = np.flatnonzero(parameters["temperature"] > 0)
        if len(random):
            rows = torch.from_numpy(random).to(self._device)
            token_ids[random] = self._draw_random(work[rows], parameters[random], positions[random])
        return token_ids

    def _draw_random(
        self, logits: torch.Tensor, parameters: Parameters, positions: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        # The peak is subtracted first, so that a small temperature cannot overflow.
        logits = (logits - logits.amax(dim=-1, keepdim=True)) / self._column(parameters, "temperature")[:, None]
        for name, off, keep in (("min_p", 0, keep_min_p), ("top_k", 0, keep_top_k), ("top_p", 1, keep_top_p)):
            some = np.flatnonzero(parameters[name] != off)
            if len(some):
                rows = torch.from_numpy(some).to(self._device)
                logits[rows] = keep(logits[rows], self._column(parameters[some], name))
        numbers = uniforms(parameters["seed"], parameters["sequence_index"], positions.astype(np.uint64))
        return _to_numpy(draw(logits, torch.from_numpy(numbers).to(self._device)))

    def _penalise(self, logits: torch.Tensor, parameters: Parameters) -> None:
        """Repetition scales seen tokens of prompt and output; presence and frequency subtract for output tokens."""
        some = np.flatnonzero(parameters["counts"] >= 0)
        if not len(some):
            return
        rows = torch.from_numpy(some).to(self._device)
        counts_rows = torch.from_numpy(parameters["counts"][some].copy()).to(self._device)
        output = self._state.counts.output[counts_rows]
        came = output > 0
        seen = came | self._state.counts.in_prompt[counts_rows]
        part = logits[rows]
        repetition = self._column(parameters[some], "repetition")[:, None]
        part = torch.where(seen, torch.where(part > 0, part / repetition, part * repetition), part)
        part -= output * self._column(parameters[some], "frequency")[:, None]
        part -= came * self._column(parameters[some], "presence")[:, None]
        logits[rows] = part

    def _add_biases(self, logits: torch.Tensor, slots: NDArray[np.int64]) -> None:
        biases = self._state.biases(slots)
        if biases:
            ids = np.concatenate([bias.token_ids for _, bias in biases])
            rows = np.repeat([row for row, _ in biases], [len(bias.token_ids) for _, bias in biases])
            values = torch.from_numpy(np.concatenate([bias.values for _, bias in biases])).to(self._device)
            logits[torch.from_numpy(rows).to(self._device), torch.from_numpy(ids).to(self._device)] += values

    def _forbid_ends(
        self, logits: torch.Tensor, slots: NDArray[np.int64], parameters: Parameters, positions: NDArray[np.int64]
    ) -> None:
        """Before min_tokens, neither end-of-sequence nor stop tokens."""
        for row in np.flatnonzero(parameters["adjusted"] & (positions < parameters["min_length"])):
            logits[int(row), torch.from_numpy(self._state.end_ids(int(slots[row]))).to(self._device)] = float("-inf")

    def _column(self, parameters: Parameters, name: str) -> torch.Tensor:
        return torch.from_numpy(parameters[name].copy()).to(self._device)


def _check_finite(keys: Sequence[SequenceKey], peaks: torch.Tensor) -> None:
    finite = torch.isfinite(peaks)
    if not finite.all():
        raise BadLogits([key for key, fine in zip(keys, finite.tolist(), strict=True) if not fine])


def _logprobs(
    num_top: NDArray[np.int64], logits: torch.Tensor, token_ids: NDArray[np.int64]
) -> list[TokenLogprobs | None]:
    results: list[TokenLogprobs | None] = [None] * len(token_ids)
    asked = np.flatnonzero(num_top >= 0)
    if len(asked):
        rows = torch.from_numpy(asked).to(logits.device)
        for row, entry in zip(asked, token_logprobs(logits[rows], token_ids[asked], num_top[asked]), strict=True):
            results[row] = entry
    return results


def _to_numpy(tensor: torch.Tensor) -> NDArray[np.int64]:
    array: NDArray[np.int64] = tensor.cpu().numpy()
    return array
