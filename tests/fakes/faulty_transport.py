"""A transport that wraps another one and makes it go wrong, as a schedule says.

Pushes are cut into messages of a few blocks, each of which may suffer a fault of its own. The wrapped sender reads from
a copy of the pool (the wire), so that bytes can change on the way while checksums are still those of the pool.

What holds of every transport holds of this one: after `SenderDrained` nothing lands, and `Pushed` says that all copies
of a message, duplicates too, have left.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, Protocol, TypeVar

import numpy as np

from kvrelay.handoff.transports.base import (
    BlockPush,
    Pushed,
    ReceiverEvent,
    SenderDrained,
    SenderEvent,
    TransferFailed,
    TransferReceiver,
    TransferSender,
)
from kvrelay.handoff.transports.outbox import Copies
from kvrelay.handoff.transports.pool_memory import BlockPart, PartCopy, PoolChecksums, PoolLike
from kvrelay.handoff.transports.wire import Bytes


class Point(StrEnum):
    """Where something passes: messages of a push, and the events at both ends."""

    PUSH = "push"
    PUSHED = "pushed"
    DRAINED = "drained"
    LANDED = "landed"


class Fault(StrEnum):
    """What may become of it."""

    NONE = "none"
    DELAY = "delay"
    REORDER = "reorder"
    """It waits for the next one to pass."""
    DUPLICATE = "duplicate"
    DROP = "drop"
    """Its sender believes that it arrived. A one-sided write is made, but the receiver hears nothing of it."""
    CORRUPT = "corrupt"
    """One byte of one block changes on the way, after checksums were taken."""
    STALL = "stall"
    """Nothing passes for a while."""
    DIE = "die"
    """The connection breaks, for good."""


_BENIGN = frozenset({Fault.NONE, Fault.DELAY, Fault.REORDER, Fault.STALL})
POSSIBLE: dict[Point, frozenset[Fault]] = {
    Point.PUSH: frozenset(Fault),
    # What no transport may do, because everything is built on it: report as pushed or drained what is not, or never
    # report what is. One that cannot hold this has to end its process.
    Point.PUSHED: _BENIGN,
    Point.DRAINED: (_BENIGN | {Fault.DUPLICATE}) - {Fault.REORDER},
    Point.LANDED: _BENIGN | {Fault.DUPLICATE, Fault.DIE},
}


class Schedule(Protocol):
    """Says what becomes of the `number`th that passes a point, counted from 1."""

    def fault(self, point: Point, number: int) -> Fault:
        """Must be the same for the same arguments."""
        ...


@dataclass(frozen=True)
class Script:
    """Exactly these. Raises ValueError for a fault that is not possible at its point."""

    faults: Mapping[tuple[Point, int], Fault] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for (point, _), fault in self.faults.items():
            if fault not in POSSIBLE[point]:
                raise ValueError(f"{fault} is not possible at {point}")

    def fault(self, point: Point, number: int) -> Fault:
        return self.faults.get((point, number), Fault.NONE)


@dataclass(frozen=True)
class Every:
    """The same for all that pass a point."""

    point: Point
    what: Fault

    def fault(self, point: Point, number: int) -> Fault:
        return self.what if point is self.point else Fault.NONE


@dataclass(frozen=True)
class Seeded:
    """Each fault with its share, drawn from seed, point and number alone; but none of `spared` at those points."""

    seed: int
    shares: Mapping[Fault, float]
    spared: frozenset[tuple[Point, Fault]] = frozenset()

    def fault(self, point: Point, number: int) -> Fault:
        draw = random.Random(f"{self.seed}/{point}/{number}").random()
        for fault, share in sorted(self.shares.items()):
            draw -= share
            if draw < 0:
                return fault if fault in POSSIBLE[point] and (point, fault) not in self.spared else Fault.NONE
        return Fault.NONE


BENIGN = {Fault.DELAY: 0.05, Fault.REORDER: 0.2, Fault.DUPLICATE: 0.1, Fault.STALL: 0.01}
"""With these everything arrives by itself."""


@dataclass
class Faults:
    """A schedule at work. Times in seconds."""

    schedule: Schedule = field(default_factory=Script)
    delay_s: float = 0.01
    stall_s: float = 0.05
    log: list[tuple[Point, int, Fault]] = field(default_factory=list)
    _counts: Counter[Point] = field(default_factory=Counter)

    def at(self, point: Point) -> Fault:
        self._counts[point] += 1
        fault = self.schedule.fault(point, self._counts[point])
        if fault is not Fault.NONE:
            self.log.append((point, self._counts[point], fault))
        return fault


MESSAGE_BLOCKS = 8
_LOST = "~lost"
"""Added to a reservation's name: the receiver knows none by this name, and counts nothing of it as landed."""

