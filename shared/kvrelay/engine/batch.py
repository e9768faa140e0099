"""The second of three stages: what one forward pass needs, and what it gives back.

A schedule batch (requests, policy) becomes a `WorkerBatch` (plain numbers), which a runner turns into a forward batch
(tensors). The scheduler knows no tensor, the runner knows no policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvrelay.protocol.sampling import Sampling, TokenLogprobs
from kvrelay.protocol.sequence_key import SequenceKey
from kvrelay.transfer.pool_memory import PoolLike

Int32Array = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class BeamRow:
    """What a beam's row gives in place of a token: its `num_candidates` most likely continuations.

    `history` is all of its tokens, of which the first `num_prompt` are the prompt: penalties look at them.
    """

    num_candidates: int
    history: Int32Array
    num_prompt: int


class WorkerRow(msgspec.Struct, frozen=True, gc=False):
    """One sequence's part in a step: `len(token_ids)` tokens from `position` on.

    `block_ids` is the sequence's block table, long enough for position + len(token_ids) tokens; the K/V of the earlier
    `position` tokens lie in it already. With `sample`, one token is drawn from the logits after the last token; with
    `beam` the best candidates are found instead, and `key` is that of all beams of one request.
    With `has_placeholder`, the last of `token_ids` is a placeholder: it stands for the token sampled last for this
    key, by a step that was in flight when the batch was made.
    With `num_lookahead`, the row may bring up to 1 + num_lookahead tokens (see `RowResult`), and `block_ids` is long
    enough for position + len(token_ids) + num_lookahead tokens. No row behind it has a placeholder.
    """

    key: SequenceKey
    token_ids: Int32Array
    position: int
    block_ids: Int32Array
    sample: bool
    is_prefill: bool
    has_placeholder: bool = False
    num_lookahead: int = 0
    beam: BeamRow | None = None


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """The K/V of block `source` goes to block `target` before any row of the step is computed."""

    source: int
    target: int


class SwapCopies(NamedTuple):
    """`blocks[i]` of the pool and `slots[i]` of the host's swap space are to hold the same bytes."""

    blocks: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()


NO_COPIES = SwapCopies()


@dataclass(frozen=True, slots=True)
class WorkerBatch:
    """The rows of one step, prefill chunks first, and what is copied before them: between pool and host, then from
    block to block (copy-on-write).

    A block that is copied out may be copied into, or written by a row, in the same step; a slot that is copied in is
    in no copy out of the same step. No target of a copy from block to block is a source, or another one's target.
    """

    step: int
    rows: Sequence[WorkerRow]
    swap_out: SwapCopies = NO_COPIES
    swap_in: SwapCopies = NO_COPIES
    copies: Sequence[BlockCopy] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(len(row.token_ids) for row in self.rows)

    @property
    def is_plain(self) -> bool:
        """Whether the batch has rows, copies nothing, and has no rows of beams."""
        if self.swap_out.blocks or self.swap_in.blocks or self.copies or not self.rows:
            return False
        return all(row.beam is None for row in self.rows)


@dataclass(frozen=True, slots=True)
class BeamCandidates:
    """A beam's most likely continuations, the likeliest first: tokens and float32 log-probabilities, both `[k]`.

    Log-probabilities are of the model's distribution, with penalties, biases and minimum length applied to them.
    """

    token_ids: Int32Array
    logprobs: NDArray[np.float32]


class RowResult(msgspec.Struct, frozen=True, gc=False):
    """What a step computed for one row.

    `token_ids`: the sequence's next tokens, in order. Empty if the row does not sample; one token from plain sampling;
    up to 1 + `WorkerRow.num_lookahead` if a method brings several in one step (tokens that a grammar forces, verified
    drafts). The step has computed the K/V of all of them but the last, as it has for the row's own tokens: a row of n
    tokens at position p that brings K tokens leaves valid K/V at positions [0, p + n + K - 1). The sequence's next row
    starts at position p + n + K - 1, with the last of these tokens.
    `logprobs`: one entry for each of `token_ids`, or none if the sequence does not ask for them.
    All of `token_ids` count in the sampler's state. The scheduler drops tokens behind a stop or behind max_tokens, but
    only of a sequence that ends there, so the two never disagree about a sequence that goes on.
    """

    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    candidates: BeamCandidates | None = None  # of a beam's row that samples


