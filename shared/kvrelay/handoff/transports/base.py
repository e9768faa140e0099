"""One small interface for moving KV blocks, a sender and a receiver, with several implementations.

It is shaped for one-sided transports (registered memory, asynchronous pushes, completion by notification); a transport
that copies on the receiving side fits it as well. Control messages do not pass here: they have their own link.

All callbacks come on the event loop's thread. Methods never block on the network.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Thread
from typing import Generic, Protocol, TypeVar, runtime_checkable

import msgspec

from kvrelay.handoff.transports.pool_memory import BlockPart, PartCopy

Endpoint = dict[str, str]
"""The address of a receiver, which `Granted` carries to the sender."""


class Unreachable(Exception):
    """A push to this receiver cannot be made. The message has the cause."""


class MalformedEndpoint(Unreachable, ValueError):
    """The endpoint of a receiver has missing or invalid fields."""


@dataclass(slots=True)
class SenderCounters:
    """Totals since start. A repeated frame counts again."""

    num_messages: int = 0
    num_blocks: int = 0
    num_runs: int = 0
    """Neighbours on both sides count as one: the descriptors that a write needs."""
    num_bytes: int = 0
    post_s: float = 0.0
    """In calls that post one-sided writes; within one machine that is the copy itself."""
    num_resets: int = 0
    """Connections closed because an abort did not drain in time, or a write failed."""


@dataclass(frozen=True, slots=True)
class BlockPush:
    """One block of a push: its index in the prompt, its block at the sender and its slot at the receiver."""

    index: int
    source: int
    slot: int


class Landed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """At the receiver: these blocks (indices in the prompt) are completely in their slots."""

    reservation: str
    blocks: tuple[int, ...]


class Corrupted(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """At the receiver: these blocks came with other bytes than were sent. They count as not landed."""

    reservation: str
    blocks: tuple[int, ...]


ReceiverEvent = Landed | Corrupted


class Pushed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """At the sender: these blocks have left; their memory is no longer read."""

    reservation: str
    blocks: tuple[int, ...]
    num_bytes: int


class SenderDrained(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """At the sender, after `abort`: no write of this reservation is or will be in flight."""

    reservation: str


class TransferFailed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """At the sender: a push could not be made. The handoff may try another worker."""

    reservation: str
    cause: str


SenderEvent = Pushed | SenderDrained | TransferFailed


@runtime_checkable
class TransferSender(Protocol):
    """Pushes blocks out of a pool. One per process and transport."""

    name: str
    counters: SenderCounters

    def start(self, on_event: Callable[[SenderEvent], None]) -> None:
        """Must be called on the event loop's thread, which then gets the events."""
        ...

    def push(
        self, reservation: str, endpoint: Endpoint, copies: Sequence[BlockPush], part: PartCopy | None = None
    ) -> None:
        """Queues a push. Neighbouring blocks are coalesced. The caller keeps the source blocks until `Pushed`.

        With a part, that part of each block becomes a part of the receiver's block, as between ranks that hold
        different heads. `Pushed` follows for each push of a block, so twice for one of which two parts were pushed.
        """
        ...

    def abort(self, reservation: str) -> None:
        """Drops what is queued; `SenderDrained` follows, always, also for an unknown reservation."""
        ...

    def close(self) -> None:
        """Stops threads and closes sockets. Idempotent."""
        ...


@runtime_checkable
class TransferReceiver(Protocol):
    """Takes blocks into a pool. One per process and transport."""

    name: str
    is_one_sided: bool
    """Whether the sender writes into the slots itself, so that writes may land after `release`."""

    @property
    def endpoint(self) -> Endpoint:
        """The address of this pool for senders. `Granted` carries it."""
        ...

    def start(self, on_event: Callable[[ReceiverEvent], None]) -> None:
        """Must be called on the event loop's thread, which then gets the events."""
        ...

    def admit(self, reservation: str, first_block: int, slots: Sequence[int], parts: Sequence[BlockPart] = ()) -> None:
        """From now on block `first_block + i` of this reservation may land in `slots[i]`. With parts, which do not
        overlap, each block comes in these, from several senders, and has landed when all of them have."""
        ...

    def release(self, reservation: str) -> None:
        """Ends a reservation. Unless writes are one-sided, nothing of it lands after this returns."""
        ...

    def close(self) -> None:
        """Stops threads and closes sockets. Idempotent."""
        ...


log = logging.getLogger(__name__)

Event = TypeVar("Event")

END_TIMEOUT_S = 5.0


def ended_in_time(thread: Thread) -> bool:
    """Waits for a thread that was told to end, but not for ever: a call into a library may hold it. Such a thread is
    left behind, with all that it may still touch; it goes with the process."""
    thread.join(END_TIMEOUT_S)
    if thread.is_alive():
        log.error("the thread %s did not end within %g s and is left behind", thread.name, END_TIMEOUT_S)
    return not thread.is_alive()


class LoopPort(Generic[Event]):
    """Calls `on_event` on the loop that ran when this was made. Once that loop is closed, events are dropped."""

    def __init__(self, on_event: Callable[[Event], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_event = on_event

    def emit(self, event: Event) -> None:
        """Passes the event to the event loop. Callable from any thread."""
        self._call(self._on_event, event)

    def report_crash(self, thread_name: str, error: Exception) -> None:
        """Hands the end of a thread that should not have ended to the loop's exception handler, marked as fatal."""
        context = {"message": f"the thread {thread_name} ended", "exception": error, "fatal": True}
        self._call(self._loop.call_exception_handler, context)

    def _call(
        self, callback: Callable[[Event], None] | Callable[[dict[str, object]], object], argument: object
    ) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, argument)  # type: ignore[arg-type]
        except RuntimeError:
            if not self._loop.is_closed():
                raise
            log.debug("dropped an event, its loop is closed: %s", argument)
