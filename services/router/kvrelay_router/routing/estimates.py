"""The input and output of routing: the workers that may be chosen, the request, estimates of its latency, the decision.

`StepCost` is the cost of a step, of a token, and of a pair of a token and a token it attends to. A worker without
measurements gets the typical cost of its role. If no worker has measurements, a default cost is used: only the ratio
between workers matters then.

All are structs because each request makes dozens, and a frozen dataclass costs ten times as much.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median
from typing import Literal, NamedTuple

import msgspec

from kvrelay.protocol.messages import PeerRef
from kvrelay.scheduling.step_cost import StepCost, pairs

DEFAULT_COST = StepCost()
DEFAULT_BUDGET = 512
HORIZON_TOKENS = 64
"""The number of output tokens whose decode time is added to the transfer time."""

Role = Literal["prefill", "decode"]

CachedBlocks = Mapping[str, Mapping[str, int]]
"""The number of leading blocks of a prompt that workers hold: by the numerics of the worker that computed them, then by
worker id. Workers with 0 are left out."""


class BlockNaming(NamedTuple):
    """What the hashes of a prompt's blocks depend on, beside its tokens and salt."""

    fingerprint: str
    numerics: str  # of the worker that computes the prompt
    block_size: int


class Candidate(msgspec.Struct, frozen=True):
    """A worker that accepts new requests, with its present load and its measured speeds."""

    peer: PeerRef
    role: Role
    fingerprint: str
    numerics: str = ""  # equal for workers that round alike; empty: unknown
    queued_tokens: int = 0  # prompt tokens to compute, without cached ones
    num_sequences: int = 0  # running, waiting, and handoffs on their way
    num_free_blocks: int = 0  # free or evictable, minus those of handoffs on their way
    queued_pairs: float = 0.0  # pairs of a queued token and a token it attends to
    head_tokens: int = 0  # queued tokens of the prompt in computation
    head_pairs: float = 0.0
    head_since_s: float = 0.0  # by the clock of `Demand.now_s`
    num_pending: int = 0  # sequences whose handoff is on its way
    context_tokens: int = 0  # tokens in the contexts of the running sequences
    recent_tokens: float = 0.0  # recent prompt tokens to compute: how fast its cache is replaced
    num_blocks: int = 0  # blocks in the pool; 0: unknown
    block_size: int = 16
    block_bytes: int = 0  # 0: unknown
    token_budget: int = 0  # 0: unknown
    step_cost: StepCost | None = None  # None: not measured yet
    transfer_bytes_s: float | None = None  # measured speed of block pushes; None: not measured yet
    slow_links: Mapping[str, float] = {}  # the same to decode workers that are reached at less than half of it

    @property
    def worker_id(self) -> str:
        """The worker's name in the fleet."""
        return self.peer.peer_id

    @property
    def naming(self) -> BlockNaming:
        """Of the blocks that it computes."""
        return BlockNaming(self.fingerprint, self.numerics, self.block_size)


class CandidateWorkers(msgspec.Struct, frozen=True):
    """All workers that accept new requests, in the order of their names."""

    prefill: tuple[Candidate, ...] = ()
    decode: tuple[Candidate, ...] = ()

    @classmethod
    def of(cls, candidates: Iterable[Candidate]) -> CandidateWorkers:
        ordered = sorted(candidates, key=lambda candidate: candidate.worker_id)
        return cls(
            tuple(candidate for candidate in ordered if candidate.role == "prefill"),
            tuple(candidate for candidate in ordered if candidate.role == "decode"),
        )


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """The request to place. `ordinal` counts the decisions; with `request_id` it makes policies pure functions."""

    request_id: str
    num_prompt_tokens: int
    needs_decode: bool  # more than one token has to be generated
    ordinal: int = 0
    avoid: frozenset[str] = frozenset()  # worker ids to use only if there are no others
    hands_over: bool = True  # False: a handoff has failed, and might again, as while a connection is broken
    numerics: str = ""  # of the workers that served the request before; empty: none did
    local_prefill_tokens: int | None = None  # longest prompt that decode computes alone; None: the policy decides
    popularity: float = 0.0  # recent requests with the same cached prefix, see `PrefixPopularity`
    now_s: float = 0.0  # monotonic time of the placement
    reuse: float = 0.0  # share of recent prompt tokens found in a cache: the value of a cached token
    session_workers: frozenset[str] = frozenset()  # ids of the workers of its session's latest request
    affinity: str = ""  # key of the `sticky` policy: a session, a user, or the prompt's beginning