@dataclass(frozen=True, slots=True)
class StepResult:
    """Results in the order of the batch's rows, and the seconds that the forward and the copies before it took.

    `captured`: the forward was replayed from a CUDA graph.
    """

    step: int
    rows: Sequence[RowResult]
    forward_s: float
    copy_s: float = 0.0
    captured: bool = False


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What the services need to know about a loaded model, without a tensor."""

    name: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    num_blocks: int
    block_bytes: int  # of one block of all layers
    dtype: str
    fingerprint: str  # hash over weights, dtypes, KV layout, block size and tokenizer
    num_swap_slots: int = 0  # blocks that fit the host's swap space
    swap_block_s: float = 0.0  # seconds that copying a block to or from there took at the start; 0: not measured
    device: str = ""  # that computes, for people: cpu, or a GPU's name and UUID
    kv_dtype: str = ""  # of keys and values in the pool; empty: simulated


class RowsFailed(Exception):
    """A step gave nothing because of the sequences in `keys`; without them it may be run again.

    Its copies between pool and host were made; after any other exception they count as not made.
    """

    def __init__(self, message: str, keys: Sequence[SequenceKey]) -> None:
        super().__init__(message)
        self.keys = frozenset(keys)


class DeviceLost(Exception):
    """The device does nothing more for this process: no step will ever land here again."""


class ModelRunner(Protocol):
    """Runs the model over a paged pool. Calls come from one thread at a time; `execute` may take long."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def pool_memory(self) -> PoolLike:
        """The pool's memory, shared, not copied, as transports read and write it."""
        ...

    def add_sequence(self, key: SequenceKey, sampling: Sampling, token_ids: Sequence[int], num_prompt: int) -> None:
        """Makes a sequence known to the sampler. `token_ids` beyond `num_prompt` are output already (resumed, or the
        first token of a handoff): they count for penalties, min_tokens and max_tokens. Idempotent per key."""
        ...

    def drop_sequence(self, key: SequenceKey) -> None:
        """Forgets a sequence's sampler state; unknown keys are ignored."""
        ...

    def execute(self, batch: WorkerBatch) -> StepResult:
        """Runs one step: copies blocks out to the host, then in from there, then from block to block; then writes K/V
        of every row's tokens into its blocks, attends, samples. There may be copies and no rows. Thread-safe against
        `add_sequence` and `drop_sequence` from another thread. All tokens of the result join the sampler's history. The
        newest is what `has_placeholder` of a row of the next batch stands for.

        Raises RowsFailed where some sequences alone are to blame; the copies were made then. Raises DeviceLost where
        only a new process can go on. Whatever it raises, nothing of the step writes into its blocks any more."""
        ...


class LaunchedStep(Protocol):
    """A step that the device was asked for. It ends by one of the two methods, called once, on whatever thread, and
    after that of the step launched before it."""

    def land(self) -> StepResult:
        """Waits until the step has ended on the device, for nothing launched behind it. As `ModelRunner.execute` from
        there on: sampled tokens join the sampler's history, and it raises the same."""
        ...

    def discard(self) -> None:
        """Waits likewise; nothing of the step is remembered. It may be run again, or never. Raises DeviceLost."""
        ...


class LaunchingRunner(ModelRunner, Protocol):
    """A `ModelRunner` over a device with a queue: a step may be launched while the one before it runs.

    `launch` is called on one thread at a time, which may be another one than that of a `land` going on meanwhile. At
    most two steps are launched and not ended."""

    @property
    def launches_ahead(self) -> bool:
        """Whether any step is ever launched behind another one here."""
        ...

    def can_launch_behind(self, batch: WorkerBatch) -> bool:
        """Whether `launch` takes this batch while the step before it is launched, or about to be, and has not landed.

        A row with `has_placeholder` then takes its token on the device, where that step leaves it. No: the batch needs
        what the host learns when that step lands, or its launch would wait for the device."""
        ...

    def launch(self, batch: WorkerBatch) -> LaunchedStep:
        """The first half of `execute`, which is this and `land`. Raises as it does: then nothing of the step writes
        into its blocks any more, and there is nothing to end."""
        ...
