"""One sequence as a worker sees it: its tokens, how far their K/V is computed, and its block table.

1. WAITING    queued; holds nothing. A preempted sequence is here again, with its output as part of what to compute.
              A sequence with `remote` waits here until blocks are reserved for the KV that another worker sends.
   WAITING_FOR_REMOTE_KV, QUARANTINED   only of sequences with `remote`; `remote_kv.py` explains them.
2. RUNNING    holds blocks; `num_computed` of its tokens have K/V. Prefilling until all but the newest token have it.
3. SWAPPED    preempted and queued; holds no block, but its K/V has a copy on the host. RUNNING again when that is to be
              copied back; WAITING when the copy is given up.
4. FINISHED   left the scheduler, holds nothing there. Terminal.

Committed and planned lengths are kept apart: `num_computed` and the tokens move only when a step's result is committed;
`num_planned` says how many tokens the steps that are planned and not committed compute, and `num_expected` how many
they draw. There may be two such steps: one in flight, and the one planned behind it. What is asked about the next step
(`next_position`, `num_remaining`, `is_decoding`) counts as if they had gone well.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvrelay.kv.hashing import BlockHash, hash_blocks
from kvrelay.kv.pool import BlockState
from kvrelay.kv.table import BlockTable
from kvrelay.protocol.messages import PeerRef
from kvrelay.protocol.sampling import Sampling
from kvrelay.protocol.sequence_key import SequenceKey

if TYPE_CHECKING:
    from kvrelay.scheduling.beams.beam_groups import BeamGroup


class SequenceState(StrEnum):
    """See the module's text."""

    WAITING = "waiting"
    WAITING_FOR_REMOTE_KV = "waiting_for_remote_kv"
    QUARANTINED = "quarantined"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


class TokenBuffer:
    """A growing array of token ids whose slices are views. `num_tokens` is for reading; it is read very often."""

    def __init__(self, token_ids: NDArray[np.int32]) -> None:
        self._data = np.array(token_ids, dtype=np.int32)
        self.num_tokens = self._capacity = len(self._data)

    def __len__(self) -> int:
        return self.num_tokens

    def append(self, token_id: int) -> int:
        """Adds one token at the end, and returns the new length; amortised O(1)."""
        position = self.num_tokens
        if position == self._capacity:
            self._capacity = max(16, 2 * position)
            grown = np.empty(self._capacity, dtype=np.int32)
            grown[:position] = self._data
            self._data = grown
        self._data[position] = token_id
        self.num_tokens = length = position + 1
        return length

    def copy(self) -> TokenBuffer:
        """A copy that grows on its own."""
        return TokenBuffer(self._data[: self.num_tokens])

    def view(self, start: int, stop: int) -> NDArray[np.int32]:
        """Tokens [start, stop), not copied."""
        return self._data[start : min(stop, self.num_tokens)]


@dataclass(frozen=True, slots=True)
class RemoteKV:
    """The transfer that brings a sequence's prompt KV. `num_to_come`: samples of its request that follow later.

    `is_limited`: `sender` writes one-sidedly, so what is reserved for it counts towards its limit.
    """

    sender: PeerRef
    num_to_come: int = 0
    is_limited: bool = False


@dataclass(slots=True, eq=False)
class Sequence:
    """Bookkeeping of one sequence; see the module's text for its states."""

    key: SequenceKey
    tokens: TokenBuffer
    num_prompt: int  # the client's prompt; tokens beyond it are output
    sampling: Sampling
    root: BlockHash
    table: BlockTable
    router: PeerRef
    trace: str = ""
    priority: int = 0
    remote: RemoteKV | None = None  # until it is adopted
    prefill_only: bool = False  # leaves the scheduler when its first token is sampled
    state: SequenceState = SequenceState.WAITING
    block_state: BlockState = BlockState.COMPUTING  # of the blocks in its table
    num_computed: int = 0
    num_planned: int = 0
    num_expected: int = 0
    num_cached_tokens: int = 0  # of the prompt, found in this worker's cache at first admission
    num_published: int = 0  # blocks offered to the cache
    stop_tokens: frozenset[int] = frozenset()  # that end it; set when it joins a scheduler, as is the next one
    max_length: int = 0  # tokens, prompt and output, that end it
    hashes: list[BlockHash] = field(default_factory=list)
    abort_requested: bool = False  # while a step in flight computes it
    needs_commit_first: bool = False  # its next step depends on what the host makes of this one: no planning ahead
    num_preemptions: int = 0
    sample_group: str = ""  # that it is preempted and resumed with; empty: none
    beams: BeamGroup | None = None  # of the beam search that it is a beam of
    num_borrowed: int = 0  # blocks at its table's start that its beam group holds for it

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens."""
        return self.tokens.num_tokens

    @property
    def num_output(self) -> int:
        """Output tokens, those of earlier attempts included."""
        return self.tokens.num_tokens - self.num_prompt

    @property
    def next_position(self) -> int:
        """Where the next step goes on."""
        return self.num_computed + self.num_planned

    @property
    def num_remaining(self) -> int:
        """Tokens without K/V, and not planned; 1 for a decoding sequence."""
        return self.tokens.num_tokens + self.num_expected - self.num_computed - self.num_planned

    @property
    def num_slots(self) -> int:
        """Running sequences that a waiting one becomes: all beams of a search."""
        return 1 if self.sampling.beams is None or self.prefill_only else self.sampling.beams.width

    @property
    def num_full_blocks(self) -> int:
        """Blocks that its tokens fill."""
        return self.tokens.num_tokens // self.table.block_size

    @property
    def is_decoding(self) -> bool:
        """Only the newest token lacks K/V, and that token is output."""
        num_tokens = self.tokens.num_tokens + self.num_expected
        position = self.num_computed + self.num_planned
        is_last = num_tokens - position == 1 and num_tokens > self.num_prompt and position > 0
        return is_last and (self.beams is None or self.beams.wants_candidates)

    @property
    def wants_token(self) -> bool:
        """Whether a token is to be drawn once all K/V is there; a prompt that is only scored wants none."""
        if self.beams is not None:
            return self.beams.wants_candidates
        return self.sampling.max_tokens > self.num_output

    def block_hashes(self, num_blocks: int, start: int = 0) -> list[BlockHash]:
        """The hashes of the full blocks [start, num_blocks); each is computed once."""
        have = len(self.hashes)
        if have < num_blocks:
            size = self.table.block_size
            parent = self.hashes[-1] if self.hashes else self.root
            self.hashes += hash_blocks(parent, self.tokens.view(have * size, num_blocks * size), size)
        return self.hashes[start:num_blocks]
