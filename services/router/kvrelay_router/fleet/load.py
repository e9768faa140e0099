"""The load that this router has sent to each worker and that has not ended, and circuit breakers. Unlike reports, both
are never late.

Each incarnation of a worker has a breaker; `now` is in monotonic seconds:

1. CLOSED     The worker gets requests. After `THRESHOLD` failures in a row, the breaker opens.
2. OPEN       The worker gets no requests for `COOLDOWN_S`, which doubles each time up to `LONGEST_S`.
3. HALF_OPEN  The worker gets one request. Success closes the breaker, failure opens it again. If neither comes within
              the cooldown because the client left, another request is sent.

A prefill worker succeeds with a first token, a decode worker with the end of a sequence or with a number of its tokens.
A failure counts if it is the worker's fault: the worker failed an attempt that another worker may serve. If all workers
of a role have open breakers, all of them are tried: a breaker prefers better workers, and refuses no request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from kvrelay.protocol.messages import PeerRef
from kvrelay_router.routing.estimates import Candidate, CandidateWorkers

THRESHOLD = 5
COOLDOWN_S = 2.0
LONGEST_S = 60.0

WorkerKey = tuple[str, str]
"""(worker id, incarnation)."""


def worker_key(peer: PeerRef) -> WorkerKey:
    """Returns the key of a worker's incarnation. The address does not matter."""
    return peer.peer_id, peer.incarnation


class WorkerLoad(msgspec.Struct):
    num_tokens: int = 0  # uncomputed prompt tokens, without those expected in the cache
    num_sequences: int = 0
    num_pairs: float = 0.0  # pairs of an uncomputed token and a token it attends to
    num_pending: int = 0  # sequences that wait for their handoff
    num_pending_blocks: int = 0  # blocks that those will use

    def add(self, other: WorkerLoad, sign: int = 1) -> None:
        """Adds another load, or subtracts it if `sign` is -1."""
        self.num_sequences += sign * other.num_sequences
        if other.num_tokens:  # a decode worker's share has none
            self.num_tokens += sign * other.num_tokens
            self.num_pairs += sign * other.num_pairs
        if other.num_pending:
            self.num_pending += sign * other.num_pending
            self.num_pending_blocks += sign * other.num_pending_blocks


class InWork(msgspec.Struct, frozen=True):
    """The prompt at the head of a worker's queue: its uncomputed tokens, and when its computation began."""

    num_tokens: int = 0  # 0: none
    num_pairs: float = 0.0
    since_s: float = 0.0


@dataclass(slots=True)
class _Prompts:
    since_s: float  # time at which a prompt last began or ended
    shares: dict[int, WorkerLoad] = field(default_factory=dict)  # keyed by `id(held)`, in the order of sending


@dataclass(slots=True)
class Held:
    """The present share of one sequence in the load of its workers."""

    shares: dict[WorkerKey, WorkerLoad] = field(default_factory=dict)
    is_waiting: bool = False  # its prompt is not computed, or its handoff not done: its share will change


