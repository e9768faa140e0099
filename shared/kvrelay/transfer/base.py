"""One small interface for moving KV blocks, a sender and a receiver, with several implementations.

It is shaped for one-sided transports (registered memory, asynchronous pushes, completion by notification); a transport
that copies on the receiving side fits it as well. Control messages do not pass here: they have their own link.

All callbacks come on the event loop's thread. Methods never block on the network.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import msgspec

from kvrelay.transfer.block_parts import BlockPart, PartCopy
from kvrelay.transfer.counters import SenderCounters


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


class TransferSender(Protocol):
    """Pushes blocks out of a pool. One per process and transport."""

    name: str
    counters: SenderCounters

    def start(self, on_event: Callable[[SenderEvent], None]) -> None:
        """Must be called on the event loop's thread, which then gets the events."""
        ...

    def push(self, reservation: str, endpoint: dict[str, str], copies: Sequence[BlockPush]) -> None:
        """Queues a push. Neighbouring blocks are coalesced. The caller keeps the source blocks until `Pushed`."""
        ...

    def abort(self, reservation: str) -> None:
        """Drops what is queued; `SenderDrained` follows, always, also for an unknown reservation."""
        ...

    def close(self) -> None:
        """Stops threads and closes sockets. Idempotent."""
        ...


@runtime_checkable
class PartSender(TransferSender, Protocol):
    """A sender that can also push parts of blocks, as ranks do whose peers hold other heads."""

    def push_part(
        self, reservation: str, endpoint: dict[str, str], copies: Sequence[BlockPush], part: PartCopy
    ) -> None:
        """As `push`, for a part of each block: it becomes a part of the receiver's block. `Pushed` follows for each
        push of a block, so twice for one of which two parts were pushed."""
        ...


class TransferReceiver(Protocol):
    """Takes blocks into a pool. One per process and transport."""

    name: str
    is_one_sided: bool
    """Whether the sender writes into the slots itself, so that writes may land after `release`."""

    @property
    def endpoint(self) -> dict[str, str]:
        """The address of this pool for senders. `Granted` carries it."""
        ...

    def start(self, on_event: Callable[[ReceiverEvent], None]) -> None:
        """Must be called on the event loop's thread, which then gets the events."""
        ...

    def admit(self, reservation: str, first_block: int, slots: Sequence[int]) -> None:
        """From now on block `first_block + i` of this reservation may land in `slots[i]`."""
        ...

    def release(self, reservation: str) -> None:
        """Ends a reservation. Unless writes are one-sided, nothing of it lands after this returns."""
        ...

    def close(self) -> None:
        """Stops threads and closes sockets. Idempotent."""
        ...


@runtime_checkable
class PartReceiver(TransferReceiver, Protocol):
    """A receiver that can also take blocks in parts, from several senders."""

    def admit_parts(self, reservation: str, first_block: int, slots: Sequence[int], parts: Sequence[BlockPart]) -> None:
        """As `admit`, for blocks that come in these parts, which do not overlap. A block has landed when all of its
        parts have."""
        ...
