"""One sequence on a worker: its tokens, how many of them have KV, and its block table.

1. WAITING                in the queue, without blocks. A preempted sequence waits again, with its output as part of the
                          tokens to compute. A sequence with `remote` waits until blocks are reserved for its KV.
   WAITING_FOR_REMOTE_KV  only with `remote`: its KV is being received (`queue/remote_kv.py`).
   DROPPED                only with `remote`: its transfer was dropped, and its sender may still write into its blocks.
2. RUNNING                holds blocks; the first `num_computed` tokens have KV. It prefills until all tokens but the
                          newest have KV. A decoding sequence may lack the KV of several tokens if a grammar forced
                          them (`speculation/forced_tokens.py`).
3. ON_HOST                preempted and in the queue, without blocks; its KV has a copy on the host. It becomes RUNNING
                          when the copy back is planned, and WAITING if the copy is dropped.
4. FINISHED               left the scheduler and holds nothing there. Terminal.

Committed and planned lengths are separate. `num_computed` and the tokens change only when a step is committed.
`num_planned` counts the tokens that uncommitted steps compute, and `num_expected` the tokens that they sample. There
may be two such steps, one in flight and one planned behind it, and more with a pipeline. Properties of the next row
(`next_position`, `num_remaining`, `is_decoding`) count as if these steps had succeeded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from kvrelay.kv.hashing import BlockHash, hash_blocks
from kvrelay.kv.pool import BlockState
from kvrelay.kv.table import BlockTable
from kvrelay.protocol.messages import PeerRef
from kvrelay.protocol.sampling import Sampling
from kvrelay.protocol.sequence_key import SequenceKey


class SequenceState(StrEnum):
    """The module's text explains the states."""

    WAITING = "waiting"
    WAITING_FOR_REMOTE_KV = "waiting_for_remote_kv"
    DROPPED = "dropped"
    RUNNING = "running"
    ON_HOST = "on_host"
    FINISHED = "finished"


class TokenBuffer:
    """A growing array of token ids whose slices are views. Reads of `num_tokens` are frequent, so it is an
    attribute."""

    def __init__(self, token_ids: NDArray[np.int32]) -> None:
        self._data = np.array(token_ids, dtype=np.int32)
        self.num_tokens = self._capacity = len(self._data)

    def __len__(self) -> int:
        return self.num_tokens

    def append(self, token_id: int) -> int:
        """Adds one token at the end, and returns the new length; amortised O(1)."""
        position = self.num_tokens
        if position == self._capacity:
            self._grow(position)
        self._data[position] = token_id
        self.num_tokens = length = position + 1
        return length

    def extend(self, token_ids: NDArray[np.int32]) -> None:
        """Adds tokens at the end; amortised O(1) each."""
        start, end = self.num_tokens, self.num_tokens + len(token_ids)
        if end > self._capacity:
            self._grow(end)
        self._data[start:end] = token_ids
        self.num_tokens = end

    def _grow(self, least: int) -> None:
        self._capacity = max(16, 2 * least)
        grown = np.empty(self._capacity, dtype=np.int32)
        grown[: self.num_tokens] = self._data[: self.num_tokens]
        self._data = grown

    def copy(self) -> TokenBuffer:
        """A copy that grows on its own."""
        return TokenBuffer(self._data[: self.num_tokens])

    def view(self, start: int, stop: int) -> NDArray[np.int32]:
        """Tokens [start, stop), not copied."""
        return self._data[start : min(stop, self.num_tokens)]


@dataclass(frozen=True, slots=True)
class RemoteKV:
    """The transfer that brings a sequence's prompt KV. `num_to_come`: samples of its request that follow later."""

    sender: PeerRef
    num_to_come: int = 0


@dataclass(slots=True)
class Origin:
    """The source of a sequence, and the names by which it is grouped with others.

    `owner`: whose share of the worker it uses, with this `weight`. `session`: its blocks are evicted first
    once it has ended; empty: none. `text_owner`: guesses of tokens may come from earlier outputs of this owner; None:
    from none. `sample_group`: its sequences are admitted, preempted and resumed together; empty: none.
    """

    router: PeerRef
    trace: str = ""
    priority: int = 0
    owner: str = ""
    weight: float = 1.0
    session: str = ""
    text_owner: str | None = None
    sample_group: str = ""


