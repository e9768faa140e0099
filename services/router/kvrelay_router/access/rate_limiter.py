"""Limits the rate, the concurrency and the priority of requests, for each API key.

Without API keys the limits hold for all clients together.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field

from kvrelay.fleet.key_limits import KeyLimits, OwnLimits, Refusal, SharedLimits
from kvrelay.text.request.api_error import ApiError


@dataclass(frozen=True, slots=True)
class KeyRules:
    """`least_priority` is the smallest, and so most urgent, priority that a request may have."""

    limits: KeyLimits = field(default_factory=KeyLimits)
    least_priority: int | None = None


@dataclass(frozen=True, slots=True)
class RateLimiter:
    """Applies the rules of keys. `shared` counts requests; it may be None if no key has a limit."""

    rules: KeyRules = field(default_factory=KeyRules)
    own: Mapping[str, KeyRules] = field(default_factory=dict)  # replaces `rules` for single keys
    shared: SharedLimits | OwnLimits | None = None

    def check_priority(self, key: str, priority: int) -> None:
        """Raises 400 for a priority below the key's `least_priority`."""
        least = self._rules(key).least_priority
        if least is not None and priority < least:
            raise ApiError(
                f"Invalid value for 'priority': {priority} is beyond this key's cap (allowed: {least} or more)",
                param="priority",
                code="invalid_value",
            )

    def admit(self, key: str, request_id: str, lease_s: float) -> AbstractAsyncContextManager[None]:
        """Counts the request while the block runs. Entering it raises 429 beyond the key's limits."""
        limits = self._rules(key).limits
        if limits.are_none or self.shared is None:
            return nullcontext()
        return _counted(self.shared, key, limits, request_id, lease_s)

    def _rules(self, key: str) -> KeyRules:
        return self.own.get(key, self.rules)


@asynccontextmanager
async def _counted(
    shared: SharedLimits | OwnLimits, key: str, limits: KeyLimits, request_id: str, lease_s: float
) -> AsyncIterator[None]:
    refusal = await shared.enter(key, limits, request_id, lease_s)
    if refusal is not None:
        raise _refused(refusal, limits)
    try:
        yield
    finally:
        # If the client is gone, this task is cancelled; the request must still be uncounted.
        await asyncio.shield(shared.leave(key, request_id))


def _refused(refusal: Refusal, limits: KeyLimits) -> ApiError:
    if refusal.limit == "rate":
        message = f"Rate limit reached: this key may send {limits.requests_per_minute:g} requests a minute"
    else:
        message = f"Concurrency limit reached: this key may have {limits.concurrency} requests in progress"
    return ApiError(
        f"{message}; try again later",
        status=429,
        code="rate_limit_exceeded",
        retry_after_s=refusal.retry_after_s,
    )
