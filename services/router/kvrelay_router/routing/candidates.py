"""What routing knows: the workers that may be chosen, and the request to be placed.

Structs and not dataclasses: dozens are made for each request, at a tenth of a frozen dataclass's cost.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from kvrelay.protocol.messages import PeerRef
from kvrelay.scheduling.step_cost import StepCost

Role = Literal["prefill", "decode"]


class Candidate(msgspec.Struct, frozen=True):
    """A worker that takes new requests, with its load and its speeds as known at this moment."""

    peer: PeerRef
    role: Role
    fingerprint: str
    queued_tokens: int = 0  # prompt tokens that wait for their computation or are in it, without cached ones
    num_sequences: int = 0  # that run, wait, or are to be handed over to it
    num_free_blocks: int = 0  # free, or cached and evictable, less those of handoffs to come
    queued_pairs: float = 0.0  # of the queued tokens and what they attend to
    head_tokens: int = 0  # of the queued tokens: those of the prompt that is being computed
    head_pairs: float = 0.0
    head_since_s: float = 0.0  # by the clock of `Demand.now_s`
    num_pending: int = 0  # of the sequences, those whose handoff is still to come
    context_tokens: int = 0  # of the running sequences
    recent_tokens: float = 0.0  # prompt tokens that it got to compute of late: how fast its cache turns over
    num_blocks: int = 0  # of the pool; 0: not known
    block_size: int = 16
    block_bytes: int = 0  # 0: not known
    token_budget: int = 0  # 0: not known
    step_cost: StepCost | None = None  # None: nothing was measured yet
    transfer_bytes_s: float | None = None  # at which it pushes blocks; None: nothing was measured yet

    @property
    def worker_id(self) -> str:
        """The worker's name in the fleet."""
        return self.peer.peer_id


class CandidateWorkers(msgspec.Struct, frozen=True):
    """All workers that take new requests, in the order of their names."""

    prefill: tuple[Candidate, ...] = ()
    decode: tuple[Candidate, ...] = ()

    @classmethod
    def of(cls, candidates: Iterable[Candidate]) -> CandidateWorkers:
        """Sorts them into their roles."""
        ordered = sorted(candidates, key=lambda candidate: candidate.worker_id)
        return cls(
            tuple(candidate for candidate in ordered if candidate.role == "prefill"),
            tuple(candidate for candidate in ordered if candidate.role == "decode"),
        )


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be placed. `ordinal` counts the decisions; with `request_id` it makes policies pure functions."""

    request_id: str
    num_prompt_tokens: int
    needs_decode: bool  # more than one token is to come
    ordinal: int = 0
    avoid: frozenset[str] = frozenset()  # worker ids to be taken only where no others are
    local_prefill_tokens: int | None = None  # up to so many go to decode alone; None: the policy's own judgement
    popularity: float = 0.0  # other requests of late that share what is cached of the prompt, see `PrefixPopularity`
    now_s: float = 0.0  # when it is placed
    reuse: float = 0.0  # share of the prompt tokens of late that were found cached: what a cached token is good for
    affinity: str = ""  # what `sticky` keeps together: a session, a user, or the prompt's beginning


class ExpectedLatency(msgspec.Struct, frozen=True):
    """Seconds until a request's tokens flow, as far as the measured speeds tell."""

    queue_s: float = 0.0  # prompts ahead of it
    compute_s: float = 0.0  # its own prompt, without what is cached
    transfer_s: float = 0.0  # what of the handoff is not hidden behind the computation
    is_measured: bool = False  # some worker has measured its speed: the seconds are real ones

    @property
    def ttft_s(self) -> float:
        """All of it."""
        return self.queue_s + self.compute_s + self.transfer_s


class Decision(msgspec.Struct, frozen=True):
    """Where a request goes, and why. `is_fallback`: decode works alone because no prefill worker is ready."""

    prefill: Candidate | None
    decode: Candidate | None
    policy: str
    reasons: tuple[str, ...]
    is_fallback: bool = False
    expected: ExpectedLatency = ExpectedLatency()
    num_cached_tokens: int = 0  # of the prompt, expected on the worker that computes it
    num_cached_blocks: int = 0  # expected on the decode worker

    @property
    def fingerprint(self) -> str:
        """Of the workers chosen."""
        chosen = self.prefill or self.decode
        return chosen.fingerprint if chosen is not None else ""

    @property
    def computes(self) -> Candidate | None:
        """Who computes the prompt."""
        return self.prefill or self.decode


class NoPlacement(msgspec.Struct, frozen=True):
    """Nobody can take the request now."""

    reason: str
