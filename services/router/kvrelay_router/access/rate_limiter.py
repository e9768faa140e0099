"""What one API key may have: its rate, its requests at a time, its priorities. Asked at the door, before anything else.

The limits hold for each key; where no keys are set, for all clients together.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field

from kvrelay.fleet.key_limits import KeyLimits, OwnLimits, Refusal, SharedLimits
from kvrelay_router.http.api_error import ApiError


@dataclass(frozen=True, slots=True)
class KeyRules:
    """`least_priority`: the smallest number, which is the most urgent one, that a request may ask for."""

    limits: KeyLimits = field(default_factory=KeyLimits)
    least_priority: int | None = None


@dataclass(frozen=True, slots=True)
class RateLimiter:
    """Lets requests in by their keys' rules. `shared` may be left out where no key has a limit."""

    rules: KeyRules = field(default_factory=KeyRules)
    own: Mapping[str, KeyRules] = field(default_factory=dict)  # of single keys, instead of `rules`
    shared: SharedLimits | OwnLimits | None = None

    def check_priority(self, key: str, priority: int) -> None:
        """Raises 400 for a priority beyond the key's cap."""
        least = self._rules(key).least_priority
        if least is not None and priority < least:
            raise ApiError(
                f"Invalid value for 'priority': {priority} is beyond this key's cap (allowed: {least} or more)",
                param="priority",
                code="invalid_value",
            )

    def admit(self, key: str, request_id: str, lease_s: float) -> AbstractAsyncContextManager[None]:
        """Holds one of the key's places while the request runs. Raises 429 when it is entered."""
        limits = self._rules(key).limits
        if limits.are_none or self.shared is None:
            return nullcontext()
        return _place(self.shared, key, limits, request_id, lease_s)

    def _rules(self, key: str) -> KeyRules:
        return self.own.get(key, self.rules)


@asynccontextmanager
async def _place(
    shared: SharedLimits | OwnLimits, key: str, limits: KeyLimits, request_id: str, lease_s: float
) -> AsyncIterator[None]:
    refusal = await shared.enter(key, limits, request_id, lease_s)
    if refusal is not None:
        raise _refused(refusal, limits)
    try:
        yield
    finally:
        # The client may be gone, which cancels this task: its place is given back all the same.
        await asyncio.shield(shared.leave(key, request_id))


def _refused(refusal: Refusal, limits: KeyLimits) -> ApiError:
    if refusal.limit == "rate":
        message = f"Rate limit reached: this key may send {limits.requests_per_minute:g} requests a minute"
    else:
        message = f"Concurrency limit reached: this key may have {limits.concurrency} requests in progress"
    return ApiError(
        f"{message}; try again later",
        status=429,
        error_type="rate_limit_error",
        code="rate_limit_exceeded",
        headers={"retry-after": str(max(1, math.ceil(refusal.retry_after_s)))},
    )