class OutstandingLoad:
    """The sum over all running sequences. A sequence's share is moved, never counted twice. `clock` is in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._workers: dict[WorkerKey, WorkerLoad] = {}
        self._prompts: dict[WorkerKey, _Prompts] = {}
        self._computed: dict[WorkerKey, float] = {}
        self.changed: set[WorkerKey] = set()
        """Workers whose load has changed since a cache of loads last cleared this set."""

    def of(self, key: WorkerKey) -> WorkerLoad:
        """Returns a worker's load; zero if nothing is outstanding."""
        return self._workers.get(key) or WorkerLoad()

    def in_work(self, key: WorkerKey) -> InWork:
        """Returns the prompt that a worker computes now, as far as this router knows: the oldest one."""
        prompts = self._prompts.get(key)
        if prompts is None:
            return InWork()
        first = next(iter(prompts.shares.values()))
        return InWork(first.num_tokens, first.num_pairs, prompts.since_s)

    def move(
        self,
        held: Held,
        computes: PeerRef | None,
        num_tokens: int,
        decode: PeerRef | None,
        *,
        num_pairs: float = 0.0,
        num_pending_blocks: int = 0,
    ) -> None:
        """`computes` now has `num_tokens` of the sequence's prompt to compute, and `decode` runs the sequence.

        `num_pending_blocks` are the blocks that decode will use after a handoff; 0 after the handoff.
        """
        shares: dict[WorkerKey, WorkerLoad] = {}
        if decode is not None:
            is_pending = num_pending_blocks > 0
            shares[worker_key(decode)] = WorkerLoad(0, 1, 0.0, int(is_pending), num_pending_blocks)
        if computes is not None:
            share = shares.setdefault(worker_key(computes), WorkerLoad(0, 1))
            share.num_tokens, share.num_pairs = num_tokens, num_pairs
        before, held.shares = held.shares, shares
        if shares == before:
            return
        for key, share in before.items():
            if share != (now := shares.get(key)):
                self._add(key, share, -1)
                self._queue(key, held, now)
                self.changed.add(key)
        held.is_waiting = False
        for key, share in shares.items():
            if share != (was := before.get(key)):
                self._add(key, share, 1)
                if was is None:
                    self._queue(key, held, share)
                    self.changed.add(key)
            if share.num_tokens or share.num_pending:
                held.is_waiting = True

    def recent_tokens(self, key: WorkerKey) -> float:
        """Returns the prompt tokens that this router gave a worker to compute. Older ones have a smaller weight."""
        return self._computed.get(key, 0.0)

    def gave(self, key: WorkerKey, num_tokens: int, pool_tokens: int) -> None:
        """A worker got prompt tokens to compute. Once one got a pool full of them, all earlier tokens count half."""
        total = self._computed[key] = self._computed.get(key, 0.0) + num_tokens
        self.changed.add(key)
        if pool_tokens and total > pool_tokens:
            self.changed |= self._computed.keys()
            self._computed = {each: tokens / 2 for each, tokens in self._computed.items() if tokens > 1}

    @property
    def is_empty(self) -> bool:
        """True if nothing is outstanding on any worker."""
        return not self._workers

    def check_integrity(self) -> None:
        """Raises AssertionError if more was subtracted than added."""
        for key, load in self._workers.items():
            assert load.num_tokens >= 0 and load.num_sequences > 0, (key, load)
            assert 0 <= load.num_pending <= load.num_sequences and load.num_pending_blocks >= 0, (key, load)
            prompts = self._prompts.get(key)
            queued = sum(share.num_tokens for share in prompts.shares.values()) if prompts is not None else 0
            assert queued == load.num_tokens, (key, queued, load)
        assert not self._prompts.keys() - self._workers.keys()

    def _queue(self, key: WorkerKey, held: Held, share: WorkerLoad | None) -> None:
        """Keeps the order of a worker's prompts, and the time when the first one began."""
        prompts = self._prompts.get(key)
        if share is not None and share.num_tokens:
            if prompts is None:
                prompts = self._prompts[key] = _Prompts(self._clock())
            prompts.shares[id(held)] = share
        elif prompts is not None and prompts.shares.pop(id(held), None) is not None:
            prompts.since_s = self._clock()
            if not prompts.shares:
                del self._prompts[key]

    def _add(self, key: WorkerKey, share: WorkerLoad, sign: int) -> None:
        load = self._workers.setdefault(key, WorkerLoad())
        load.add(share, sign)
        if load.num_sequences == 0:
            del self._workers[key]


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(slots=True)
class _Breaker:
    num_failures: int = 0  # since the last success
    cooldown_s: float = 0.0  # 0: closed
    until: float = 0.0  # the worker gets no request before this time
    probing: bool = False


class Breakers:
    """The breakers of all workers. Those without a failure since their last success have no entry in `by_worker`."""

    def __init__(self) -> None:
        self.by_worker: dict[WorkerKey, _Breaker] = {}

    def state(self, key: WorkerKey, now: float) -> BreakerState:
        """The module's docstring explains the states."""
        breaker = self.by_worker.get(key)
        if breaker is None or not breaker.cooldown_s:
            return BreakerState.CLOSED
        return BreakerState.HALF_OPEN if breaker.probing or now >= breaker.until else BreakerState.OPEN

    def usable(self, candidates: CandidateWorkers, now: float) -> CandidateWorkers:
        """Returns the workers that may be tried, or all workers of a role if none may."""
        if not self.by_worker:
            return candidates
        return CandidateWorkers(self._allowed(candidates.prefill, now), self._allowed(candidates.decode, now))

    def dispatched(self, key: WorkerKey, now: float) -> None:
        """A request was sent to the worker. In HALF_OPEN, it is the one request."""
        breaker = self.by_worker.get(key)
        if breaker is not None and breaker.cooldown_s and now >= breaker.until:
            breaker.probing = True
            breaker.until = now + breaker.cooldown_s

    def succeeded(self, key: WorkerKey) -> None:
        self.by_worker.pop(key, None)

    def failed(self, key: WorkerKey, now: float) -> bool:
        """The worker failed an attempt. Returns whether that opened its breaker."""
        breaker = self.by_worker.setdefault(key, _Breaker())
        breaker.num_failures += 1
        is_closed = not breaker.cooldown_s
        if is_closed and breaker.num_failures < THRESHOLD:
            return False
        if not is_closed and not breaker.probing:
            return False  # the request was sent before the breaker opened
        doubled = COOLDOWN_S if is_closed else 2 * breaker.cooldown_s
        breaker.cooldown_s = min(doubled, LONGEST_S)
        breaker.until = now + breaker.cooldown_s
        breaker.probing = False
        return True

    def gone(self, worker_id: str) -> None:
        """A worker ended. Its next incarnation starts CLOSED."""
        for key in [key for key in self.by_worker if key[0] == worker_id]:
            del self.by_worker[key]

    def _allowed(self, workers: Sequence[Candidate], now: float) -> tuple[Candidate, ...]:
        allowed = [worker for worker in workers if self._may_try(worker_key(worker.peer), now)]
        return tuple(allowed or workers)

    def _may_try(self, key: WorkerKey, now: float) -> bool:
        breaker = self.by_worker.get(key)
        return breaker is None or not breaker.cooldown_s or now >= breaker.until
