"""A `ModelRunner` without a model. It does a step's bookkeeping at once and returns how long the device would take.

The caller waits for that time. See `simulated_model` for KV and how tokens follow from it. All rows of a
step are computed together. Penalties, biases and truncation have no effect. Log-probabilities are those of a
distribution in which each token is half as likely as the one before it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvrelay.config.worker import WorkerConfig
from kvrelay.device_profiles import Profile, StepLoad, find_profile
from kvrelay.engine.model_runner import ModelRunner
from kvrelay.handoff.transports.pool_memory import PoolLike
from kvrelay.kv.table import blocks_for
from kvrelay.protocol.sampling import Sampling, TokenLogprobs
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.scheduling.memory.swapping import SWAP_PART
from kvrelay.simulated.simulated_model import (
    END_EVERY,
    MISPLACED,
    SUM_BITS,
    SUM_MASK,
    ModelFacts,
    Vocabulary,
    Words,
    contributions,
    mixed,
    read_facts,
    salt_of,
)
from kvrelay.step.batch import Candidates, HostCopies, ModelSpec, RowResult, StepResult, WorkerBatch, WorkerRow


@dataclass(slots=True)
class _Known:
    """A sequence: the parameters of its tokens, and its prompt if log-probabilities of that are requested."""

    sampling: Sampling
    salt: int
    num_prompt: int
    stops: frozenset[int]
    scored: NDArray[np.int64] | None
    newest: int = -1


@dataclass(frozen=True, slots=True, eq=False)
class _Packed:
    """A step's rows, packed. Tokens are concatenated, and so are the blocks that each row reads from its
    table's start."""

    lens: NDArray[np.int64]  # [rows], tokens
    ends: NDArray[np.int64]  # [rows], the position after the row's last token
    starts: NDArray[np.int64]  # [rows], index of each row's first token
    positions: NDArray[np.int64]  # [tokens]
    blocks: NDArray[np.int64]  # [blocks]
    block_starts: NDArray[np.int64]  # [rows], index of each row's first block

    @classmethod
    def of(cls, rows: Sequence[WorkerRow], block_size: int) -> _Packed:
        """Packs at least one row; each row has at least one token."""
        lens = np.array([len(row.token_ids) for row in rows])
        firsts = np.array([row.position for row in rows])
        ends = firsts + lens
        starts = np.cumsum(lens) - lens
        num_blocks = -(-ends // block_size)
        tables = [row.block_ids[:count] for row, count in zip(rows, num_blocks.tolist(), strict=True)]
        return cls(
            lens=lens,
            ends=ends,
            starts=starts,
            positions=np.arange(int(lens.sum())) + np.repeat(firsts - starts, lens),
            blocks=np.concatenate(tables).astype(np.int64),
            block_starts=np.cumsum(num_blocks) - num_blocks,
        )


class SimulatedRunner(ModelRunner):
    """See the module docstring. `num_blocks` and `num_host_slots` are numbers of blocks of `block_size` tokens."""

    def __init__(
        self,
        profile: Profile,
        facts: ModelFacts,
        *,
        name: str,
        block_size: int,
        num_blocks: int,
        num_host_slots: int = 0,
        max_model_len: int | None = None,
    ) -> None:
        self._profile = profile
        self._vocabulary = facts.vocabulary
        self._words = np.zeros((num_blocks, block_size), np.uint64)
        self._host = np.zeros((num_host_slots, block_size), np.uint64)
        self._known: dict[SequenceKey, _Known] = {}
        block_bytes = block_size * profile.kv_bytes_per_token
        lengths = [num_blocks * block_size, max_model_len or facts.max_model_len or num_blocks * block_size]
        self._spec = ModelSpec(
            name=f"{name} on simulated {profile.name}",
            vocab_size=facts.vocabulary.size,
            max_model_len=min(lengths),
            eos_token_ids=facts.vocabulary.eos_ids,
            num_layers=1,
            num_kv_heads=1,
            head_dim=1,
            block_size=block_size,
            num_blocks=num_blocks,
            block_bytes=block_bytes,
            dtype="simulated",
            fingerprint=_fingerprint(facts, block_size, profile.kv_bytes_per_token),
            num_host_slots=num_host_slots,
            host_block_s=block_bytes / profile.transfer_bytes_s,
        )

    @property
    def spec(self) -> ModelSpec:
        """`block_bytes` is the size of a block of the simulated model, not of the memory used here."""
        return self._spec

    @property
    def pool_bytes(self) -> NDArray[np.uint8]:
        """Simulated K/V: one 8-byte word per token slot, `[num_blocks, 8 * block_size]`."""
        return self._words.view(np.uint8)

    @property
    def pool_memory(self) -> PoolLike:
        return self.pool_bytes

    def add_sequence(self, key: SequenceKey, sampling: Sampling, token_ids: Sequence[int], num_prompt: int) -> None:
        if key in self._known:
            return
        if sampling.is_constrained:
            raise ValueError("simulated workers do not constrain their output")
        scored = None if sampling.prompt_logprobs is None else np.asarray(token_ids[:num_prompt], np.int64)
        stops = frozenset(sampling.stop_token_ids)
        self._known[key] = _Known(sampling, salt_of(sampling, key[2]), num_prompt, stops, scored)

    def drop_sequence(self, key: SequenceKey) -> None:
        self._known.pop(key, None)

    def execute(self, batch: WorkerBatch) -> StepResult:
        """Returns at once. The result's times are those of the simulated device, or of each part of a pipeline.

        Raises KeyError if a row that samples, or has a placeholder, is unknown.
        """
        copy_s = self._copy(batch)
        rows = batch.rows
        if not rows:
            return StepResult(batch.step, [], 0.0, copy_s)
        load = StepLoad.of((row.position, len(row.token_ids), row.is_prefill) for row in rows)
        packed = _Packed.of(rows, self._spec.block_size)
        self._write(rows, packed)
        digests = self._read(packed)
        forward_s = self._profile.step_s(load) / self._profile.pipeline_depth
        return StepResult(batch.step, self._results(rows, packed, digests), forward_s, copy_s)

    # -- K/V ----------------------------------------------------------------------------------------------------------

    def _copy(self, batch: WorkerBatch) -> float:
        self._swap(batch.to_host, out=True)
        self._swap(batch.from_host, out=False)
        if batch.copies:
            sources, targets = [copy.source for copy in batch.copies], [copy.target for copy in batch.copies]
            self._words[targets] = self._words[sources]
        return (len(batch.to_host.blocks) + len(batch.from_host.blocks)) * self._spec.host_block_s

    def _swap(self, copies: HostCopies, *, out: bool) -> None:
        blocks, slots = list(copies.blocks), list(copies.slots)
        if out and blocks:
            self._host[slots] = self._words[blocks]
        elif blocks:
            self._words[blocks] = self._host[slots]

    def _write(self, rows: Sequence[WorkerRow], packed: _Packed) -> None:
        """Writes this step's K/V. Sums continue from the previous position within each block."""
        size = self._spec.block_size
        indices, offsets = packed.positions // size, packed.positions % size
        blocks = packed.blocks[np.repeat(packed.block_starts, packed.lens) + indices]
        added = contributions(self._token_ids(rows, packed), packed.positions.astype(np.uint64))
        is_first = offsets == 0
        is_first[packed.starts] = True
        firsts = np.flatnonzero(is_first)
        before = self._words[blocks[firsts], offsets[firsts] - 1] & SUM_MASK
        before[offsets[firsts] == 0] = 0
        sums = np.cumsum(added, dtype=np.uint64)
        sums += np.repeat(before - (sums[firsts] - added[firsts]), _distances(firsts, len(sums)))
        self._words[blocks, offsets] = sums & SUM_MASK | indices.astype(np.uint64) << SUM_BITS

    def _read(self, packed: _Packed) -> Words:
        """The digest of each row's tokens up to its last one, from all of its blocks."""
        size, num_blocks = self._spec.block_size, len(packed.blocks)
        counts = _distances(packed.block_starts, num_blocks)
        columns = np.full(num_blocks, size - 1)
        columns[packed.block_starts + counts - 1] = (packed.ends - 1) % size
        words = self._words[packed.blocks, columns]
        places = (np.arange(num_blocks) - np.repeat(packed.block_starts, counts)).astype(np.uint64)
        found = (words & SUM_MASK) + ((words >> SUM_BITS) ^ places) * MISPLACED
        digests: Words = np.add.reduceat(found, packed.block_starts) & SUM_MASK
        return digests

    def _token_ids(self, rows: Sequence[WorkerRow], packed: _Packed) -> Words:
        """The step's tokens. Placeholders are replaced by the newest tokens."""
        token_ids = np.concatenate([row.token_ids for row in rows]).astype(np.uint64)
        for row, last in zip(rows, (packed.starts + packed.lens - 1).tolist(), strict=True):
            if row.has_placeholder:
                token_ids[last] = self._known[row.key].newest
        return token_ids

    # -- tokens -------------------------------------------------------------------------------------------------------

    def _results(self, rows: Sequence[WorkerRow], packed: _Packed, digests: Words) -> list[RowResult]:
        results = [RowResult()] * len(rows)
        sampling = [index for index, row in enumerate(rows) if row.sample]
        if sampling:
            known = [self._known[rows[index].key] for index in sampling]
            salts = np.array([each.salt for each in known], np.uint64)
            numbers = self._vocabulary.draws(digests[sampling], salts)
            lengths = packed.ends[sampling].tolist()
            may_end = [_may_end(each, length) for each, length in zip(known, lengths, strict=True)]
            token_ids = self._vocabulary.tokens(numbers, np.array(may_end)).tolist()
            for index, each, token_id, number, ends in zip(
                sampling, known, token_ids, numbers.tolist(), may_end, strict=True
            ):
                results[index] = self._sampled(rows[index], each, token_id, number, ends)
        for index, row in enumerate(rows):
            if (found := self._known.get(row.key)) is not None and found.scored is not None:
                entries = self._scored(found, row.position, len(row.token_ids))
                results[index] = RowResult(results[index].token_ids, results[index].logprobs, entries)
        return results

    def _sampled(self, row: WorkerRow, known: _Known, token_id: int, number: int, may_end: bool) -> RowResult:
        if row.wanted is not None:
            return RowResult(candidates=_candidates(self._vocabulary, number, row.wanted.num_candidates, may_end))
        if token_id in known.stops and _is_early(known, row.position + len(row.token_ids)):
            token_id = self._vocabulary.without(token_id, known.stops)
        known.newest = token_id
        if known.sampling.logprobs is None:
            return RowResult((token_id,))
        if wanted := known.sampling.logprob_token_ids:
            entry = TokenLogprobs(token_id, -math.log(2), list(wanted), _halving(len(wanted)))
        else:
            entry = _logprobs(self._vocabulary, token_id, number, known.sampling.logprobs)
        return RowResult((token_id,), (entry,))

    def _scored(self, known: _Known, position: int, num_tokens: int) -> list[TokenLogprobs]:
        """Entries for the scored tokens that follow these positions. All tokens of a prompt count as equally likely."""
        assert known.scored is not None
        end, position = position + num_tokens, max(position, known.sampling.logprob_start_len - 1)
        targets = known.scored[position + 1 : end + 1]
        numbers = mixed(np.arange(position, position + len(targets), dtype=np.uint64)).tolist()
        logprob, num_top = -math.log(self._vocabulary.size), known.sampling.prompt_logprobs or 0
        entries = []
        for token_id, number in zip(targets.tolist(), numbers, strict=True):
            top = self._vocabulary.likeliest(number, num_top).tolist()
            entries.append(TokenLogprobs(token_id, logprob, top, _halving(len(top))))
        return entries


def make_simulated_runner(config: WorkerConfig) -> SimulatedRunner:
    """Makes the runner from the configuration. By default the pool has the size in the profile.

    Raises OSError or ValueError if there is no such model or profile, or a length does not fit.
    """
    profile, facts = find_profile(config.profile), read_facts(config.model)
    block_bytes = config.block_size * profile.kv_bytes_per_token
    num_blocks = config.num_blocks or profile.kv_tokens // config.block_size
    if config.num_blocks is None and config.kv_memory_bytes is not None:
        num_blocks = config.kv_memory_bytes // block_bytes
    if num_blocks < 1:
        raise ValueError(f"no room for a block of {config.block_size} tokens, {block_bytes} bytes, in the pool")
    if config.max_model_len is not None and num_blocks * config.block_size < config.max_model_len:
        raise ValueError(
            f"max_model_len {config.max_model_len} does not fit the pool: {num_blocks} blocks of {config.block_size} "
            f"tokens; it takes {blocks_for(config.max_model_len, config.block_size)} blocks"
        )
    swap_bytes = config.swap_bytes
    return SimulatedRunner(
        profile,
        facts,
        name=config.model_name,
        block_size=config.block_size,
        num_blocks=num_blocks,
        num_host_slots=num_blocks // SWAP_PART if swap_bytes is None else swap_bytes // block_bytes,
        max_model_len=config.max_model_len,
    )


def _distances(starts: NDArray[np.int64], end: int) -> NDArray[np.int64]:
    """Distances from each start to the next one, and from the last to `end`. `np.diff` takes three times as long."""
    distances = np.empty_like(starts)
    np.subtract(starts[1:], starts[:-1], out=distances[:-1])
    distances[-1] = end - starts[-1]
    return distances


def _is_early(known: _Known, length: int) -> bool:
    return length - known.num_prompt < known.sampling.min_tokens


def _may_end(known: _Known, length: int) -> bool:
    return not known.sampling.ignore_eos and not _is_early(known, length)


def _halving(count: int) -> list[float]:
    return [-(index + 1) * math.log(2) for index in range(count)]


def _logprobs(vocabulary: Vocabulary, token_id: int, number: int, num_top: int) -> TokenLogprobs:
    others = (each for each in vocabulary.likeliest(number, num_top + 1).tolist() if each != token_id)
    top = [token_id, *others][:num_top]
    return TokenLogprobs(token_id, -math.log(2), top, _halving(len(top)))


def _candidates(vocabulary: Vocabulary, number: int, count: int, may_end: bool) -> Candidates:
    """Puts the end of the text among the first candidates as often as `tokens` samples it. Rows differ in how steeply
    the probabilities fall."""
    token_ids = vocabulary.likeliest(number, count).astype(np.int32)
    if may_end and vocabulary.eos_ids and number % END_EVERY == 0:
        token_ids[0] = vocabulary.eos_ids[0]
    falls = 0.4 + 0.6 * (mixed(np.arange(len(token_ids), dtype=np.uint64) + np.uint64(number)) / 2.0**64)
    return Candidates(token_ids, -np.cumsum(falls).astype(np.float32))


def _fingerprint(facts: ModelFacts, block_size: int, kv_bytes_per_token: int) -> str:
    """K/V may be handed over between devices with the same model."""
    text = f"simulated {block_size} {kv_bytes_per_token} ".encode()
    return hashlib.blake2b(text + facts.identity, digest_size=16).hexdigest()