class ExpectedLatency(msgspec.Struct, frozen=True):
    """Seconds until a request's first token, estimated from the measured speeds."""

    queue_s: float = 0.0  # computing the prompts ahead of this one
    compute_s: float = 0.0  # computing the uncached part of this prompt
    transfer_s: float = 0.0  # the part of the transfer that does not overlap with the computation
    is_measured: bool = False  # False: no worker has measured its speed, so only ratios are meaningful

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.queue_s + self.compute_s + self.transfer_s


class Decision(msgspec.Struct, frozen=True):
    """The chosen workers and the reasons. `is_fallback`: decode works alone because no prefill worker is ready."""

    prefill: Candidate | None
    decode: Candidate | None
    policy: str
    reasons: tuple[str, ...]
    is_fallback: bool = False
    expected: ExpectedLatency = ExpectedLatency()
    num_cached_tokens: int = 0  # expected in the cache of the worker that computes the prompt
    num_cached_blocks: int = 0  # expected in the cache of the decode worker

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the chosen workers."""
        chosen = self.prefill or self.decode
        return chosen.fingerprint if chosen is not None else ""

    @property
    def numerics(self) -> str:
        """The numerics of the worker that computes the prompt."""
        return self.computes.numerics if self.computes is not None else ""

    @property
    def computes(self) -> Candidate | None:
        """The worker that computes the prompt."""
        return self.prefill or self.decode


class NoPlacement(msgspec.Struct, frozen=True):
    """The request cannot be placed, because no worker is ready for it."""

    reason: str


class TypicalSpeeds(msgspec.Struct, frozen=True):
    """Medians over the workers with measurements, for those without. `transfer_bytes_s` is 0 if there is none."""

    prefill: StepCost = DEFAULT_COST
    decode: StepCost = DEFAULT_COST
    transfer_bytes_s: float = 0.0
    is_measured: bool = False

    @classmethod
    def of(cls, candidates: CandidateWorkers) -> TypicalSpeeds:
        """A role without measurements uses those of the other role, which runs the same model."""
        rates = [c.transfer_bytes_s for c in candidates.prefill if c.transfer_bytes_s]
        if all(c.step_cost is not None for c in (*candidates.prefill, *candidates.decode)):
            return cls(transfer_bytes_s=median(rates) if rates else 0.0, is_measured=True)
        prefill, decode = _median_cost(candidates.prefill), _median_cost(candidates.decode)
        return cls(
            prefill or decode or DEFAULT_COST,
            decode or prefill or DEFAULT_COST,
            median(rates) if rates else 0.0,
            prefill is not None or decode is not None,
        )


class Estimates(msgspec.Struct, frozen=True):
    """Estimates for one request."""

    demand: Demand
    typical: TypicalSpeeds = TypicalSpeeds()
    cached_blocks: CachedBlocks = {}
    arriving_blocks: CachedBlocks = {}  # with handoffs on their way: to be received, but not there for a prompt now

    def cost(self, worker: Candidate) -> StepCost:
        if worker.step_cost is not None:
            return worker.step_cost
        return self.typical.prefill if worker.role == "prefill" else self.typical.decode

    def cached_tokens(self, worker: Candidate) -> int:
        """Returns the prompt tokens that this worker need not compute. At least one token is always computed."""
        num_blocks = self.cached_blocks.get(worker.numerics, {}).get(worker.peer.peer_id)
        if not num_blocks:
            return 0
        size = worker.block_size
        return min(num_blocks, max(0, self.demand.num_prompt_tokens - 1) // size) * size

    def held_blocks(self, worker: Candidate, prefill: Candidate | None) -> int:
        """Returns the number of full prompt blocks that `prefill` need not send to this worker. None: this worker
        computes the prompt itself."""
        numerics, worker_id = (prefill or worker).numerics, worker.peer.peer_id
        num_blocks = self.cached_blocks.get(numerics, {}).get(worker_id, 0)
        if prefill is not None:
            num_blocks = max(num_blocks, self.arriving_blocks.get(numerics, {}).get(worker_id, 0))
        return min(num_blocks, self.demand.num_prompt_tokens // worker.block_size) if num_blocks else 0

    def queue_s(self, worker: Candidate) -> float:
        """Returns the time until the queued prompts are computed.

        The time since the first prompt began is subtracted, but never more than its whole estimate: a prompt that takes
        longer than estimated does not shorten the queue.
        """
        if worker.queued_tokens <= 0:
            return 0.0
        queue_s = self._work_s(worker, worker.queued_tokens, worker.queued_pairs)
        if self.typical.is_measured and worker.head_tokens:
            passed_s = max(0.0, self.demand.now_s - worker.head_since_s)
            queue_s -= min(passed_s, self._work_s(worker, worker.head_tokens, worker.head_pairs))
        return max(0.0, queue_s)

    def compute_s(self, worker: Candidate, num_cached: int | None = None) -> float:
        """Returns the time for the uncached part of the prompt, or for the part after `num_cached` tokens."""
        cached = self.cached_tokens(worker) if num_cached is None else num_cached
        num_tokens = self.demand.num_prompt_tokens - cached
        return self._work_s(worker, num_tokens, pairs(cached, num_tokens))

    def alone(self, worker: Candidate) -> ExpectedLatency:
        """Returns the latency on this worker without a handoff."""
        return ExpectedLatency(self.queue_s(worker), self.compute_s(worker), is_measured=self.typical.is_measured)

    def handed_over(self, prefill: Candidate, decode: Candidate) -> ExpectedLatency:
        """Returns the latency with a handoff. Of the transfer, only the part after the computation counts."""
        compute_s = self.compute_s(prefill)
        transfer_s = self.transfer_s(prefill, decode, compute_s)
        return ExpectedLatency(self.queue_s(prefill), compute_s, transfer_s, self.typical.is_measured)

    def stall_s(self, decode: Candidate) -> float:
        """Returns the sum of the delays of all streams on a decode worker that computes the prompt."""
        num_streams = decode.num_sequences - decode.num_pending
        if not num_streams:
            return 0.0
        cached = self.cached_tokens(decode)
        num_tokens = self.demand.num_prompt_tokens - cached
        cost = self.cost(decode)
        added_s = cost.token_s * num_tokens + cost.pair_s * pairs(cached, num_tokens)
        return added_s * num_streams

    def decode_s(self, decode: Candidate) -> float:
        """Returns the time for the first tokens in the worker's batch, with the handoffs on their way."""
        num_ahead = decode.num_sequences
        num_running = max(1, num_ahead - decode.num_pending)
        context = decode.context_tokens / num_running if decode.context_tokens else self.demand.num_prompt_tokens
        return HORIZON_TOKENS * self.cost(decode).step_s(num_ahead + 1, context * (num_ahead + 1))

    def has_room(self, decode: Candidate, prefill: Candidate | None) -> bool:
        """Returns whether the prompt's missing blocks and one more fit. True if the pool size is unknown."""
        num_blocks = -(-self.demand.num_prompt_tokens // decode.block_size) + 1
        return not decode.num_blocks or num_blocks - self.held_blocks(decode, prefill) <= decode.num_free_blocks

    def chunk_room(self, decode: Candidate) -> int:
        """Returns the number of prompt tokens that fit into one step beside the decodes."""
        return max(1, (decode.token_budget or DEFAULT_BUDGET) - decode.num_sequences)

    def _work_s(self, worker: Candidate, num_tokens: int, num_pairs: float) -> float:
        """Returns the time of prompt chunks that share their steps with the worker's decodes."""
        if num_tokens <= 0:
            return 0.0
        cost = self.cost(worker)
        if worker.role == "decode":
            num_steps = -(-num_tokens // self.chunk_room(worker))
            step_s = cost.step_s(worker.num_sequences - worker.num_pending, worker.context_tokens)
        else:
            num_steps = -(-num_tokens // (worker.token_budget or DEFAULT_BUDGET))
            step_s = cost.fixed_s
        return num_steps * step_s + cost.token_s * num_tokens + cost.pair_s * num_pairs

    def transfer_s(self, prefill: Candidate, decode: Candidate, compute_s: float) -> float:
        """Returns the part of the transfer that does not overlap with a computation of `compute_s` on `prefill`."""
        typical = prefill.transfer_bytes_s or self.typical.transfer_bytes_s
        rate = prefill.slow_links.get(decode.worker_id, typical)
        if not rate or not decode.block_bytes:
            return 0.0
        size = decode.block_size
        num_missing = -(-self.demand.num_prompt_tokens // size) - self.held_blocks(decode, prefill)
        num_uncached = self.demand.num_prompt_tokens - self.cached_tokens(prefill)
        # Blocks are pushed while later chunks are computed. The blocks of the last chunk are pushed after it.
        num_last = min(num_missing, -(-min(num_uncached, prefill.token_budget or DEFAULT_BUDGET) // size))
        block_s = decode.block_bytes / rate
        return max(num_missing * block_s - compute_s, num_last * block_s)


def _median_cost(workers: Iterable[Candidate]) -> StepCost | None:
    costs = [worker.step_cost for worker in workers if worker.step_cost is not None]
    if not costs:
        return None
    return StepCost(
        median(cost.fixed_s for cost in costs),
        median(cost.token_s for cost in costs),
        median(cost.pair_s for cost in costs),
    )
