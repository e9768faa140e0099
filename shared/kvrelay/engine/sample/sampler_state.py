"""The sampler's state of each sequence: one slot per sequence, one array per parameter.

A step gathers its rows' parameters with one index. Token counts, the only state of vocabulary size, are kept only for
sequences with a penalty.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
from numpy.typing import NDArray

from kvrelay.protocol.sampling import Sampling
from kvrelay.protocol.sequence_key import SequenceKey

_MIN_TEMPERATURE = 1e-5  # below it, float32 cannot tell sampling from the most likely token
_PARAMETERS = np.dtype(
    [
        ("temperature", np.float32),  # 0: greedy
        ("top_p", np.float64),
        ("top_k", np.int64),  # 0: off
        ("min_p", np.float32),
        ("presence", np.float32),
        ("frequency", np.float32),
        ("repetition", np.float32),
        ("seed", np.uint64),
        ("sequence_index", np.uint64),
        ("min_length", np.int64),  # prompt and min_tokens: no end below this position
        ("logprobs", np.int64),  # -1: off
        ("counts", np.int64),  # row of the penalty tables, or -1
        ("masked", np.bool_),  # a grammar, allowed tokens or bad words decide which tokens may come next
        ("follows", np.bool_),  # ... and which ones depends on the output
        ("adjusted", np.bool_),  # logits change before sampling: penalties, bias, min_tokens or a mask
        ("plain", np.bool_),  # greedy, with neither adjusted logits nor log-probabilities
        ("last", np.int64),  # the newest landed token
        ("length", np.int64),  # tokens of prompt and output that have landed
        ("life", np.int64),  # unique for each sequence that ever had the slot; 0: the slot is free
    ]
)

Parameters = np.ndarray[tuple[int], np.dtype[np.void]]


@dataclass(frozen=True, slots=True)
class SparseLogits:
    """Token ids of a sequence and the values to add to their logits."""

    token_ids: NDArray[np.int64]
    values: NDArray[np.float32]


class SamplerState:
    """The slots of all known sequences. Not thread-safe; the owner locks."""

    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._slots: dict[SequenceKey, int] = {}
        self._free: list[int] = []
        self._parameters = np.zeros(0, _PARAMETERS)
        self._biases: dict[int, SparseLogits] = {}  # key: slot
        self._logprob_ids: dict[int, NDArray[np.int64]] = {}  # key: slot
        self._end_ids: dict[int, NDArray[np.int64]] = {}  # key: slot; only for sequences with min_tokens
        self._lives = count(1)
        self.counts = PenaltyCounts(vocab_size)

    def __contains__(self, key: SequenceKey) -> bool:
        return key in self._slots

    def has_all(self, keys: Iterable[SequenceKey]) -> bool:
        """Returns whether all keys are known."""
        return self._slots.keys() >= set(keys)

    def add(self, key: SequenceKey, sampling: Sampling, token_ids: Sequence[int], num_prompt: int) -> None:
        """Takes a slot for `key`. A known key keeps its state. Raises ValueError if a biased token, or one that would
        be penalised, is not in the vocabulary."""
        if key in self._slots:
            return
        penalised = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) != (0, 0, 1)
        self._check_ids((*sampling.logit_bias, *(token_ids if penalised else ())))
        self._check_ids(sampling.allowed_token_ids)
        self._check_ids(sampling.logprob_token_ids)
        self._check_ids([token_id for word in sampling.bad_words for token_id in word])
        masked = sampling.is_constrained or sampling.limits_tokens
        if not self._free:
            self._grow()
        slot = self._free.pop()
        # Each row of a beam brings the beam's tokens with it, so nothing is recorded for beams.
        counts = self.counts.add(token_ids, num_prompt) if penalised and sampling.beams is None else -1
        if sampling.logit_bias:
            ids, values = zip(*sorted(sampling.logit_bias.items()), strict=True)
            self._biases[slot] = SparseLogits(np.array(ids, np.int64), np.array(values, np.float32))
        if sampling.logprob_token_ids:
            self._logprob_ids[slot] = np.array(sampling.logprob_token_ids, np.int64)
        if sampling.min_tokens:
            ends = sampling.stop_token_ids + (() if sampling.ignore_eos else self._eos_token_ids)
            self._end_ids[slot] = np.array([token for token in set(ends) if token < self._vocab_size], np.int64)
        temperature = sampling.temperature if sampling.temperature >= _MIN_TEMPERATURE else 0.0
        adjusted = penalised or masked or bool(sampling.logit_bias) or bool(sampling.min_tokens)
        self._parameters[slot] = (
            temperature,
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
            masked,
            sampling.follows_output,
            adjusted,
            not (temperature or adjusted or sampling.logprobs is not None),
            0,
            len(token_ids),
            next(self._lives),
        )
        self._slots[key] = slot

    def drop(self, key: SequenceKey) -> int | None:
        """Frees the slot of `key` and returns it; None for an unknown key."""
        slot = self._slots.pop(key, None)
        if slot is None:
            return None
        self._parameters["life"][slot] = 0
        self._biases.pop(slot, None)
        self._logprob_ids.pop(slot, None)
        self._end_ids.pop(slot, None)
        if self._parameters["counts"][slot] >= 0:
            self.counts.drop(int(self._parameters["counts"][slot]))
        self._free.append(slot)
        return slot

    def slot_of(self, key: SequenceKey) -> int:
        """Raises KeyError for an unknown key."""
        return self._slots[key]

    def gather(self, keys: Sequence[SequenceKey]) -> tuple[NDArray[np.int64], Parameters]:
        """Returns the slots `[rows]` of the keys and their parameters, a structured array `[rows]`. Raises KeyError for
        an unknown key."""
        slots = np.fromiter(map(self._slots.__getitem__, keys), np.int64, len(keys))
        return slots, self._parameters[slots]

    def holds(self, slots: NDArray[np.int64], lives: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether each slot still belongs to the sequence that `gather` found there, `[rows]`."""
        found: NDArray[np.bool_] = self._parameters["life"][slots] == lives
        return found

    def append(self, slots: NDArray[np.int64], token_ids: NDArray[np.int64]) -> None:
        """Records new tokens of the sequences in `slots`. Of a repeated slot the last token is the newest."""
        self._parameters["last"][slots] = token_ids
        np.add.at(self._parameters["length"], slots, 1)

    def biases(self, slots: NDArray[np.int64]) -> list[tuple[int, SparseLogits]]:
        """`(row, bias)` of the rows that have one."""
        if not self._biases:
            return []
        return [(row, self._biases[slot]) for row, slot in enumerate(slots.tolist()) if slot in self._biases]

    def logprob_ids(self, slots: NDArray[np.int64]) -> dict[int, NDArray[np.int64]]:
        """The tokens whose log-probabilities are wanted in place of the most likely ones, by row."""
        if not self._logprob_ids:
            return {}
        return {row: self._logprob_ids[slot] for row, slot in enumerate(slots.tolist()) if slot in self._logprob_ids}

    def end_ids(self, slot: int) -> NDArray[np.int64]:
        """The tokens that are forbidden before min_tokens."""
        return self._end_ids.get(slot, np.zeros(0, np.int64))

    def _check_ids(self, token_ids: Sequence[int]) -> None:
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self._vocab_size):
            raise ValueError(f"token ids reach from {min(token_ids)} to {max(token_ids)}, not below {self._vocab_size}")

    def _grow(self) -> None:
        size = len(self._parameters)
        added = max(64, size)
        self._parameters = np.concatenate([self._parameters, np.zeros(added, _PARAMETERS)])
        self._free.extend(range(size + added - 1, size - 1, -1))


