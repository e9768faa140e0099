"""Limits the attempts of one sequence. Pure.

An attempt counts if a worker failed it before `PROVEN_TOKENS` new tokens came. This keeps a request that crashes its
workers from reaching one worker after the other. The following attempts do not count, and have their own, larger limit:

- No worker began it, messages between worker and router were lost, or the worker dropped it because this router was
  silent.
- It brought `PROVEN_TOKENS` tokens, so the request itself cannot be the cause of the failure.
- Its worker was lost and has sent messages again since: the worker was stopped or cut off, and did not crash. Until
  then the attempt counts. If it was the last one, the sequence waits for the worker.

If a worker is lost with the attempts of several requests, any of them may be the cause, or none: workers are also
killed from outside, several times in a row. The first `max_attempts` such losses in a row do not count. After them the
sequence is a suspect: its next attempts are made while no other suspect has one, and they count.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kvrelay_router.fleet.load import WorkerKey

MAX_UNCOUNTED_ATTEMPTS = 20
PROVEN_TOKENS = 16
"""After this many new tokens, neither the request nor its decode worker is the cause of a failure."""
UNCOUNTED_PAUSE_S = 0.1
MAX_UNCOUNTED_PAUSE_S = 1.0


@dataclass(slots=True)
class RetryBudget:
    """Counts the failed attempts of one sequence."""

    max_attempts: int
    num_counted: int = 0
    _num_uncounted: int = 0
    _num_in_company: int = 0  # attempts lost together with other requests, since the last that brought tokens
    _lost: Counter[WorkerKey] = field(default_factory=Counter)  # counted attempts, by the worker that was lost

    @property
    def is_exhausted(self) -> bool:
        """True if no further attempt is allowed at present."""
        return self.num_counted >= self.max_attempts or self._num_uncounted > MAX_UNCOUNTED_ATTEMPTS

    @property
    def is_suspect(self) -> bool:
        """True if several workers were lost with the sequence, and it must be found out whether it is the cause."""
        return self._num_in_company >= self.max_attempts

    @property
    def may_recover(self) -> bool:
        """True if messages from a lost worker would allow another attempt."""
        return bool(self._lost) and self._num_uncounted < MAX_UNCOUNTED_ATTEMPTS

    @property
    def pause_s(self) -> float:
        """The pause before the attempt after an uncounted one. It doubles each time."""
        return float(min(MAX_UNCOUNTED_PAUSE_S, UNCOUNTED_PAUSE_S * 2 ** (self._num_uncounted - 1)))

    def attempt_failed(
        self, *, counts: bool, num_tokens: int, lost_worker: WorkerKey | None = None, in_company: bool = False
    ) -> None:
        """Records a failed attempt that brought `num_tokens` new tokens. `lost_worker`: its link is gone, `in_company`
        together with other requests' attempts."""
        if num_tokens >= PROVEN_TOKENS:
            self._num_in_company = 0
        if not counts or num_tokens >= PROVEN_TOKENS:
            self._num_uncounted += 1
            return
        if in_company and not self.is_suspect:
            self._num_in_company += 1
            return
        self.num_counted += 1
        if lost_worker is not None:
            self._lost[lost_worker] += 1

    def worker_returned(self, worker: WorkerKey) -> None:
        """A lost worker has sent messages again: the attempts that were lost with it do not count."""
        num_lost = self._lost.pop(worker, 0)
        self.num_counted -= num_lost
        self._num_uncounted += num_lost
