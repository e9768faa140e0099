"""The input and output of a runner's step.

The scheduler's plan (sequences, policy) becomes a `WorkerBatch` (plain numbers), which the runner turns into a forward
(tensors). The scheduler uses no tensors, and the runner contains no policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvrelay.protocol.failure_kind import FailureKind
from kvrelay.protocol.sampling import TokenLogprobs
from kvrelay.protocol.sequence_key import SequenceKey

Int32Array = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class CandidatesWanted:
    """Makes a row return the `num_candidates` most likely next tokens instead of a token.

    `history` is all tokens of the sequence, of which the first `num_prompt` are the prompt. Penalties use it.
    """

    num_candidates: int
    history: Int32Array
    num_prompt: int


class WorkerRow(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """One sequence's row of a step: `len(token_ids)` tokens, the first at `position`.

    `block_ids` is the sequence's block table, long enough for position + len(token_ids) tokens. It holds the K/V of the
    earlier `position` tokens. With `sample`, a token is sampled from the logits after the last token. With `wanted`,
    the best candidates are found instead; forks of a sequence share its `key`. With `has_placeholder`, the
    last of `token_ids` is a placeholder for the token that was sampled last for this key, by a step that was in flight
    when the batch was made. The last `num_drafts` of `token_ids` are drafts: guesses of the tokens that come next. The
    step verifies them, so the row may bring up to 1 + num_drafts tokens (see `RowResult`). With `jumps`, the row may
    bring tokens that its grammar forces behind the others. A row behind one with `num_drafts` or a grammar has no
    placeholder. `num_scored` is set for tensor parallelism alone: log-probabilities are requested of the tokens behind
    `num_scored` of the row's positions from number `first_scored` on (see `TransformersRunner.resolve`).
    """

    key: SequenceKey
    token_ids: Int32Array
    position: int
    block_ids: Int32Array
    sample: bool
    is_prefill: bool
    has_placeholder: bool = False
    num_drafts: int = 0
    jumps: bool = False
    wanted: CandidatesWanted | None = None
    first_scored: int = 0
    num_scored: int = 0


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copies the K/V of block `source` to block `target` before any row of the step is computed."""

    source: int
    target: int


class HostCopies(NamedTuple):
    """Pairs of pool block `blocks[i]` and slot `slots[i]` on the host to copy, in one direction."""

    blocks: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()


NO_COPIES = HostCopies()


@dataclass(frozen=True, slots=True)
class WorkerBatch:
    """The rows of one step, prefill chunks first, and the copies before them: first between pool and host, then from
    block to block (copy-on-write).

    A block that is copied out may be the target of a copy in, or written by a row, in the same step. A slot that is
    copied in is not copied out in the same step. The target of a block-to-block copy is neither a source nor the target
    of another copy.
    """

    step: int
    rows: Sequence[WorkerRow]
    to_host: HostCopies = NO_COPIES
    from_host: HostCopies = NO_COPIES
    copies: Sequence[BlockCopy] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(len(row.token_ids) for row in self.rows)

    @property
    def is_plain(self) -> bool:
        """Returns whether the batch has rows, copies nothing, and has no rows that want candidates."""
        if self.to_host.blocks or self.from_host.blocks or self.copies or not self.rows:
            return False
        return all(row.wanted is None for row in self.rows)


@dataclass(frozen=True, slots=True)
class Candidates:
    """The most likely next tokens, best first: token ids and float32 log-probabilities, both `[k]`.

    The log-probabilities are of the model's distribution after penalties, biases and minimum length.
    """

    token_ids: Int32Array
    logprobs: NDArray[np.float32]


class RowResult(msgspec.Struct, frozen=True, gc=False):
    """What a step computed for one row.

    `token_ids`: the sequence's next tokens, in order. Empty if the row does not sample; one sampled token; with drafts
    those that are the tokens which would be sampled there, up to the first that is not, and one sampled token behind
    them. The step has computed the K/V of all of them but the last: a row of n tokens at position p, without its
    drafts, that brings K tokens leaves valid K/V at positions [0, p + n + K - 1). The sequence's next row starts at
    position p + n + K - 1, with the last of these tokens, and overwrites the K/V of rejected drafts.
    `num_forced`: so many tokens at the end of `token_ids` were not sampled but are forced by the grammar (with
    `WorkerRow.jumps`). Their K/V is not computed, so K above counts only the tokens before them, of which there is at
    least one, and the sequence's next rows hold the last of those and all forced tokens.
    `is_late`: the row should have sampled, but the mask of its grammar was not ready. It brings no token, and the
    sequence's next row holds its last token again, at the same position.
    `logprobs`: one entry for each of `token_ids`, or none if the sequence does not ask for them.
    All of `token_ids` count in the sampler's state. The scheduler drops tokens behind a stop or behind max_tokens, but
    only of a sequence that ends there, so the two never disagree about a sequence that goes on.
    """

    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    candidates: Candidates | None = None  # set for a `CandidatesWanted`
    num_forced: int = 0
    is_late: bool = False

    @property
    def num_accepted(self) -> int:
        """Number of drafts among the tokens of a row with drafts."""
        return max(0, len(self.token_ids) - self.num_forced - 1)


