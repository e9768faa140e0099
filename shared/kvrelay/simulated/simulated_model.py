"""The model of simulated devices: KV that encodes its tokens, and the next token as a hash of the KV. Its facts, such
as the vocabulary, are those of a real model, and are read without weights.

The KV of a token is a 64-bit word. The upper bits hold the index of its block in the block table, the lower `SUM_BITS`
the sum of the contributions of this token and those before it in the block. A contribution depends on token and
position. A forward reads one word per block, the last valid one, and their sum is the digest of the sequence. A block
that is missing, stale, of another prompt or misplaced changes the digest and so the next token.

The output depends only on the sequence's token ids, and on seed and sample index unless temperature is 0.
`continuation` returns what a client must receive, whatever the batches, handoffs and retries.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvrelay.model_directory import end_token_ids
from kvrelay.protocol.sampling import Sampling

Words = NDArray[np.uint64]

SUM_BITS = np.uint64(44)
SUM_MASK = np.uint64((1 << 44) - 1)
MISPLACED = np.uint64(0x9E3779B97F5)
"""Factor for the XOR of a block's actual and expected index; odd, so no difference vanishes."""
END_EVERY = 256
"""Without `ignore_eos`, one token in this many ends the text."""

_TOKEN, _POSITION = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD1B54A32D192ED03)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_MODULUS = 1 << 64


def mixed(words: Words) -> Words:
    """Mixes the bits of each word: the finaliser of SplitMix64 (Steele, Lea and Flood, 2014)."""
    words = (words ^ (words >> np.uint64(30))) * _FIRST
    words = (words ^ (words >> np.uint64(27))) * _SECOND
    return words ^ (words >> np.uint64(31))


def contributions(token_ids: Words, positions: Words) -> Words:
    """Contributions of tokens at positions, both `[tokens]`; each is below `1 << SUM_BITS`."""
    return mixed(token_ids * _TOKEN + (positions + np.uint64(1)) * _POSITION) & SUM_MASK


def digest(token_ids: Sequence[int]) -> int:
    """The digest of a complete sequence."""
    tokens = np.asarray(token_ids, np.uint64)
    return int(contributions(tokens, np.arange(len(tokens), dtype=np.uint64)).sum() & SUM_MASK)


def salt_of(sampling: Sampling, sequence: int) -> int:
    """Distinguishes continuations of one prompt by all 64 bits of the seed; 0 for greedy sampling."""
    if sampling.temperature == 0:
        return 0
    return (sampling.seed * int(_TOKEN) + (sequence + 1) * int(_POSITION)) % _MODULUS


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """Regular token ids (int64, ascending) and end-of-sequence ids."""

    size: int
    regular: NDArray[np.int64]
    eos_ids: tuple[int, ...]

    def draws(self, digests: Words, salts: Words) -> Words:
        """One random word per row, `[rows]`, which determines the next token."""
        return mixed(digests + salts * _SECOND + _FIRST)

    def tokens(self, draws: Words, may_end: NDArray[np.bool_]) -> NDArray[np.int64]:
        """The next token of each row. `may_end`: whether the row may sample an end-of-sequence token."""
        token_ids: NDArray[np.int64] = self.regular[(draws >> np.uint64(8)) % np.uint64(len(self.regular))]
        if self.eos_ids:
            ends = may_end & (draws % np.uint64(END_EVERY) == 0)
            token_ids[ends] = self.eos_ids[0]
        return token_ids

    def likeliest(self, draw: int, count: int) -> NDArray[np.int64]:
        """`count` different regular tokens (at most all), beginning with the one that `tokens` returns."""
        first = (draw >> 8) % len(self.regular)
        token_ids: NDArray[np.int64] = self.regular[
            (first + np.arange(min(count, len(self.regular)))) % len(self.regular)
        ]
        return token_ids

    def without(self, token_id: int, banned: frozenset[int]) -> int:
        """The token itself, or the next regular one that is not banned."""
        first = int(np.searchsorted(self.regular, token_id))
        candidates = (int(self.regular[(first + i) % len(self.regular)]) for i in range(len(self.regular)))
        return next((each for each in candidates if each not in banned), token_id)


def continuation(
    prompt: Sequence[int], sampling: Sampling, vocabulary: Vocabulary, max_model_len: int, sequence: int = 0
) -> list[int]:
    """The output of simulated devices for a prompt, including its end token. `sequence` is the sample's index.

    Temperature (0 or not), seed, max_tokens, min_tokens, stop_token_ids and ignore_eos have an effect; other sampling
    parameters have none.
    """
    total, length = np.uint64(digest(prompt)), len(prompt)
    salt = np.array([salt_of(sampling, sequence)], np.uint64)
    stops = frozenset(sampling.stop_token_ids)
    output: list[int] = []
    while len(output) < sampling.max_tokens and length < max_model_len:
        is_early = len(output) < sampling.min_tokens
        may_end = np.array([not sampling.ignore_eos and not is_early])
        token_id = int(vocabulary.tokens(vocabulary.draws(np.array([total]), salt), may_end)[0])
        if is_early and token_id in stops:
            token_id = vocabulary.without(token_id, stops)
        output.append(token_id)
        if token_id in stops or (token_id in vocabulary.eos_ids and not sampling.ignore_eos):
            break
        added = contributions(np.array([token_id], np.uint64), np.array([length], np.uint64))[0]
        total, length = np.uint64((int(total) + int(added)) % _MODULUS) & SUM_MASK, length + 1
    return output


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """`max_model_len` is None if the configuration has none. `identity` hashes configuration and tokenizer."""

    vocabulary: Vocabulary
    max_model_len: int | None
    identity: bytes


@lru_cache(maxsize=4)
def read_facts(model: str) -> ModelFacts:
    """Reads a directory or a hub name, of which it downloads only small files.

    Raises OSError if there is no such model, ValueError if its files are invalid.
    """
    directory = Path(model).expanduser()
    if not directory.is_dir():
        directory = _fetched(model)
    files = {name: _read(directory / name) for name in ("config.json", "tokenizer.json")}
    try:
        config, tokenizer = (json.loads(content) if content else {} for content in files.values())
        text = config.get("text_config") or config
        size = int(text["vocab_size"])
        ends = tuple(each for each in end_token_ids(directory) if 0 <= each < size)
        return ModelFacts(
            _vocabulary(size, ends, tokenizer),
            text.get("max_position_embeddings"),
            hashlib.blake2b(files["config.json"] + files["tokenizer.json"], digest_size=16).digest(),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the files of {model} are not a model's: {type(error).__name__}: {error}") from error


def _vocabulary(size: int, eos_ids: tuple[int, ...], tokenizer: dict[str, Any]) -> Vocabulary:
    special = {entry["id"] for entry in tokenizer.get("added_tokens") or () if entry.get("special")}
    regular = np.setdiff1d(np.arange(size), np.array(sorted(special | set(eos_ids)), np.int64))
    if not regular.size:
        raise ValueError(f"no text in a vocabulary of {size}")
    return Vocabulary(size, regular, eos_ids)


def _read(path: Path) -> bytes:
    """Reads a file; empty if an optional file is missing."""
    return path.read_bytes() if path.name == "config.json" or path.is_file() else b""


def _fetched(model: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(model, allow_patterns=["*config.json", "tokenizer.json"]))
    except HFValidationError as error:
        raise OSError(f"{model} is neither a directory nor a name on the hub") from error
