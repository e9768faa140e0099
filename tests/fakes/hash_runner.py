"""A model whose next token is a hash of everything its K/V cache says came before.

It writes each token id and its position into the pool where K/V would go, and reads them back through the block table
to sample the next token. So a wrong block, a missing block, a block of another prompt, or a block overwritten too early
gives other tokens than `expected_tokens`, in microseconds and without torch.
"""

from __future__ import annotations

import hashlib
import threading
import time
import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvrelay.engine.model_runner import ModelRunner
from kvrelay.handoff.transports.pool_memory import PoolLike
from kvrelay.protocol.sampling import Sampling, TokenLogprobs
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.step.batch import Candidates, ModelSpec, RowResult, StepResult, WorkerBatch, WorkerRow
from tests.fakes.waiting import PATIENCE_S

VOCAB_SIZE = 1000
EOS_TOKEN_ID = 0


class CorruptCache(AssertionError):
    """The pool does not hold what this sequence's K/V should be."""


def next_token(tokens: NDArray[np.int32], sampling: Sampling, sequence: int) -> int:
    """Deterministic; depends on all tokens, and on seed and sequence index unless greedy. EOS is one token in 50."""
    salt = b"" if sampling.temperature == 0 else f"{sampling.seed}/{sequence}".encode()
    digest = hashlib.blake2b(np.ascontiguousarray(tokens, "<i4").tobytes(), digest_size=8, key=salt).digest()
    number = int.from_bytes(digest, "little")
    if number % 50 == 0 and not sampling.ignore_eos:
        return EOS_TOKEN_ID
    return 1 + number // 50 % (VOCAB_SIZE - 1)


def next_candidates(tokens: NDArray[np.int32], sampling: Sampling, count: int) -> Candidates:
    """The best continuations that a beam of these tokens has: deterministic, with close calls, and EOS now and then."""
    digest = hashlib.blake2b(np.ascontiguousarray(tokens, "<i4").tobytes(), digest_size=8, key=b"beam").digest()
    rng = np.random.default_rng(int.from_bytes(digest, "little"))
    token_ids = 1 + rng.permutation(VOCAB_SIZE - 1)[:count].astype(np.int32)
    if rng.random() < 0.3 and not sampling.ignore_eos:
        token_ids[rng.integers(0, min(3, count))] = EOS_TOKEN_ID
    logprobs = -0.2 - np.cumsum(rng.exponential(0.4, count))
    return Candidates(token_ids, logprobs.astype(np.float32))


