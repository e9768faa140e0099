"""Limits of API keys in requests per minute and concurrent requests, shared by all routers through Redis.

While Redis is away each router counts only its own requests, so a key may use its limit on each router. No request is
refused because Redis is away. After a failure Redis is not asked for `AWAY_S`; then one request at a time tries it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from importlib import resources
from typing import Any, Literal
from urllib.parse import quote

from kvrelay.fleet.connect import REDIS_FAILED, connect_async

log = logging.getLogger(__name__)

AWAY_S = 1.0
ANSWER_TIMEOUT_S = 0.5
"""Total time of a call: clients of Sentinels and Clusters retry several times."""
MAX_UNREPORTED = 10_000
CONCURRENCY_RETRY_S = 1.0
"""`Retry-After` at the concurrency limit: the end of the running requests is unknown."""


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Limits of one API key. None: no limit. `burst`: requests allowed at once after a pause."""

    requests_per_minute: float | None = None
    burst: int = 1
    concurrency: int | None = None

    @property
    def interval_s(self) -> float:
        """Mean seconds between two requests; 0: no limit."""
        return 60.0 / self.requests_per_minute if self.requests_per_minute else 0.0

    @property
    def are_none(self) -> bool:
        return not self.requests_per_minute and not self.concurrency


@dataclass(frozen=True, slots=True)
class Refusal:
    """The limit that was reached, and seconds until a retry."""

    limit: Literal["rate", "concurrency"]
    retry_after_s: float


@dataclass(slots=True)
class _Key:
    arrival_s: float = 0.0  # theoretical arrival time of the next request (GCRA)
    running: dict[str, float] = field(default_factory=dict)  # request id to the end of its lease


class LocalLimits:
    """The rules of admit.lua for one router. Pure: `now` is monotonic seconds."""

    def __init__(self) -> None:
        self._keys: dict[str, _Key] = {}

    def enter(self, key: str, limits: KeyLimits, request_id: str, lease_s: float, now: float) -> Refusal | None:
        """Counts a request, or returns the refusal."""
        state = self._keys.setdefault(key, _Key())
        if limits.concurrency:
            for done in [request for request, end_s in state.running.items() if end_s <= now]:
                del state.running[done]
            if len(state.running) >= limits.concurrency:
                return Refusal("concurrency", CONCURRENCY_RETRY_S)
        if limits.interval_s:
            arrival_s = max(state.arrival_s, now)
            wait_s = arrival_s + limits.interval_s * (1 - limits.burst) - now
            if wait_s > 1e-9:
                return Refusal("rate", wait_s)
        self.count(key, limits, request_id, lease_s, now)
        return None

    def count(self, key: str, limits: KeyLimits, request_id: str, lease_s: float, now: float) -> None:
        """Counts a request that Redis admitted."""
        state = self._keys.setdefault(key, _Key())
        state.arrival_s = max(state.arrival_s, now) + limits.interval_s
        state.running[request_id] = now + lease_s

    def leave(self, key: str, request_id: str) -> None:
        """Ends a request."""
        state = self._keys.get(key)
        if state is not None:
            state.running.pop(request_id, None)


class OwnLimits:
    """Limits of this process alone, for routers without Redis. Same interface as `SharedLimits`."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._local = LocalLimits()

    async def enter(self, key: str, limits: KeyLimits, request_id: str, lease_s: float) -> Refusal | None:
        """Counts a request, or returns the refusal."""
        return self._local.enter(key, limits, request_id, lease_s, self._clock())

    async def leave(self, key: str, request_id: str) -> None:
        """Ends a request."""
        self._local.leave(key, request_id)

    async def close(self) -> None: ...


class SharedLimits:
    """Limits of all keys over all routers that serve `models`. Use it on one event loop."""

    def __init__(
        self, redis_url: str, prefix: str, models: str, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._redis = connect_async(redis_url, timeout_s=ANSWER_TIMEOUT_S)
        source = resources.files("kvrelay.fleet").joinpath("admit.lua").read_text(encoding="utf-8")
        self._admit: Any = self._redis.register_script(source)
        self._tag = f"{prefix}:{{{quote(models, safe='/')}}}"
        self._clock = clock
        self._local = LocalLimits()
        self._away_until = 0.0  # 0: the last call was answered
        # Ended requests not yet reported to Redis.
        self._unreported: deque[tuple[str, str]] = deque(maxlen=MAX_UNREPORTED)

    async def enter(self, key: str, limits: KeyLimits, request_id: str, lease_s: float) -> Refusal | None:
        """Counts a request, or returns the refusal. `request_id` must be unique in the fleet. Never fails."""
        now = self._clock()
        if self._may_ask(now):
            arguments = [
                request_id,
                max(1, int(lease_s * 1e3)),
                limits.interval_s * 1e3,
                limits.burst,
                limits.concurrency or 0,
            ]
            try:
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    await self._report_ended()
                    limit, wait_ms = await self._admit(keys=self._keys(key), args=arguments)
            except REDIS_FAILED as error:
                self._failed(error)
            except asyncio.CancelledError:
                # The client disconnected, but Redis may have counted the request.
                await asyncio.shield(self.leave(key, request_id))
                raise
            else:
                self._away_until = 0.0
                if limit == b"concurrency":
                    return Refusal("concurrency", CONCURRENCY_RETRY_S)
                if limit == b"rate":
                    return Refusal("rate", int(wait_ms) / 1e3)
                self._local.count(key, limits, request_id, lease_s, now)
                return None
        return self._local.enter(key, limits, request_id, lease_s, now)

    async def leave(self, key: str, request_id: str) -> None:
        """Ends a request. Reported to Redis now or when it is back; otherwise the lease expires."""
        self._local.leave(key, request_id)
        self._unreported.append((self._keys(key)[1], request_id))
        if not self._may_ask(self._clock()):
            return
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await self._report_ended()
        except REDIS_FAILED as error:
            self._failed(error)
        else:
            self._away_until = 0.0

    async def close(self) -> None:
        await self._redis.aclose()

    async def _report_ended(self) -> None:
        """Reports ended requests, so they no longer count."""
        while self._unreported:
            running, request_id = self._unreported[0]
            await self._redis.zrem(running, request_id)
            with contextlib.suppress(ValueError):  # another call reported it meanwhile
                self._unreported.remove((running, request_id))

    def _may_ask(self, now: float) -> bool:
        """Returns whether to ask Redis: always while it answers; after a failure one request at a time."""
        if not self._away_until:
            return True
        if now < self._away_until:
            return False
        self._away_until = now + ANSWER_TIMEOUT_S + AWAY_S  # other requests do not wait for this one's answer
        return True

    def _failed(self, error: Exception) -> None:
        if not self._away_until:
            reason = str(error) or type(error).__name__
            log.warning("key limits: Redis does not answer, this router counts only its own requests: %s", reason)
        self._away_until = self._clock() + AWAY_S

    def _keys(self, key: str) -> list[str]:
        """Redis keys of an API key, which contain its digest, since the key is a secret."""
        digest = sha256(key.encode()).hexdigest()[:32]
        return [f"{self._tag}:rate:{digest}", f"{self._tag}:running:{digest}"]
