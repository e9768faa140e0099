"""A circuit breaker for each incarnation of a worker. No I/O; `now` is in monotonic seconds.

1. CLOSED     The worker gets requests. After `THRESHOLD` failures in a row, the breaker opens.
2. OPEN       The worker gets no requests for `COOLDOWN_S`, which doubles each time up to `LONGEST_S`.
3. HALF_OPEN  The worker gets one request. Success closes the breaker, failure opens it again. If neither comes within
              the cooldown because the client left, another request is sent.

A prefill worker succeeds with a first token, a decode worker with the end of a sequence or with a number of its tokens.
A failure counts if it is the worker's fault: the worker failed an attempt that another worker may serve. If all workers
of a role have open breakers, all of them are tried: a breaker prefers better workers, and refuses no request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvrelay_router.fleet.load import WorkerKey, worker_key
from kvrelay_router.routing.estimates import Candidate, CandidateWorkers


class BreakerState(StrEnum):
    """The module's docstring explains the states."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


THRESHOLD = 5
COOLDOWN_S = 2.0
LONGEST_S = 60.0


@dataclass(slots=True)
class _Breaker:
    num_failures: int = 0  # since the last success
    cooldown_s: float = 0.0  # 0: closed
    until: float = 0.0  # the worker gets no request before this time
    probing: bool = False


class Breakers:
    """The breakers of all workers. A worker without failures has no entry."""

    def __init__(self) -> None:
        self._workers: dict[WorkerKey, _Breaker] = {}

    @property
    def has_failures(self) -> bool:
        """True if a worker has failed since its last success."""
        return bool(self._workers)

    def state(self, key: WorkerKey, now: float) -> BreakerState:
        """The module's docstring explains the states."""
        breaker = self._workers.get(key)
        if breaker is None or not breaker.cooldown_s:
            return BreakerState.CLOSED
        return BreakerState.HALF_OPEN if breaker.probing or now >= breaker.until else BreakerState.OPEN

    def usable(self, candidates: CandidateWorkers, now: float) -> CandidateWorkers:
        """Returns the workers that may be tried, or all workers of a role if none may."""
        if not self._workers:
            return candidates
        return CandidateWorkers(self._allowed(candidates.prefill, now), self._allowed(candidates.decode, now))

    def dispatched(self, key: WorkerKey, now: float) -> None:
        """A request was sent to the worker. In HALF_OPEN, it is the one request."""
        breaker = self._workers.get(key)
        if breaker is not None and breaker.cooldown_s and now >= breaker.until:
            breaker.probing = True
            breaker.until = now + breaker.cooldown_s

    def succeeded(self, key: WorkerKey) -> None:
        self._workers.pop(key, None)

    def failed(self, key: WorkerKey, now: float) -> bool:
        """The worker failed an attempt. Returns whether that opened its breaker."""
        breaker = self._workers.setdefault(key, _Breaker())
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
        for key in [key for key in self._workers if key[0] == worker_id]:
            del self._workers[key]

    def _allowed(self, workers: Sequence[Candidate], now: float) -> tuple[Candidate, ...]:
        allowed = [worker for worker in workers if self._may_try(worker_key(worker.peer), now)]
        return tuple(allowed or workers)

    def _may_try(self, key: WorkerKey, now: float) -> bool:
        breaker = self._workers.get(key)
        return breaker is None or not breaker.cooldown_s or now >= breaker.until
