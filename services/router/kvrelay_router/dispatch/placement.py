"""Applies the routing policy to the present fleet, keeps the last decisions, and reports fallbacks."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvrelay.kv.hashing import BlockHash, hash_blocks, root_hash
from kvrelay.protocol.messages import PeerRef, pack_tokens
from kvrelay.scheduling.step_cost import pairs
from kvrelay_router.dispatch.interface import TooLate
from kvrelay_router.fleet.load import Breakers, WorkerKey, worker_key
from kvrelay_router.fleet.view import FleetView
from kvrelay_router.routing.estimates import (
    BlockNaming,
    CachedBlocks,
    Candidate,
    CandidateWorkers,
    Decision,
    Demand,
    NoPlacement,
)
from kvrelay_router.routing.expected_prefixes import ExpectedPrefixes, PrefixPopularity, PrefixView
from kvrelay_router.routing.policy import PolicyName, decide, decide_decode

log = logging.getLogger(__name__)

LAST_DECISIONS = 50
PLACEMENTS = ("disaggregated", "prefill_alone", "decode_alone")
AFFINITY_TOKENS = 512
"""`sticky` sends requests without a session to one worker if this many first tokens of their prompts are equal."""
MOST_SESSIONS = 16_384
"""Sessions whose workers are remembered, those of the latest requests."""
REUSE_REQUESTS = 256
EXPECTED_LIFETIME_S = 30.0
"""With a prefix index: the time after which the index has reported what a decision put into a cache."""


@dataclass(slots=True)
class Fallbacks:
    """Counts requests that decode computed alone because no prefill worker was ready."""

    num_requests: int = 0
    is_active: bool = False
    reason: str = ""


class Work(msgspec.Struct, frozen=True):
    """The load of an attempt: prompt tokens and pairs to compute, and blocks that decode will use."""

    num_tokens: int = 0
    num_pairs: float = 0.0
    num_decode_blocks: int = 0


class DecisionRecord(msgspec.Struct, frozen=True):
    request_id: str
    num_prompt_tokens: int
    at: float  # Unix seconds
    decision: Decision | NoPlacement

    def as_json(self) -> dict[str, Any]:
        about = {"request_id": self.request_id, "num_prompt_tokens": self.num_prompt_tokens, "at": self.at}
        return about | as_json(self.decision)


class Reuse:
    """The share of prompt tokens that were found cached, over about the last `REUSE_REQUESTS` requests."""

    def __init__(self) -> None:
        self._num_cached = self._num_tokens = 0.0

    def count(self, num_cached: int, num_tokens: int) -> None:
        kept = 1 - 1 / REUSE_REQUESTS
        self._num_cached = kept * self._num_cached + num_cached
        self._num_tokens = kept * self._num_tokens + num_tokens

    @property
    def share(self) -> float:
        """Between 0 and 1."""
        return self._num_cached / self._num_tokens if self._num_tokens else 0.0


class PromptPrefixes:
    """A prompt's tokens as bytes, and its block hashes, made once for each naming in the fleet."""

    def __init__(
        self,
        prompt_ids: list[int] | NDArray[np.int32],
        cache_salt: str = "",
        affinity: str = "",
        *,
        session_key: str = "",
    ) -> None:
        self.session_key = session_key
        self.packed = pack_tokens(prompt_ids)
        self._prompt_ids = np.frombuffer(self.packed, dtype="<i4")
        self._cache_salt = cache_salt
        self._affinity = affinity
        self._hashes: dict[BlockNaming, list[BlockHash]] = {}
        self.sent_to: set[WorkerKey] = set()
        """Workers that got the prompt for any of the request's sequences."""

    @property
    def num_tokens(self) -> int:
        """The length of the prompt."""
        return len(self._prompt_ids)

    @property
    def affinity(self) -> str:
        """Requests with equal affinity go to one worker with the policy `sticky`."""
        if not self._affinity and len(self._prompt_ids):
            beginning = self._prompt_ids[:AFFINITY_TOKENS]
            self._affinity = hash_blocks(root_hash(model="", cache_salt=self._cache_salt), beginning, len(beginning))[
                0
            ].hex()
        return self._affinity

    def hashes(self, naming: BlockNaming) -> list[BlockHash]:
        """Returns the hashes of the prompt's full blocks, as workers with this naming compute them."""
        if naming not in self._hashes:
            root = root_hash(model=naming.fingerprint, numerics=naming.numerics, cache_salt=self._cache_salt)
            self._hashes[naming] = hash_blocks(root, self._prompt_ids, naming.block_size)
        return self._hashes[naming]