@dataclass(slots=True, eq=False)
class Forks:
    """The state that a sequence and its forks have in common. They share the blocks of their common prefix.

    `leader`: represents all of them. `num_slots`: running sequences that they become. `num_blocks`: blocks
    that the forks will take beside the leader's. `num_candidates`: so many of the most likely next tokens are wanted,
    instead of a sampled one; 0 while the leader computes a common prefix again. `are_parted`: forks run beside the
    leader.
    """

    leader: Sequence
    num_slots: int = 1
    num_blocks: int = 0
    num_candidates: int = 0
    are_parted: bool = False


@dataclass(slots=True, eq=False)
class Sequence:
    """The state of one sequence; the module's text explains its life."""

    key: SequenceKey
    tokens: TokenBuffer
    num_prompt: int  # the client's prompt; tokens beyond it are output
    sampling: Sampling
    root: BlockHash
    table: BlockTable
    origin: Origin
    remote: RemoteKV | None = None  # None once the handoff is complete
    prefill_only: bool = False  # leaves the scheduler when its first token is sampled
    state: SequenceState = SequenceState.WAITING
    block_state: BlockState = BlockState.COMPUTING  # the state of the blocks in its table
    num_computed: int = 0
    num_planned: int = 0
    num_expected: int = 0
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at first admission
    num_published: int = 0  # blocks offered to the cache
    stop_tokens: frozenset[int] = frozenset()  # set by the scheduler, like max_length
    max_length: int = 0  # number of prompt and output tokens at which it ends
    hashes: list[BlockHash] = field(default_factory=list)
    abort_requested: bool = False  # ends at the commit of the step in flight
    num_preemptions: int = 0
    forks: Forks | None = None  # set for a sequence that is forked, and for its forks

    @property
    def num_tokens(self) -> int:
        """Number of prompt and output tokens."""
        return self.tokens.num_tokens

    @property
    def num_output(self) -> int:
        """Number of output tokens, with those of earlier attempts."""
        return self.tokens.num_tokens - self.num_prompt

    @property
    def next_position(self) -> int:
        """Position of the first token of the next row."""
        return self.num_computed + self.num_planned

    @property
    def num_remaining(self) -> int:
        """Number of tokens that need KV and are not planned; 1 for a decoding sequence without forced tokens."""
        num_tokens = self.tokens.num_tokens - self.num_unneeded
        return num_tokens + self.num_expected - self.num_computed - self.num_planned

    @property
    def num_unneeded(self) -> int:
        """Number of last tokens whose KV nothing reads: 1 for a prompt that is only scored, as its last token follows
        the last logits that are read."""
        sampling = self.sampling
        return 0 if sampling.max_tokens or not sampling.num_prompt_scores(self.num_tokens) else 1

    @property
    def fork_of(self) -> Sequence | None:
        """The leader of the forks, which may be this sequence; None: it is never forked."""
        return None if self.forks is None else self.forks.leader

    @property
    def num_slots(self) -> int:
        """Number of running sequences that it becomes, with its forks."""
        return 1 if self.forks is None else self.forks.num_slots

    @property
    def num_fork_blocks(self) -> int:
        """Number of blocks that its forks will take beside its own."""
        return 0 if self.forks is None else self.forks.num_blocks

    @property
    def num_full_blocks(self) -> int:
        """Number of blocks that its tokens fill."""
        return self.tokens.num_tokens // self.table.block_size

    @property
    def is_decoding(self) -> bool:
        """Returns whether only the newest token lacks KV, and that token is output."""
        num_tokens = self.tokens.num_tokens + self.num_expected
        position = self.num_computed + self.num_planned
        is_last = num_tokens - position == 1 and num_tokens > self.num_prompt and position > 0
        return is_last and (self.forks is None or self.forks.num_candidates > 0)

    @property
    def is_prompting(self) -> bool:
        """Returns whether the next row is a chunk of a prompt. Decodes have several tokens if a grammar forced them;
        forks compute what follows their common prefix again as chunks."""
        return (self.forks is not None or self.block_state is not BlockState.RUNNING) and not self.is_decoding

    @property
    def wants_token(self) -> bool:
        """Returns whether a token is sampled, or candidates are found, once all KV is computed. A prompt that is only
        scored needs none, and a common prefix of forks that is computed again."""
        return self.sampling.max_tokens > self.num_output if self.forks is None else self.forks.num_candidates > 0

    def block_hashes(self, num_blocks: int, start: int = 0) -> list[BlockHash]:
        """Returns the hashes of the full blocks [start, num_blocks). Each is computed once."""
        have = len(self.hashes)
        if have < num_blocks:
            size = self.table.block_size
            parent = self.hashes[-1] if self.hashes else self.root
            self.hashes += hash_blocks(parent, self.tokens.view(have * size, num_blocks * size), size)
        return self.hashes[start:num_blocks]
