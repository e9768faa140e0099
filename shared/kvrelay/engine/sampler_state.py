"""What the sampler remembers of each sequence: one slot per sequence, one array per parameter.

A step gathers its rows' slots with one index per parameter. Token counts, the only state of vocabulary size, are kept
for those sequences alone that ask for a penalty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kvrelay.engine.batch import SequenceKey
from kvrelay.protocol.sampling import Sampling

_MIN_TEMPERATURE = 1e-5  # below it, float32 cannot tell a draw from the most likely token
_PARAMETERS = np.dtype(
    [
        ("temperature", np.float32),  # 0 is greedy
        ("top_p", np.float64),
        ("top_k", np.int64),  # 0 is off
        ("min_p", np.float32),
        ("presence", np.float32),
        ("frequency", np.float32),
        ("repetition", np.float32),
        ("seed", np.uint64),
        ("sequence_index", np.uint64),
        ("min_length", np.int64),  # prompt and min_tokens: no end below this position
        ("logprobs", np.int64),  # -1 is off
        ("counts", np.int64),  # row of the penalty tables, or -1
        ("adjusted", np.bool_),  # logits change before the draw: penalties, bias, or min_tokens
    ]
)


@dataclass(frozen=True, slots=True)
class SparseLogits:
    """A sequence's token ids and what is added to their logits."""

    token_ids: NDArray[np.int64]
    values: NDArray[np.float32]


class SamplerState:
    """Slots of all known sequences. Not thread-safe; its owner locks."""

    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int], device: torch.device) -> None:
        self._eos_token_ids = tuple(eos_token_ids)
        self._slots: dict[SequenceKey, int] = {}
        self._free: list[int] = []
        self._parameters = np.zeros(0, _PARAMETERS)
        self._biases: dict[int, SparseLogits] = {}  # by slot
        self._end_ids: dict[int, NDArray[np.int64]] = {}  # by slot, where min_tokens is set
        self.counts = PenaltyCounts(vocab_size, device)

    def __contains__(self, key: SequenceKey) -> bool:
        return key in self._slots

    def add(self, key: SequenceKey, sampling: Sampling, token_ids: Sequence[int], num_prompt: int) -> None:
        """Takes a slot for `key`; a known key keeps its state."""
        if key in self._slots:
            return
        if not self._free:
            self._grow()
        slot = self._free.pop()
        penalised = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) != (0, 0, 1)
        counts = self.counts.add(token_ids, num_prompt) if penalised else -1
        if sampling.logit_bias:
            ids, values = zip(*sorted(sampling.logit_bias.items()), strict=True)
            self._biases[slot] = SparseLogits(np.array(ids, np.int64), np.array(values, np.float32))
        if sampling.min_tokens:
            ends = sampling.stop_token_ids + (() if sampling.ignore_eos else self._eos_token_ids)
            self._end_ids[slot] = np.array(sorted(set(ends)), np.int64)
        self._parameters[slot] = (
            sampling.temperature if sampling.temperature >= _MIN_TEMPERATURE else 0.0,
            sampling.top_p,
            sampling.top_k,
            sampling.min_p,
            sampling.presence_penalty,
            sampling.frequency_penalty,
            sampling.repetition_penalty,
            sampling.seed & 0xFFFFFFFFFFFFFFFF,
            key[2],
            num_prompt + sampling.min_tokens,
            -1 if sampling.logprobs is None else sampling.logprobs,
            counts,
            penalised or bool(sampling.logit_bias) or bool(sampling.min_tokens),
        )
        self._slots[key] = slot

    def drop(self, key: SequenceKey) -> None:
        """Frees the slot of `key`, if it has one."""
        slot = self._slots.pop(key, None)
        if slot is None:
            return
        self._biases.pop(slot, None)
        self._end_ids.pop(slot, None)
        if self._parameters["counts"][slot] >= 0:
            self.counts.drop(int(self._parameters["counts"][slot]))
        self._free.append(slot)

    def gather(
        self, keys: Sequence[SequenceKey]
    ) -> tuple[NDArray[np.int64], np.ndarray[tuple[int], np.dtype[np.void]]]:
        """The slots `[rows]` of the keys and their parameters, a structured array `[rows]`.

        Raises:
            KeyError: a key is unknown.
        """
        slots = np.fromiter((self._slots[key] for key in keys), np.int64, len(keys))
        return slots, self._parameters[slots]

    def biases(self, slots: NDArray[np.int64]) -> list[tuple[int, SparseLogits]]:
        """`(row, bias)` of the rows that have one."""
        if not self._biases:
            return []
        return [(row, self._biases[slot]) for row, slot in enumerate(slots.tolist()) if slot in self._biases]

    def end_ids(self, slot: int) -> NDArray[np.int64]:
        """The tokens that may not come before min_tokens."""
        return self._end_ids.get(slot, np.zeros(0, np.int64))

    def _grow(self) -> None:
        size = len(self._parameters)
        added = max(64, size)
        self._parameters = np.concatenate([self._parameters, np.zeros(added, _PARAMETERS)])
        self._free.extend(range(size + added - 1, size - 1, -1))


class PenaltyCounts:
    """Of the sequences with penalties: how often each token came in the output, and which came in the prompt."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._free: list[int] = []
        self.output = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self.in_prompt = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)

    def add(self, token_ids: Sequence[int], num_prompt: int) -> int:
        """Takes a row and counts what is there; returns the row."""
        if not self._free:
            self._grow()
        row = self._free.pop()
        tokens = torch.as_tensor(np.asarray(token_ids, np.int64)).to(self._device)
        self.output[row] = torch.bincount(tokens[num_prompt:], minlength=self._vocab_size)
        self.in_prompt[row] = False
        self.in_prompt[row, tokens[:num_prompt]] = True
        return row

    def drop(self, row: int) -> None:
        """Gives a row back."""
        self._free.append(row)

    def append(self, rows: NDArray[np.int64], token_ids: NDArray[np.int64]) -> None:
        """Counts one more output token in each of `rows`, which are distinct."""
        where = torch.from_numpy(rows).to(self._device)
        self.output[where, torch.from_numpy(token_ids).to(self._device)] += 1

    def _grow(self) -> None:
        size = len(self.output)
        added = max(4, size)
        shape = (added, self._vocab_size)
        self.output = torch.cat([self.output, torch.zeros(shape, dtype=torch.int32, device=self._device)])
        self.in_prompt = torch.cat([self.in_prompt, torch.zeros(shape, dtype=torch.bool, device=self._device)])
        self._free.extend(range(size + added - 1, size - 1, -1))