class Placement:
    """Places attempts. Synchronous: no other placement happens before the chosen workers' load is updated."""

    def __init__(
        self,
        view: FleetView,
        policy: PolicyName,
        local_prefill_tokens: int | None,
        index: PrefixView | None = None,
        *,
        is_silent: Callable[[PeerRef], bool] = lambda peer: False,
        clock: Callable[[], float] = time.monotonic,
        expects_prefill: bool = True,
    ) -> None:
        """`is_silent`: the last message of a worker is so old that it may be dead. `expects_prefill`: a fleet without
        prefill workers is reported as a fallback."""
        self.is_silent = is_silent
        self._clock = clock
        self._expects_prefill = expects_prefill
        self.fallbacks = Fallbacks()
        self.num_placed = dict.fromkeys(PLACEMENTS, 0)
        self.breakers = Breakers()
        self._last_decisions: deque[DecisionRecord] = deque(maxlen=LAST_DECISIONS)
        self._view = view
        self._policy = policy
        self._local_prefill_tokens = local_prefill_tokens
        self._prefixes = ExpectedPrefixes(index, None if index is None else EXPECTED_LIFETIME_S)
        self._arriving = ExpectedPrefixes(lifetime_s=EXPECTED_LIFETIME_S)  # with handoffs, at their decode workers
        self._popularity = PrefixPopularity()
        self._reuse = Reuse()
        self._session_workers: OrderedDict[str, frozenset[str]] = OrderedDict()  # key: session; of its latest request
        self._ordinal = 0

    @property
    def last_decisions(self) -> list[dict[str, Any]]:
        """JSON-ready, the latest one at the end."""
        return [each.as_json() for each in self._last_decisions]

    def is_possible(self, *, needs_decode: bool = True) -> bool:
        """Returns whether a request could be placed. `needs_decode`: more than one token has to be generated."""
        ready = self._view.candidates(self._clock())
        return bool(ready.decode or (not needs_decode and ready.prefill))

    def namings(self) -> frozenset[BlockNaming]:
        """Returns those of the ready workers."""
        return self._view.namings(self._clock())

    def place(
        self,
        request_id: str,
        *,
        prompt: PromptPrefixes,
        needs_decode: bool,
        num_output: int = 0,
        avoid: frozenset[str] = frozenset(),
        hands_over: bool = True,
        numerics: str = "",
        deadline_s: float | None = None,
    ) -> Decision | NoPlacement:
        """Chooses workers for a new attempt. `num_output` are tokens of earlier attempts, computed again as prompt.
        `hands_over`: False after a handoff that failed. `numerics`: of earlier attempts; workers with the same are
        preferred.

        If the policy's choice is expected to miss `deadline_s`, the fastest placement is used. Raises TooLate if the
        fastest one is expected to miss it, too. Without measured speeds, no request is refused.
        """
        candidates = self._candidates()
        cached, arriving = self._match(self._prefixes, prompt), self._match(self._arriving, prompt)
        demand = Demand(
            request_id=request_id,
            num_prompt_tokens=prompt.num_tokens + num_output,
            popularity=self._popularity_of(prompt, candidates, cached),
            reuse=self._reuse.share,
            now_s=self._clock(),
            needs_decode=needs_decode,
            ordinal=self._next_ordinal(),
            avoid=avoid,
            hands_over=hands_over,
            numerics=numerics,
            local_prefill_tokens=self._local_prefill_tokens,
            affinity=prompt.affinity if self._policy == "sticky" else "",
            session_workers=self._session_workers.get(prompt.session_key, frozenset()),
        )
        decision = decide(self._policy, demand, candidates, cached, arriving)
        if _is_late(decision, deadline_s):
            decision = decide("cost", demand, candidates, cached, arriving)
            if isinstance(decision, Decision) and deadline_s is not None and _is_late(decision, deadline_s):
                raise TooLate(decision.expected.ttft_s, deadline_s)
        self._record(demand, decision)
        if isinstance(decision, Decision):
            self._count(decision)
            self._note_fallback(decision)
        return decision

    def is_usable(self, decision: Decision) -> bool:
        """Returns whether the chosen workers may still be chosen."""
        candidates = self._candidates()
        return (decision.prefill is None or decision.prefill.peer in [each.peer for each in candidates.prefill]) and (
            decision.decode is None or decision.decode.peer in [each.peer for each in candidates.decode]
        )

    def placed(self, decision: Decision, prompt: PromptPrefixes) -> None:
        """The decision was carried out, so its workers will hold the prompt's blocks."""
        if decision.computes is not None:
            chosen = decision.computes
            if not prompt.sent_to:  # choices of one request and its retries do not make a prefix popular
                self._popularity.used(prompt.hashes(chosen.naming), self._clock())
                self._reuse.count(decision.num_cached_tokens, prompt.num_tokens)
            self._view.assigned(decision.computes, max(0, prompt.num_tokens - decision.num_cached_tokens))
        workers = [worker for worker in (decision.prefill, decision.decode) if worker is not None]
        if prompt.session_key:
            # If a session has concurrent requests, the workers of the latest one are kept.
            self._session_workers[prompt.session_key] = frozenset(worker.worker_id for worker in workers)
            self._session_workers.move_to_end(prompt.session_key)
            if len(self._session_workers) > MOST_SESSIONS:
                self._session_workers.popitem(last=False)
        for worker in workers:
            key = worker_key(worker.peer)
            self.breakers.dispatched(key, self._clock())
            if key in prompt.sent_to:
                continue
            prompt.sent_to.add(key)
            self._expect(self._prefixes if worker is decision.computes else self._arriving, worker, decision, prompt)

    def handed_over(self, decision: Decision, prompt: PromptPrefixes) -> None:
        """Decode has committed the handoff, so it holds the prompt's blocks."""
        assert decision.decode is not None
        self._expect(self._prefixes, decision.decode, decision, prompt)

    def _expect(
        self, prefixes: ExpectedPrefixes, worker: Candidate, decision: Decision, prompt: PromptPrefixes
    ) -> None:
        prefixes.now = self._clock()
        hashes = prompt.hashes((decision.computes or worker).naming)
        prefixes.sent(worker.worker_id, hashes, worker.num_blocks)

    def session_ended(self, session_key: str) -> None:
        self._session_workers.pop(session_key, None)

    def gone(self, worker_id: str) -> None:
        """A worker ended, and its cache is lost."""
        self.breakers.gone(worker_id)
        self._prefixes.gone(worker_id)
        self._arriving.gone(worker_id)

    def place_decode(
        self,
        request_id: str,
        prompt: PromptPrefixes,
        fingerprint: str,
        excluded: frozenset[WorkerKey],
        *,
        numerics: str = "",
    ) -> Candidate | None:
        """Chooses another decode worker for a handoff from a prefill worker with this fingerprint and these numerics.
        Incarnations in `excluded` are not chosen."""
        demand = Demand(
            request_id=request_id,
            num_prompt_tokens=prompt.num_tokens,
            needs_decode=True,
            numerics=numerics,
            now_s=self._clock(),
            ordinal=self._next_ordinal(),
            affinity=prompt.affinity if self._policy == "sticky" else "",
            session_workers=self._session_workers.get(prompt.session_key, frozenset()),
        )
        candidates = self._candidates(excluded)
        cached, arriving = self._match(self._prefixes, prompt), self._match(self._arriving, prompt)
        return decide_decode(self._policy, demand, candidates, fingerprint, cached, arriving)

    def has_decode(self, fingerprint: str) -> bool:
        """Returns whether any decode worker of this model is ready."""
        return any(worker.fingerprint == fingerprint for worker in self._view.candidates(self._clock()).decode)

    def _candidates(self, excluded: frozenset[WorkerKey] = frozenset()) -> CandidateWorkers:
        now = self._clock()
        ready = self._view.candidates(now)
        decode = ready.decode
        if excluded:
            decode = tuple(worker for worker in decode if worker_key(worker.peer) not in excluded)
        return self.breakers.usable(CandidateWorkers(self._responsive(ready.prefill), self._responsive(decode)), now)

    def _responsive(self, workers: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
        """Returns workers with recent messages, or all if there are none: then this router may be cut off."""
        responsive = [worker for worker in workers if not self.is_silent(worker.peer)]
        return workers if len(responsive) == len(workers) or not responsive else tuple(responsive)

    def _popularity_of(self, prompt: PromptPrefixes, candidates: CandidateWorkers, cached: CachedBlocks) -> float:
        """Returns the popularity of the longest prefix that a prefill worker holds."""
        num_held, holder = 0, None
        for worker in candidates.prefill:
            if (held := cached.get(worker.numerics, {}).get(worker.worker_id, 0)) > num_held:
                num_held, holder = held, worker
        if holder is None:
            return 0.0
        return self._popularity.of(prompt.hashes(holder.naming)[:num_held], self._clock())

    def _match(self, prefixes: ExpectedPrefixes, prompt: PromptPrefixes) -> CachedBlocks:
        prefixes.now = self._clock()
        found: dict[str, dict[str, int]] = {}
        for naming in self.namings():
            # Hashes cover the fingerprint, so workers of another one match nothing.
            found.setdefault(naming.numerics, {}).update(prefixes.match(prompt.hashes(naming)))
        return found

    def _next_ordinal(self) -> int:
        self._ordinal += 1
        return self._ordinal - 1

    def _record(self, demand: Demand, decision: Decision | NoPlacement) -> None:
        placed = DecisionRecord(demand.request_id, demand.num_prompt_tokens, time.time(), decision)
        self._last_decisions.append(placed)
        if log.isEnabledFor(logging.DEBUG):
            log.debug("route %s: %s", demand.request_id, placed.as_json())

    def _count(self, decision: Decision) -> None:
        """The counts show an operator that all prompts stay on decode, for whatever reason."""
        alone = "prefill_alone" if decision.decode is None else "decode_alone"
        self.num_placed["disaggregated" if decision.prefill and decision.decode else alone] += 1

    def _note_fallback(self, decision: Decision) -> None:
        if decision.is_fallback and self._expects_prefill:
            self.fallbacks.num_requests += 1
            if not self.fallbacks.is_active:
                self.fallbacks.reason = decision.reasons[0]
                log.warning("nothing is disaggregated at the moment: %s", decision.reasons[0])
            self.fallbacks.is_active = True
        elif self.fallbacks.is_active and decision.prefill is not None:
            log.info("prefill workers take part again, after %d requests without", self.fallbacks.num_requests)
            self.fallbacks.is_active = False


def _is_late(decision: Decision | NoPlacement, deadline_s: float | None) -> bool:
    if deadline_s is None or isinstance(decision, NoPlacement):
        return False
    return decision.expected.is_measured and decision.expected.ttft_s > deadline_s


def work_of(decision: Decision, num_tokens: int, sent_to: Collection[WorkerKey] = ()) -> Work:
    """Returns the load that an attempt with a prompt of `num_tokens` adds to its workers.

    If a worker already got the prompt for another sequence of the request, only the last block is left to compute.
    """
    num_cached, num_blocks = decision.num_cached_tokens, 0
    if decision.computes is not None and worker_key(decision.computes.peer) in sent_to:
        num_cached = max(num_cached, _full_blocks(num_tokens - 1, decision.computes) * decision.computes.block_size)
    num_uncached = max(0, num_tokens - num_cached)
    if decision.prefill is not None and decision.decode is not None:
        num_held = decision.num_cached_blocks
        if worker_key(decision.decode.peer) in sent_to:
            num_held = max(num_held, _full_blocks(num_tokens, decision.decode))
        num_blocks = max(1, -(-num_tokens // decision.decode.block_size) - num_held)
    return Work(num_uncached, pairs(num_cached, num_uncached), num_blocks)


def _full_blocks(num_tokens: int, worker: Candidate) -> int:
    return num_tokens // worker.block_size


def as_json(decision: Decision | NoPlacement) -> dict[str, Any]:
    """JSON-ready, with its reasons."""
    if isinstance(decision, NoPlacement):
        return {"refused": decision.reason}
    expected = decision.expected
    return {
        "prefill": decision.prefill.worker_id if decision.prefill is not None else None,
        "decode": decision.decode.worker_id if decision.decode is not None else None,
        "policy": decision.policy,
        "reasons": list(decision.reasons),
        "cached_tokens": decision.num_cached_tokens,
        "expected_ms": {
            "queue": round(expected.queue_s * 1e3, 3),
            "compute": round(expected.compute_s * 1e3, 3),
            "transfer": round(expected.transfer_s * 1e3, 3),
        },
    }
