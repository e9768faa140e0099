"""Bounds the memory of unfinished bodies and of requests in progress, for all clients of a router process together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvrelay.telemetry.metrics import MetricSamples, samples_by, single_sample
from kvrelay.text.request.api_error import ApiError

DEFAULT_PENDING_BYTES = 512 << 20


class PendingMemory:
    """Counts bytes. A body counts from its first byte until its request is validated, and the request, by an estimate,
    until its answer is sent."""

    def __init__(self, limit_bytes: int = DEFAULT_PENDING_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self.bodies_bytes = 0
        self.requests_bytes = 0
        self.num_refused = 0

    def check_room(self, num_bytes: int) -> None:
        """Raises 503, and counts a refusal, if this many bytes more exceed the limit."""
        if self.bodies_bytes + self.requests_bytes + num_bytes <= self.limit_bytes:
            return
        self.num_refused += 1
        raise ApiError(
            f"This process holds {self.bodies_bytes} bytes of unfinished bodies and {self.requests_bytes} bytes of "
            f"requests in progress; at most {self.limit_bytes} bytes are allowed. Try again later",
            status=503,
            code="too_many_pending_bytes",
            retry_after_s=1,
        )

    @contextmanager
    def hold(self, num_bytes: int) -> Iterator[None]:
        """Counts a request while the block runs. Entering raises 503 beyond the limit."""
        self.check_room(num_bytes)
        self.requests_bytes += num_bytes
        try:
            yield
        finally:
            self.requests_bytes -= num_bytes

    def as_json(self) -> dict[str, Any]:
        return {
            "bodies_bytes": self.bodies_bytes,
            "requests_bytes": self.requests_bytes,
            "limit_bytes": self.limit_bytes,
            "refused": self.num_refused,
        }

    def samples(self) -> MetricSamples:
        kinds = {"bodies": self.bodies_bytes, "requests": self.requests_bytes}
        return {
            "kvrelay.pending.memory": samples_by("kind", kinds),
            "kvrelay.pending.limit": single_sample(self.limit_bytes),
            "kvrelay.pending.refused": single_sample(self.num_refused),
        }


BODY = "body"
"""The key of a request's `BodyBytes` in its ASGI state."""


class BodyBytes:
    """The bytes of one request's body."""

    __slots__ = ("_memory", "num_bytes")

    def __init__(self, memory: PendingMemory) -> None:
        self._memory = memory
        self.num_bytes = 0

    def grow(self, num_bytes: int) -> None:
        """Counts bytes that arrived. Raises 503 if there is no room for them."""
        self._memory.check_room(num_bytes)
        self._memory.bodies_bytes += num_bytes
        self.num_bytes += num_bytes

    def release(self) -> None:
        """The body is no longer needed."""
        self._memory.bodies_bytes -= self.num_bytes
        self.num_bytes = 0