@dataclass(slots=True)
class GrammarWork:
    """Work for constrained output: tokens that were forced, masks, grammars that were compiled and that were found
    compiled. Seconds are of the threads that do it, beside the steps."""

    num_forced_tokens: int = 0
    num_masks: int = 0
    mask_s: float = 0.0
    num_compiled: int = 0
    num_found: int = 0
    compile_s: float = 0.0

    def add(self, other: GrammarWork) -> None:
        self.num_forced_tokens += other.num_forced_tokens
        self.num_masks += other.num_masks
        self.mask_s += other.mask_s
        self.num_compiled += other.num_compiled
        self.num_found += other.num_found
        self.compile_s += other.compile_s


@dataclass(frozen=True, slots=True)
class StepResult:
    """The rows' results in the batch's order, and the seconds that the forward and the copies before it took.

    `captured`: a CUDA graph was replayed for the forward. `grammar_work`: work for grammars since the previous result;
    None: there was none.
    """

    step: int
    rows: Sequence[RowResult]
    forward_s: float
    copy_s: float = 0.0
    captured: bool = False
    grammar_work: GrammarWork | None = None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The facts about a loaded model that services need, without tensors."""

    name: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    num_blocks: int
    block_bytes: int  # bytes of one block with all layers
    dtype: str
    fingerprint: str  # hash over weights, dtypes, KV layout, block size and tokenizer
    numerics: str = ""  # equal for workers that round alike, see docs/reproducibility.md; empty: simulated
    num_host_slots: int = 0  # blocks that the host keeps for preempted sequences
    host_block_s: float = 0.0  # measured seconds to copy a block one way; 0: not measured
    device: str = ""  # device name for display: cpu, or a GPU's name and UUID
    kv_dtype: str = ""  # dtype of keys and values in the pool; empty: simulated
    tokenizer: str = ""  # see `kvrelay.model_directory`
    model_identity: str = ""  # the fingerprint of workers that have the whole model in one process; empty: simulated
    tensor_parallel_size: int = 1  # ranks among which heads are divided; the numbers above are of one rank
    total_kv_heads: int = 0  # KV heads of the whole model; 0: simulated
    pipeline_parallel_size: int = 1  # parts into which layers are divided; the numbers above are of the last one
    total_layers: int = 0  # layers of the whole model; 0: simulated

    @property
    def total_block_bytes(self) -> int:
        """Bytes of one block on all ranks together."""
        layers = self.total_layers if self.pipeline_parallel_size > 1 else self.num_layers
        return self.block_bytes * self.tensor_parallel_size * layers // max(1, self.num_layers)

    @property
    def pairing_fingerprint(self) -> str:
        """Equal for workers that hand KV over to each other, whatever their numbers of ranks."""
        return self.model_identity or self.fingerprint


class RowsFailed(Exception):
    """A step failed because of the sequences in `keys`. Without them it may be run again.

    Its copies between pool and host were made. After any other exception they count as not made.
    """

    kind = FailureKind.ENGINE_ERROR

    def __init__(self, message: str, keys: Sequence[SequenceKey]) -> None:
        super().__init__(message)
        self.keys = frozenset(keys)


class DeviceLost(Exception):
    """The device is lost to this process. No step will land here again."""


def failure_kind(error: Exception) -> FailureKind:
    """The kind of failure that a step's error is for its requests."""
    if isinstance(error, RowsFailed):
        return error.kind
    if isinstance(error, DeviceLost):
        return FailureKind.DEVICE_LOST
    # By name: torch's error is no MemoryError, and simulated workers do not import torch.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return FailureKind.OUT_OF_MEMORY
    if isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error):
        return FailureKind.OUT_OF_MEMORY  # torch has no type of its own for it on a CPU
    return FailureKind.ENGINE_ERROR
