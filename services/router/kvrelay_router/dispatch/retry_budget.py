"""How often a sequence may still be tried: which attempts count, and which were no tries of workers. Pure.

An attempt counts when it ended by a worker's fault before `PROVEN_TOKENS` new tokens came: a request that ends workers
must not be given to one after the other. These are void, and bounded apart:

- one that no worker took part in, or that a worker gave up because this router was silent;
- one that brought so many tokens: whatever ended it, the request did not;
- one that was lost with a worker which is heard again: it was stopped or cut off, and not ended by the request. Until
  then such an attempt counts; one that would be the last waits for that.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kvrelay_router.dispatch.load import WorkerKey

MAX_UNCOUNTED_ATTEMPTS = 20
PROVEN_TOKENS = 16
"""After so many tokens an attempt, and its decode worker, has done well."""
UNCOUNTED_PAUSE_S = 0.1
MAX_UNCOUNTED_PAUSE_S = 1.0


@dataclass(slots=True)
class RetryBudget:
    """Of one sequence."""

    max_attempts: int
    num_counted: int = 0  # attempts that were tries of workers
    _num_void: int = 0
    _lost: Counter[WorkerKey] = field(default_factory=Counter)  # those that count, by the worker that fell silent

    @property
    def are_spent(self) -> bool:
        """Whether no other attempt may be made now."""
        return self.num_counted >= self.max_attempts or self._num_void > MAX_UNCOUNTED_ATTEMPTS

    @property
    def may_recover(self) -> bool:
        """Whether a worker that is heard again would allow another attempt."""
        return bool(self._lost) and self._num_void < MAX_UNCOUNTED_ATTEMPTS

    @property
    def pause_s(self) -> float:
        """Before the attempt that follows a void one, growing."""
        return float(min(MAX_UNCOUNTED_PAUSE_S, UNCOUNTED_PAUSE_S * 2 ** (self._num_void - 1)))

    def ended(self, *, is_void: bool, num_tokens: int, silent: WorkerKey | None = None) -> None:
        """An attempt brought `num_tokens` new tokens and came to nothing; `silent`: because this worker was."""
        if is_void or num_tokens >= PROVEN_TOKENS:
            self._num_void += 1
            return
        self.num_counted += 1
        if silent is not None:
            self._lost[silent] += 1

    def heard_again(self, worker: WorkerKey) -> None:
        """This start of a worker lives."""
        num_lost = self._lost.pop(worker, 0)
        self.num_counted -= num_lost
        self._num_void += num_lost