Item = TypeVar("Item", bound="Message | Pushed | SenderDrained | ReceiverEvent")
InnerSender = Callable[[Bytes, PoolChecksums | None], TransferSender]


@dataclass(frozen=True, slots=True)
class Message:
    """A part of a push."""

    reservation: str
    endpoint: dict[str, str]
    copies: tuple[BlockPush, ...]


class Gate(Generic[Item]):
    """Lets items pass one point, or holds them. `suffer` does what is not a matter of time."""

    def __init__(
        self, point: Point, faults: Faults, forward: Callable[[Item], None], suffer: Callable[[Fault, Item], None]
    ) -> None:
        self._point = point
        self._faults = faults
        self._forward = forward
        self._suffer = suffer
        self._held: list[Item] = []
        self._overtaken: list[Item] = []
        self._stalled = False
        self._loop = asyncio.get_running_loop()

    def enter(self, item: Item) -> None:
        """It comes to this point."""
        fault = self._faults.at(self._point)
        if self._stalled:
            self._held.append(item)
            return
        match fault:
            case Fault.NONE:
                self._forward(item)
            case Fault.DELAY:
                self._held.append(item)
                self._loop.call_later(self._faults.delay_s, self._release, item)
            case Fault.REORDER:
                self._overtaken.append(item)
                self._loop.call_later(self._faults.delay_s, self._release, item)
                return
            case Fault.STALL:
                self._stalled = True
                self._held.append(item)
                self._loop.call_later(self._faults.stall_s, self._resume)
            case _:
                self._suffer(fault, item)
        overtaken, self._overtaken = self._overtaken, []
        for one in overtaken:
            self._forward(one)

    def discard(self, reservation: str) -> None:
        """Nothing of it will pass any more."""
        self._held = [item for item in self._held if item.reservation != reservation]
        self._overtaken = [item for item in self._overtaken if item.reservation != reservation]

    def close(self) -> None:
        """Nothing will pass any more."""
        self._held.clear()
        self._overtaken.clear()

    def _release(self, item: Item) -> None:
        for held in (self._held, self._overtaken):
            for number, one in enumerate(held):
                if one is item and not self._stalled:
                    del held[number]
                    self._forward(item)
                    return

    def _resume(self) -> None:
        self._stalled = False
        held, self._held = self._held + self._overtaken, []
        self._overtaken.clear()
        for item in held:
            self._forward(item)


