"""What routing knows: the workers that may be chosen, and the request to be placed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from kvrelay.protocol.messages import PeerRef

Role = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that takes new requests, with its load as known at this moment."""

    peer: PeerRef
    role: Role
    fingerprint: str
    queued_tokens: int = 0  # prompt tokens that wait for prefill or are in it
    num_sequences: int = 0  # that run or wait
    num_free_blocks: int = 0  # free, or cached and evictable

    @property
    def worker_id(self) -> str:
        """The worker's name in the fleet."""
        return self.peer.peer_id


@dataclass(frozen=True, slots=True)
class Candidates:
    """All workers that take new requests, in the order of their names."""

    prefill: tuple[Candidate, ...] = ()
    decode: tuple[Candidate, ...] = ()

    @classmethod
    def of(cls, candidates: Iterable[Candidate]) -> Candidates:
        """Sorts them into their roles."""
        ordered = sorted(candidates, key=lambda candidate: candidate.worker_id)
        return cls(
            tuple(candidate for candidate in ordered if candidate.role == "prefill"),
            tuple(candidate for candidate in ordered if candidate.role == "decode"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What is to be placed. `ordinal` counts the decisions; with `request_id` it makes policies pure functions."""

    request_id: str
    num_prompt_tokens: int
    needs_decode: bool  # more than one token is to come
    ordinal: int = 0
    avoid: frozenset[str] = frozenset()  # worker ids to be taken only where no others are
    local_prefill_tokens: int = 0  # prompts not longer than this go to decode alone


@dataclass(frozen=True, slots=True)
class Decision:
    """Where a request goes, and why. `is_fallback`: decode works alone because no prefill worker is ready."""

    prefill: Candidate | None
    decode: Candidate | None
    policy: str
    reasons: tuple[str, ...]
    is_fallback: bool = False

    @property
    def fingerprint(self) -> str:
        """Of the workers chosen."""
        chosen = self.prefill or self.decode
        return chosen.fingerprint if chosen is not None else ""


@dataclass(frozen=True, slots=True)
class NoPlacement:
    """Nobody can take the request now."""

    reason: str
