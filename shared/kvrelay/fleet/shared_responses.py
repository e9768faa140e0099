"""Responses that all routers of a Redis share, so that any of them can continue a conversation.

While Redis is away nothing is stored or found, and no request waits for it: after a failure Redis is not asked for
`AWAY_S`, and then by one call at a time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from importlib import resources
from typing import Any

from kvrelay.fleet.connect import REDIS_FAILED, connect_async

log = logging.getLogger(__name__)

AWAY_S = 1.0
ANSWER_TIMEOUT_S = 1.0
"""Total time of a call. A response of the largest size takes a few milliseconds."""
ENTRY_BYTES = 512
"""Approximate overhead of a response in Redis beside its own bytes."""


class StoreUnavailable(Exception):
    """Redis does not answer, or refuses."""


@dataclass(frozen=True, slots=True)
class StoreBounds:
    """Of all responses together, and the time that one is kept after its last use."""

    max_bytes: int = 64 << 20
    max_responses: int = 10_000
    kept_s: float = 7 * 86_400.0


class SharedResponses:
    """Bytes by owner and id. Use it on one event loop. All methods raise StoreUnavailable."""

    def __init__(
        self, redis_url: str, prefix: str, bounds: StoreBounds, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._redis = connect_async(redis_url, timeout_s=ANSWER_TIMEOUT_S)
        source = resources.files("kvrelay.fleet").joinpath("stored_responses.lua").read_text(encoding="utf-8")
        self._script: Any = self._redis.register_script(source)
        tag = f"{prefix}:{{responses}}"
        self._keys = [f"{tag}:order", f"{tag}:sizes", f"{tag}:owners"]
        self._bounds = bounds
        self._clock = clock
        self._away_until = 0.0  # 0: the last call was answered

    async def put(self, owner: str, response_id: str, data: bytes) -> bool:
        """Stores a response. Returns False if it alone is too large."""
        size, bounds = len(data) + ENTRY_BYTES, self._bounds
        if size > bounds.max_bytes:
            return False
        await self._call("put", owner, response_id, data, size, bounds.max_bytes, bounds.max_responses, self._kept)
        return True

    async def get(self, owner: str, response_id: str) -> bytes | None:
        found: bytes | None = await self._call("get", owner, response_id, self._kept)
        return found

    async def delete(self, owner: str, response_id: str) -> bool:
        """Returns whether it was there."""
        return bool(await self._call("delete", owner, response_id))

    async def close(self) -> None:
        await self._redis.aclose()

    @property
    def _kept(self) -> int:
        return max(1, int(self._bounds.kept_s * 1e3))

    async def _call(self, operation: str, owner: str, response_id: str, *arguments: bytes | int) -> Any:
        now = self._clock()
        if self._away_until:
            if now < self._away_until:
                raise StoreUnavailable("Redis did not answer a moment ago")
            self._away_until = now + ANSWER_TIMEOUT_S + AWAY_S  # other calls do not wait for this one's answer
        # Clients choose neither, but an id comes from a URL: its digest has a bounded length and no spaces.
        names = [sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32] for text in (owner, response_id)]
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                answer = await self._script(keys=self._keys, args=[operation, *names, *arguments])
        except REDIS_FAILED as error:
            reason = str(error) or type(error).__name__
            if not self._away_until:
                log.warning("responses are not stored: Redis does not answer: %s", reason)
            self._away_until = self._clock() + AWAY_S
            raise StoreUnavailable(reason) from error
        self._away_until = 0.0
        return answer