def expected_tokens(prompt: Sequence[int], sampling: Sampling, max_model_len: int, sequence: int = 0) -> list[int]:
    """The output that an undisturbed run gives."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < sampling.max_tokens and len(tokens) < max_model_len:
        tokens.append(next_token(np.array(tokens, np.int32), sampling, sequence))
        if tokens[-1] in sampling.stop_token_ids or (tokens[-1] == EOS_TOKEN_ID and not sampling.ignore_eos):
            break
    return tokens[len(prompt) :]


class HashRunner(ModelRunner):
    """A step takes `step_s`, and waits where `hold_after` says so. A row with drafts
    brings those that are right and one more token, and one with `jumps` further ones without their K/V, as if a
    grammar forced what the model would sample."""

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 16,
        max_model_len: int = 512,
        step_s: float = 0.0,
        fingerprint: str = "hash-model",
        num_host_slots: int = 0,
        numerics: str = "",
    ) -> None:
        entries_bytes = block_size * 8
        self._spec = ModelSpec(
            name="hash-model",
            vocab_size=VOCAB_SIZE,
            max_model_len=min(max_model_len, num_blocks * block_size),
            eos_token_ids=(EOS_TOKEN_ID,),
            num_layers=1,
            num_kv_heads=1,
            head_dim=1,
            block_size=block_size,
            num_blocks=num_blocks,
            block_bytes=entries_bytes,
            dtype="int32",
            fingerprint=fingerprint,
            numerics=numerics,
            num_host_slots=num_host_slots,
        )
        self._host = np.full((num_host_slots, self.spec.block_bytes), 0xEE, np.uint8)
        self.pool_bytes = np.zeros((num_blocks, self.spec.block_bytes), np.uint8)
        self._entries = self.pool_bytes[:, :entries_bytes].view(np.int32).reshape(num_blocks, block_size, 2)
        self._sequences: dict[SequenceKey, Sampling] = {}
        self._sampled: dict[SequenceKey, int] = {}
        self._newest: dict[SequenceKey, tuple[int, tuple[int, ...]]] = {}  # the newest tokens, from a position on
        self.step_s = step_s
        self.late_every = 0  # so many constrained rows to one that is late, once for each place; 0: none is
        self._were_late: set[tuple[SequenceKey, int]] = set()
        self._num_free_steps = 0
        self._may_run = threading.Event()
        self._may_run.set()

    def hold_after(self, num_steps: int) -> None:
        """So many more steps run; the next one waits for `go_on`."""
        self._num_free_steps = num_steps
        self._may_run.clear()

    def go_on(self) -> None:
        self._may_run.set()

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    @property
    def pool_memory(self) -> PoolLike:
        return self.pool_bytes

    @property
    def num_sequences(self) -> int:
        """Sequences whose sampler state is kept."""
        return len(self._sequences)

    def add_sequence(self, key: SequenceKey, sampling: Sampling, token_ids: Sequence[int], num_prompt: int) -> None:
        self._sequences[key] = sampling
        self._newest.setdefault(key, (len(token_ids), ()))

    def drop_sequence(self, key: SequenceKey) -> None:
        self._sequences.pop(key, None)
        self._sampled.pop(key, None)
        self._newest.pop(key, None)

    def execute(self, batch: WorkerBatch) -> StepResult:
        started = time.perf_counter()
        if self.step_s:
            time.sleep(self.step_s)
        self._wait_while_held()
        self._swap(batch)
        if batch.copies:
            sources, targets = [copy.source for copy in batch.copies], [copy.target for copy in batch.copies]
            assert len({*sources, *targets}) == len(set(sources)) + len(targets), "a target is in another copy"
            self.pool_bytes[targets] = self.pool_bytes[sources]
        rows = [self._run(row) for row in batch.rows]
        return StepResult(batch.step, rows, time.perf_counter() - started)

    def _wait_while_held(self) -> None:
        if self._may_run.is_set():
            return
        if self._num_free_steps:
            self._num_free_steps -= 1
            return
        assert self._may_run.wait(PATIENCE_S), "nobody let the model go on"

    def _swap(self, batch: WorkerBatch) -> None:
        """Slots hold nonsense until a block is copied there, so a wrong or missing copy gives other tokens."""
        for block, slot in zip(*batch.to_host, strict=True):
            self._host[slot] = self.pool_bytes[block]
        for block, slot in zip(*batch.from_host, strict=True):
            self.pool_bytes[block] = self._host[slot]

    def _run(self, row: WorkerRow) -> RowResult:
        size = self.spec.block_size
        end = row.position + len(row.token_ids)
        positions = np.arange(row.position, end)
        token_ids = [*row.token_ids[:-1], self._token_at(row.key, end - 1)] if row.has_placeholder else row.token_ids
        assert not (row.has_placeholder and row.num_drafts), "what follows a token that nobody knows cannot be guessed"
        self._entries[row.block_ids[positions // size], positions % size, 0] = token_ids
        self._entries[row.block_ids[positions // size], positions % size, 1] = positions
        read = self._entries[row.block_ids[: (end + size - 1) // size]].reshape(-1, 2)[:end]
        if not np.array_equal(read[:, 1], np.arange(end)):
            raise CorruptCache(f"{row.key}: positions in the pool are {read[:, 1].tolist()}")
        read = read[: end - row.num_drafts]
        if not row.sample:
            return RowResult()
        sampling = self._sequences[row.key]
        if row.wanted is not None:
            assert np.array_equal(row.wanted.history, read[:, 0])
            return RowResult(candidates=next_candidates(read[:, 0], sampling, row.wanted.num_candidates))
        if sampling.grammar is not None:
            first, newest = self._newest[row.key]
            if row.has_placeholder and first + len(newest) != end:  # the row was planned for one token more, and there
                return RowResult(is_late=first + len(newest) < end)  # is none, or there are several
            if self._is_late(row.key, end):
                return RowResult(is_late=True)
        new_ids, num_forced = self._continue(row, read[:, 0].tolist(), sampling)
        self._sampled[row.key], self._newest[row.key] = new_ids[-1], (end - row.num_drafts, new_ids)
        asked = sampling.logprobs is not None
        logprobs = tuple(TokenLogprobs(token_id, -float(token_id), [], []) for token_id in new_ids if asked)
        return RowResult(new_ids, logprobs, num_forced=num_forced)

    def _token_at(self, key: SequenceKey, position: int) -> int:
        """The newest token, or the one at this position if a grammar forced others behind it."""
        first, newest = self._newest[key]
        return newest[position - first] if 0 <= position - first < len(newest) - 1 else self._sampled.get(key, 1)

    def _is_late(self, key: SequenceKey, end: int) -> bool:
        if (
            not self.late_every
            or (key, end) in self._were_late
            or zlib.crc32(f"{key} {end}".encode()) % self.late_every
        ):
            return False
        self._were_late.add((key, end))
        return True

    def _continue(self, row: WorkerRow, tokens: list[int], sampling: Sampling) -> tuple[tuple[int, ...], int]:
        """The next tokens, and how many of them are forced. The row's K/V has what the drafts left."""
        start, drafts = len(tokens), row.token_ids[len(row.token_ids) - row.num_drafts :].tolist()
        for draft in [*drafts, None]:
            tokens.append(next_token(np.array(tokens, np.int32), sampling, row.key[2]))
            if tokens[-1] != draft:
                break
        num_forced = zlib.crc32(f"{row.key} {start} forced".encode()) % 12 if row.jumps else 0
        for _ in range(num_forced):
            tokens.append(next_token(np.array(tokens, np.int32), sampling, row.key[2]))
        return tuple(tokens[start:]), num_forced
