"""Request bodies: read as JSON objects, bounded one by one and for all clients together, and given up with the client.

`BodyBytes` counts a body from its first byte until its request is admitted, `PendingMemory` all bodies and requests of
the process. `ClientWatch` cancels the work for a client that disconnects.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TypeVar

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvrelay.excerpts import quoted
from kvrelay.telemetry.metrics import MetricSamples, samples_by, single_sample
from kvrelay.text.request.api_error import ApiError

BODY_TIMEOUT_S = 60.0
"""Maximum time for a client to send its body."""

LINGER_S = 1.0
"""The rest of a refused body is read and dropped for this time, so that the client can read the answer."""

MAX_PARTS = 1 << 19
"""Arrays, objects and keys of a body, which take most of the time and memory of parsing. They are counted in texts too:
such a text would be many times longer than any context."""


class BodyRefused(ApiError):
    """The rest of the body is dropped, and the connection ends."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(
            error.message,
            status=error.status,
            code=error.code,
            headers={**error.headers, "connection": "close"},
        )


class LingeringResponse(Response):
    """Answers at once and keeps the connection open for `LINGER_S`: a reset would overtake the answer."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        try:
            async with asyncio.timeout(LINGER_S):
                while (message := await receive())["type"] == "http.request" and message.get("more_body"):
                    pass
        except TimeoutError:
            pass
        await send({"type": "http.response.body", "body": b""})


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """Returns the whole body. Raises 413 as soon as it exceeds the limit, 503 if it has no room, 408 if it is late, and
    ClientDisconnect."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit_bytes:
        raise BodyRefused(_too_large(limit_bytes))
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await _receive_body(request, limit_bytes)
    except TimeoutError:
        raise BodyRefused(ApiError("The request body took too long to arrive", status=408)) from None
    except ApiError as error:
        raise BodyRefused(error) from None


async def _receive_body(request: Request, limit_bytes: int) -> bytes:
    held: BodyBytes = request.scope["state"][BODY]
    parts: list[bytes] = []
    is_all = False
    while not is_all:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part, is_all = message.get("body", b""), not message.get("more_body", False)
        held.grow(len(part))
        if held.num_bytes > limit_bytes:
            raise _too_large(limit_bytes)
        parts.append(part)
    return b"".join(parts)


def _too_large(limit_bytes: int) -> ApiError:
    return ApiError(f"The request body is larger than {limit_bytes} bytes", status=413, code="request_too_large")


async def read_json_object(request: Request, limit_bytes: int) -> dict[str, Any]:
    """Returns the body as a JSON object. Raises 400 if it is none, and the errors of `read_body`.

    The body is parsed whole, and holds the event loop for as long (docs/sizing.md).
    """
    try:
        body = await read_body(request, limit_bytes)
    except ClientDisconnect as error:
        raise ApiError("The client went away before its request was complete") from error
    if len(body) > MAX_PARTS and sum(map(body.count, (b"[", b"{", b":"))) > MAX_PARTS:
        raise ApiError(f"The body has more than {MAX_PARTS} arrays, objects and keys", code="invalid_json")
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        if (encoding := request.headers.get("content-encoding", "identity").lower()) != "identity":
            raise ApiError(
                f"The request body comes as {quoted(encoding)}; bodies are read as they are",
                status=415,
                code="unsupported_encoding",
            ) from error
        raise ApiError(f"The request body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(content, dict):
        raise ApiError("The request body must be a JSON object", code="invalid_json")
    return content


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


T = TypeVar("T")

CLIENT_GONE = "client_gone"
"""The code of a request whose client closed its connection."""
WATCHED_BODY_BYTES = 64 << 10
"""The planning of a smaller body takes milliseconds; watching it would cost each request more than that saves."""


class ClientGone(Exception):
    """The client closed its connection before the answer was complete."""


class ClientWatch:
    """`with ClientWatch(receive): ...` in a task cancels the block if the client disconnects.

    It works like `asyncio.timeout`, and raises ClientGone on exit. The request's body must have been read before.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._gone = False

    def __enter__(self) -> ClientWatch:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._listener: asyncio.Task[None] | None = asyncio.create_task(self._listen())
        return self

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self._task.cancel()

    def stop(self) -> None:
        """From now on the client may go, as it does when its answer is complete."""
        if self._listener is not None:
            self._listener.cancel()
            self._listener = None  # break the reference cycle, so that both are freed at once

    def __exit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
        if not self._gone:
            return
        still_cancelled = self._task.uncancel()
        if exc_type is asyncio.CancelledError and still_cancelled == 0:
            raise ClientGone from error


async def while_connected(http: Request, timeout_s: float, work: Coroutine[Any, Any, T]) -> T:
    """Awaits the planning of a request whose body was read. If the body is large, `work` is cancelled when the client
    disconnects (ApiError) or after `timeout_s` (TimeoutError), so that no text is tokenized in vain."""
    body: BodyBytes = http.scope["state"][BODY]
    if body.num_bytes < WATCHED_BODY_BYTES:
        return await work
    try:
        async with asyncio.timeout(timeout_s):
            with ClientWatch(http.receive):
                return await work
    except ClientGone:
        raise ApiError("The client closed its connection", status=499, code=CLIENT_GONE) from None
