"""What this router has sent to each worker and not seen the end of: load that no report can be late for."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from kvrelay.protocol.messages import PeerRef

WorkerKey = tuple[str, str]
"""(worker id, incarnation)."""


def worker_key(peer: PeerRef) -> WorkerKey:
    """Of one start of a worker, wherever its address was learned."""
    return peer.peer_id, peer.incarnation


class WorkerLoad(msgspec.Struct):
    """Of one worker, from one source."""

    num_tokens: int = 0  # of prompts that are not computed yet, without what was expected in the cache
    num_sequences: int = 0
    num_pairs: float = 0.0  # of those tokens and what they attend to
    num_pending: int = 0  # sequences whose handoff is still to come
    num_pending_blocks: int = 0  # that those will take

    def add(self, other: WorkerLoad, sign: int = 1) -> None:
        """Adds another load, or takes it off."""
        self.num_tokens += sign * other.num_tokens
        self.num_sequences += sign * other.num_sequences
        self.num_pairs += sign * other.num_pairs
        self.num_pending += sign * other.num_pending
        self.num_pending_blocks += sign * other.num_pending_blocks


class InWork(msgspec.Struct, frozen=True):
    """The prompt at the head of a worker's queue: what of it was to be computed, and since when it has been."""

    num_tokens: int = 0  # 0: none
    num_pairs: float = 0.0
    since_s: float = 0.0


@dataclass(slots=True)
class _Prompts:
    since_s: float  # the last time that one began or ended
    shares: dict[int, WorkerLoad] = field(default_factory=dict)  # by identity of `Held`, as they were sent


@dataclass(slots=True)
class Held:
    """What one sequence adds to its workers' load at the moment."""

    shares: dict[WorkerKey, WorkerLoad] = field(default_factory=dict)
    is_waiting: bool = False  # for its prompt, or for its handoff: the next message may change what it adds


class OutstandingLoad:
    """Adds up over all running sequences; each sequence's share is moved, never counted twice. `clock`: seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._workers: dict[WorkerKey, WorkerLoad] = {}
        self._prompts: dict[WorkerKey, _Prompts] = {}
        self._computed: dict[WorkerKey, float] = {}
        self.changed: set[WorkerKey] = set()
        """Workers of which answers may differ from those before this was last cleared, by whoever keeps answers."""

    def of(self, key: WorkerKey) -> WorkerLoad:
        """A worker's load; zero where nothing is outstanding."""
        return self._workers.get(key) or WorkerLoad()

    def in_work(self, key: WorkerKey) -> InWork:
        """The prompt that a worker computes now, as far as this router knows: the one it got first."""
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
        """A sequence now waits for `computes` to compute `num_tokens`, and rests on `decode`.

        `num_pending_blocks`: what it will take there at a handoff that is still to come; 0 once it has.
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
        """Prompt tokens that this router gave a worker to compute, older ones at half their weight or less."""
        return self._computed.get(key, 0.0)

    def gave(self, key: WorkerKey, num_tokens: int, pool_tokens: int) -> None:
        """A worker got prompt tokens to compute. Once one has had a pool full of them, all that was counts half."""
        total = self._computed[key] = self._computed.get(key, 0.0) + num_tokens
        self.changed.add(key)
        if pool_tokens and total > pool_tokens:
            self.changed |= self._computed.keys()
            self._computed = {each: tokens / 2 for each, tokens in self._computed.items() if tokens > 1}

    @property
    def is_empty(self) -> bool:
        """Nothing is outstanding anywhere."""
        return not self._workers

    def check_integrity(self) -> None:
        """Raises AssertionError where something was taken off that had not been added."""
        for key, load in self._workers.items():
            assert load.num_tokens >= 0 and load.num_sequences > 0, (key, load)
            assert 0 <= load.num_pending <= load.num_sequences and load.num_pending_blocks >= 0, (key, load)
            prompts = self._prompts.get(key)
            queued = sum(share.num_tokens for share in prompts.shares.values()) if prompts is not None else 0
            assert queued == load.num_tokens, (key, queued, load)
        assert not self._prompts.keys() - self._workers.keys()

    def _queue(self, key: WorkerKey, held: Held, share: WorkerLoad | None) -> None:
        """Keeps the order of a worker's prompts, and since when it has had the first one to itself."""
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
