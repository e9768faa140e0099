"""The input and output of routing: the workers that may be chosen, the request, and the decision.

These are structs because each request makes dozens, and a frozen dataclass costs ten times as much.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from kvrelay.protocol.messages import PeerRef
from kvrelay.scheduling.step_cost import StepCost

Role = Literal["prefill", "decode"]


class Candidate(msgspec.Struct, frozen=True):
    """A worker that accepts new requests, with its present load and its measured speeds."""

    peer: PeerRef
    role: Role
    fingerprint: str
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

    @property
    def worker_id(self) -> str:
        """The worker's name in the fleet."""
        return self.peer.peer_id


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
    def computes(self) -> Candidate | None:
        """The worker that computes the prompt."""
        return self.prefill or self.decode


class NoPlacement(msgspec.Struct, frozen=True):
    """The request cannot be placed, because no worker is ready for it."""

    reason: str
