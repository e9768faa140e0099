"""Limits the rate, the concurrency and the priority of requests for each API key, and the requests in progress of all.

Without API keys the limits of a key hold for all clients together.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field

from kvrelay.fleet.key_limits import KeyLimits, OwnLimits, Refusal, SharedLimits
from kvrelay.text.request.api_error import ApiError
from kvrelay_router.access.identity import Caller
from kvrelay_router.access.key_ring import KeyRing

FREE_SHARE = 8.0


@dataclass(frozen=True, slots=True)
class RateLimiter:
    """Applies the rules of keys. `shared` counts requests; it may be None if no key has a limit."""

    keys: KeyRing = field(default_factory=KeyRing)
    shared: SharedLimits | OwnLimits | None = None

    def check_priority(self, key: str, priority: int) -> None:
        """Raises 400 for a priority below the key's `least_priority`."""
        least = self.keys.rules(key).least_priority
        if least is not None and priority < least:
            raise ApiError(
                f"Invalid value for 'priority': {priority} is beyond this key's cap (allowed: {least} or more)",
                param="priority",
                code="invalid_value",
            )

    def admit(self, key: str, request_id: str, lease_s: float) -> AbstractAsyncContextManager[None]:
        """Counts the request while the block runs. Entering it raises 429 beyond the key's limits."""
        limits = self.keys.rules(key).limits
        if limits.are_none or self.shared is None:
            return nullcontext()
        return _counted(self.shared, key, limits, request_id, lease_s)


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
    return _try_later(message, refusal.retry_after_s)


class InProgress:
    """Counts generations in progress, at most `limit`.

    If `keys` are of several tenants, one may have `FREE_SHARE` times as many as there are free places, times its
    weight (Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory packet switches", 1998). So places
    are left for tenants that have none, and one tenant alone gets 8 of 9 places. The same holds for the fleets, with
    weight 1, if there are `several_fleets`: one that stalls leaves places for the others.
    """

    def __init__(self, limit: int, keys: KeyRing | None = None, *, several_fleets: bool = False) -> None:
        self._limit = limit
        self._keys, self._several_fleets = keys or KeyRing(), several_fleets
        self._of_tenants: Counter[str] = Counter()
        self._of_fleets: Counter[str] = Counter()
        self.num_requests = 0

    @contextmanager
    def admit(self, caller: Caller, fleet: str = "") -> Iterator[None]:
        """A generation runs in the block. Raises 429 beyond the limits."""
        free: float = self._limit - self.num_requests
        if self._several_fleets:  # a tenant gets its share of what its fleet may still take
            free = min(free, FREE_SHARE * free - self._of_fleets[fleet])
        if free <= 0 or (
            self._keys.have_shares and self._of_tenants[caller.tenant] >= FREE_SHARE * caller.weight * free
        ):
            message = (
                f"{self._limit} requests or your share of them are in progress, which is as many as this router takes"
            )
            raise _try_later(message, 1)
        places = (self._of_tenants, caller.tenant), (self._of_fleets, fleet)
        self.num_requests += 1
        for counts, name in places:
            counts[name] += 1
        try:
            yield
        finally:
            self.num_requests -= 1
            for counts, name in places:
                counts[name] -= 1
                if not counts[name]:
                    del counts[name]


def _try_later(message: str, retry_after_s: float) -> ApiError:
    return ApiError(f"{message}; try again later", status=429, code="rate_limit_exceeded", retry_after_s=retry_after_s)