class PenaltyCounts:
    """The distinct tokens of each sequence with penalties, and how often each occurred in the output.

    A row lists its tokens in the order of their first occurrence. A map of vocabulary size finds a token in the list.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._free: list[int] = []
        self._place = np.zeros((0, vocab_size), np.int32)  # index of a token in its row's list, from 1; 0: never seen
        self._lengths = np.zeros(0, np.int64)  # list lengths
        self._tokens = np.zeros((0, 64), np.int64)
        self._in_output = np.zeros((0, 64), np.int32)

    def add(self, token_ids: Sequence[int], num_prompt: int) -> int:
        """Takes a row and counts the tokens so far. Returns the row."""
        if not self._free:
            self._grow()
        row = self._free.pop()
        distinct, places = np.unique(np.asarray(token_ids, np.int64), return_inverse=True)
        self._widen(len(distinct))
        self._place[row] = 0
        self._place[row, distinct] = np.arange(1, len(distinct) + 1)
        self._lengths[row] = len(distinct)
        self._tokens[row, : len(distinct)] = distinct
        self._in_output[row, : len(distinct)] = np.bincount(places[num_prompt:], minlength=len(distinct))
        return row

    def drop(self, row: int) -> None:
        self._free.append(row)

    def append(self, rows: NDArray[np.int64], token_ids: NDArray[np.int64]) -> None:
        """Counts output tokens: `token_ids[i]` is the next one of `rows[i]`. A row occurs once for each of its
        tokens."""
        fresh = np.flatnonzero(self._place[rows, token_ids] == 0)
        if len(fresh):
            # A new token that occurs several times in a row is listed once, at its first place.
            fresh = fresh[np.unique(rows[fresh] * self._vocab_size + token_ids[fresh], return_index=True)[1]]
            fresh = fresh[np.lexsort((fresh, rows[fresh]))]
            fresh_rows, fresh_ids = rows[fresh], token_ids[fresh]
            ends = self._lengths[fresh_rows] + _places_in_row(fresh_rows)
            self._widen(int(ends.max()) + 1)
            self._tokens[fresh_rows, ends], self._in_output[fresh_rows, ends] = fresh_ids, 0
            self._place[fresh_rows, fresh_ids] = ends + 1
            self._lengths[fresh_rows] = np.maximum(self._lengths[fresh_rows], ends + 1)
        np.add.at(self._in_output, (rows, self._place[rows, token_ids] - 1), 1)

    def seen(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]:
        """All tokens seen in `rows`, flat: index into `rows`, token id, count in the output."""
        lengths = self._lengths[rows]
        which = np.repeat(np.arange(len(rows)), lengths)
        place = np.arange(len(which)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        return which, self._tokens[rows[which], place], self._in_output[rows[which], place]

    def _grow(self) -> None:
        """Doubles the number of rows; the least number added is 4."""
        size = len(self._lengths)
        added = max(4, size)
        self._place = np.concatenate([self._place, np.zeros((added, self._vocab_size), np.int32)])
        self._lengths = np.concatenate([self._lengths, np.zeros(added, np.int64)])
        self._tokens = np.pad(self._tokens, ((0, added), (0, 0)))
        self._in_output = np.pad(self._in_output, ((0, added), (0, 0)))
        self._free.extend(range(size + added - 1, size - 1, -1))

    def _widen(self, length: int) -> None:
        """Lengthens the lists to at least `length`."""
        missing = length - self._tokens.shape[1]
        if missing > 0:
            added = max(missing, self._tokens.shape[1])
            self._tokens = np.pad(self._tokens, ((0, 0), (0, added)))
            self._in_output = np.pad(self._in_output, ((0, 0), (0, added)))


def _places_in_row(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """0, 1, .. for the entries of each row. `rows` is sorted."""
    starts = np.flatnonzero(np.diff(rows, prepend=-1))
    lengths = np.diff(starts, append=len(rows))
    return np.arange(len(rows)) - np.repeat(starts, lengths)
