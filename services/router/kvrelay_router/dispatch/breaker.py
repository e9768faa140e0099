"""A circuit breaker for each start of a worker. No I/O; `now` is monotonic seconds.

1. CLOSED     takes requests. After `threshold` failures of the worker in a row, without one success between: OPEN.
2. OPEN       takes none for a while (`cooldown_s`, doubled each time up to `longest_s`), then HALF_OPEN.
3. HALF_OPEN  takes one request. Its success closes, its failure opens again; where neither comes within the cooldown
              (the client left), another one may try.

A prefill worker succeeds with a first token, a decode worker with a sequence's end or after a number of its tokens.
Only what is the worker's fault counts: attempts that it failed and that another worker may serve. A request that no
worker can serve, a client that leaves and a deadline that passes count for nothing. Where all workers of a role are
open, all are tried: a breaker keeps requests from a bad worker while there is a better one, and refuses nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvrelay_router.dispatch.load import WorkerKey, worker_key
from kvrelay_router.routing.candidates import Candidate, CandidateWorkers


class BreakerState(StrEnum):
    """See the module's text."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class BreakerSettings:
    """Times in seconds."""

    threshold: int = 5
    cooldown_s: float = 2.0
    longest_s: float = 60.0


@dataclass(slots=True)
class _Breaker:
    num_failures: int = 0  # in a row
    cooldown_s: float = 0.0  # 0: closed
    until: float = 0.0  # no request before
    probing: bool = False


class Breakers:
    """Of all workers; those without a failure cost nothing."""

    def __init__(self, settings: BreakerSettings | None = None) -> None:
        self._settings = settings or BreakerSettings()
        self._workers: dict[WorkerKey, _Breaker] = {}

    @property
    def has_failures(self) -> bool:
        """Whether a worker has failed lately, so that a success matters."""
        return bool(self._workers)

    def state(self, key: WorkerKey, now: float) -> BreakerState:
        """See the module's text."""
        breaker = self._workers.get(key)
        if breaker is None or not breaker.cooldown_s:
            return BreakerState.CLOSED
        return BreakerState.HALF_OPEN if breaker.probing or now >= breaker.until else BreakerState.OPEN

    def usable(self, candidates: CandidateWorkers, now: float) -> CandidateWorkers:
        """Those that may be tried; of a role of which none may, all."""
        if not self._workers:
            return candidates
        return CandidateWorkers(self._allowed(candidates.prefill, now), self._allowed(candidates.decode, now))

    def dispatched(self, key: WorkerKey, now: float) -> None:
        """A request went to the worker: if it is half open, that was the one."""
        breaker = self._workers.get(key)
        if breaker is not None and breaker.cooldown_s and now >= breaker.until:
            breaker.probing = True
            breaker.until = now + breaker.cooldown_s

    def succeeded(self, key: WorkerKey) -> None:
        """The worker did what it was asked for."""
        self._workers.pop(key, None)

    def failed(self, key: WorkerKey, now: float) -> bool:
        """The worker failed an attempt. Whether that opened its breaker."""
        breaker = self._workers.setdefault(key, _Breaker())
        breaker.num_failures += 1
        is_closed = not breaker.cooldown_s
        if is_closed and breaker.num_failures < self._settings.threshold:
            return False
        if not is_closed and not breaker.probing:
            return False  # of a request that was sent before it opened
        doubled = self._settings.cooldown_s if is_closed else 2 * breaker.cooldown_s
        breaker.cooldown_s = min(doubled, self._settings.longest_s)
        breaker.until = now + breaker.cooldown_s
        breaker.probing = False
        return True

    def gone(self, worker_id: str) -> None:
        """A worker ended: what comes in its place starts afresh."""
        for key in [key for key in self._workers if key[0] == worker_id]:
            del self._workers[key]

    def _allowed(self, workers: Sequence[Candidate], now: float) -> tuple[Candidate, ...]:
        allowed = [worker for worker in workers if self._may_try(worker_key(worker.peer), now)]
        return tuple(allowed or workers)

    def _may_try(self, key: WorkerKey, now: float) -> bool:
        breaker = self._workers.get(key)
        return breaker is None or not breaker.cooldown_s or now >= breaker.until