class FaultySender:
    """Wraps the sender that `make_inner` makes over the wire; with `checksums`, its blocks go with those of `pool`."""

    def __init__(self, pool: PoolLike, make_inner: InnerSender, faults: Faults, *, checksums: bool = False) -> None:
        assert isinstance(pool, np.ndarray)
        self._pool = pool
        self._wire = pool.copy()
        self._inner = make_inner(self._wire, PoolChecksums(pool) if checksums else None)
        self._faults = faults
        self.name = self._inner.name
        self.counters = self._inner.counters
        self._doubled: Counter[tuple[str, int]] = Counter()  # by reservation and block: copies nobody asked for
        self._active: set[str] = set()
        self._lossy: set[str] = set()
        self._draining: dict[str, set[str]] = {}
        self._failed: set[str] = set()
        self._is_dead = False

    def start(self, on_event: Callable[[SenderEvent], None]) -> None:
        self._on_event = on_event
        self._pushes = Gate[Message](Point.PUSH, self._faults, self._send, self._spoil)
        self._pushed = Gate[Pushed](Point.PUSHED, self._faults, on_event, self._impossible)
        self._drained = Gate[SenderDrained](Point.DRAINED, self._faults, self._tell_drained, self._repeat)
        self._inner.start(self._take)

    def push(
        self, reservation: str, endpoint: dict[str, str], copies: Sequence[BlockPush], part: PartCopy | None = None
    ) -> None:
        """Raises ValueError as every sender does."""
        assert part is None
        Copies.of(copies, len(self._pool))
        self._active.add(reservation)
        for first in range(0, len(copies), MESSAGE_BLOCKS):
            if self._is_dead:
                asyncio.get_running_loop().call_soon(self._fail, reservation)
                return
            self._pushes.enter(Message(reservation, endpoint, tuple(copies[first : first + MESSAGE_BLOCKS])))

    def abort(self, reservation: str) -> None:
        self._pushes.discard(reservation)
        self._active.discard(reservation)
        if reservation in self._draining:
            return
        names = {reservation} | ({reservation + _LOST} if reservation in self._lossy else set())
        self._draining[reservation] = set(names)
        for name in names:
            self._inner.abort(name)

    def close(self) -> None:
        self._pushes.close()
        self._pushed.close()
        self._drained.close()
        self._inner.close()

    # -- messages -----------------------------------------------------------------------------------------------------

    def _send(self, message: Message) -> None:
        sources = [copy.source for copy in message.copies]
        self._wire[sources] = self._pool[sources]
        self._give(message, message.reservation)

    def _give(self, message: Message, name: str) -> None:
        self._inner.push(name, message.endpoint, message.copies)

    def _spoil(self, fault: Fault, message: Message) -> None:
        match fault:
            case Fault.DUPLICATE:
                self._doubled.update((message.reservation, copy.index) for copy in message.copies)
                self._send(message)
                self._send(message)
            case Fault.DROP:
                self._lossy.add(message.reservation)
                self._give(message, message.reservation + _LOST)
            case Fault.CORRUPT:
                sources = [copy.source for copy in message.copies]
                self._wire[sources] = self._pool[sources]
                self._wire[sources[-1], -1] ^= np.uint8(0x10)
                self._give(message, message.reservation)
            case _:
                self.die()

    def die(self) -> None:
        self._is_dead = True
        self._pushes.close()
        for reservation in sorted(self._active):
            asyncio.get_running_loop().call_soon(self._fail, reservation)

    def _fail(self, reservation: str, cause: str = "the connection broke") -> None:
        if reservation not in self._failed:
            self._failed.add(reservation)
            self._on_event(TransferFailed(reservation, cause))

    # -- events -------------------------------------------------------------------------------------------------------

    def _take(self, event: SenderEvent) -> None:
        reservation = event.reservation.removesuffix(_LOST)
        match event:
            case Pushed(_, blocks, num_bytes):
                doubled = {block for block in blocks if self._doubled[reservation, block]}
                self._doubled.subtract((reservation, block) for block in doubled)
                left = tuple(block for block in blocks if block not in doubled)
                if left and reservation not in self._draining:
                    self._pushed.enter(Pushed(reservation, left, num_bytes // len(blocks) * len(left)))
            case SenderDrained(name):
                names = self._draining.get(reservation)
                if names is not None:
                    names.discard(name)
                    if not names:
                        self._drained.enter(SenderDrained(reservation))
            case TransferFailed(_, cause):
                self._fail(reservation, cause)

    def _tell_drained(self, event: SenderDrained) -> None:
        self._pushed.discard(event.reservation)
        self._draining.pop(event.reservation, None)
        self._on_event(event)

    def _repeat(self, fault: Fault, event: SenderDrained) -> None:
        self._tell_drained(event)
        self._tell_drained(event)

    @staticmethod
    def _impossible(fault: Fault, event: Pushed) -> None:
        raise AssertionError(f"{fault} at {event}")


class FaultyReceiver:
    """Wraps a receiver; what it reports may come late, in another order, or twice."""

    def __init__(self, inner: TransferReceiver, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults
        self.name = inner.name
        self.is_one_sided = inner.is_one_sided

    @property
    def endpoint(self) -> dict[str, str]:
        return self._inner.endpoint

    def start(self, on_event: Callable[[ReceiverEvent], None]) -> None:
        self._on_event = on_event
        self._landed = Gate[ReceiverEvent](Point.LANDED, self._faults, on_event, self._spoil)
        self._inner.start(self._landed.enter)

    def admit(self, reservation: str, first_block: int, slots: Sequence[int], parts: Sequence[BlockPart] = ()) -> None:
        self._inner.admit(reservation, first_block, slots, parts)

    def release(self, reservation: str) -> None:
        self._landed.discard(reservation)
        self._inner.release(reservation)

    def close(self) -> None:
        self._landed.close()
        self._inner.close()

    def _spoil(self, fault: Fault, event: ReceiverEvent) -> None:
        if fault is Fault.DIE:
            self._inner.close()
            return
        self._on_event(event)
        self._on_event(event)
