"""Senders and receivers of one transport in one process, with everything they reported."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from kvrelay.handoff.transports.base import (
    BlockPush,
    Landed,
    Pushed,
    ReceiverEvent,
    SenderDrained,
    SenderEvent,
    TransferFailed,
    TransferReceiver,
    TransferSender,
)
from kvrelay.handoff.transports.receiver_thread import ReceiverCounters
from kvrelay.handoff.transports.wire import Bytes
from tests.component.transfer.transports import EMPTY, Transport
from tests.fakes.waiting import PATIENCE_S, until


class Log:
    """Events in order, and a way to wait for what they amount to."""

    def __init__(self) -> None:
        self.events: list[SenderEvent | ReceiverEvent] = []
        self.tell: Callable[[SenderEvent | ReceiverEvent], None] | None = None
        """Also told of every event, if set."""
        self._news = asyncio.Event()

    def add(self, event: SenderEvent | ReceiverEvent) -> None:
        """The callback that ends are started with."""
        self.events.append(event)
        self._news.set()
        if self.tell is not None:
            self.tell(event)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Raises TimeoutError if it does not come to hold."""
        async with asyncio.timeout(PATIENCE_S):
            while not holds():
                self._news.clear()
                await self._news.wait()


@dataclass
class SendingEnd:
    """A sender, its pool, its log."""

    pool: Bytes
    sender: TransferSender
    log: Log = field(default_factory=Log)

    def push(self, reservation: str, endpoint: dict[str, str], copies: Iterable[BlockPush]) -> None:
        self.sender.push(reservation, endpoint, list(copies))

    def pushed(self, reservation: str) -> list[int]:
        """Blocks reported as pushed, sorted, with repeats."""
        events = [event for event in self.log.events if isinstance(event, Pushed) and event.reservation == reservation]
        assert all(event.num_bytes == len(event.blocks) * self.pool.shape[1] for event in events)
        return sorted(block for event in events for block in event.blocks)

    def failures(self, reservation: str) -> list[str]:
        return [e.cause for e in self.log.events if isinstance(e, TransferFailed) and e.reservation == reservation]

    async def until_pushed(self, reservation: str, blocks: Iterable[int]) -> None:
        """Waits until these blocks, each once, were reported."""
        wanted = sorted(blocks)
        await self.log.until(lambda: self.pushed(reservation) == wanted)

    async def until_begun(self) -> None:
        """Waits until the sender has seen all pushes, and had a turn to begin with them."""
        for turn in ("first", "second"):
            await self.abort(f"{turn} turn")
            self.log.events.remove(SenderDrained(f"{turn} turn"))

    async def abort(self, reservation: str) -> None:
        """Aborts, and waits for the sender to drain."""
        self.sender.abort(reservation)
        await self.log.until(lambda: SenderDrained(reservation) in self.log.events)


@dataclass
class ReceivingEnd:
    """A receiver, its pool, its log."""

    pool: Bytes
    receiver: TransferReceiver
    log: Log = field(default_factory=Log)

    @property
    def endpoint(self) -> dict[str, str]:
        return self.receiver.endpoint

    def landed(self, reservation: str) -> list[int]:
        """Blocks reported as landed, sorted, with repeats."""
        events = [event for event in self.log.events if isinstance(event, Landed) and event.reservation == reservation]
        return sorted(block for event in events for block in event.blocks)

    async def until_landed(self, reservation: str, blocks: Iterable[int]) -> None:
        """Waits until these blocks, each once, were reported."""
        wanted = sorted(blocks)
        await self.log.until(lambda: self.landed(reservation) == wanted)

    def assert_untouched(self, slots: Iterable[int]) -> None:
        """Nothing was ever written there."""
        assert (self.pool[list(slots)] == EMPTY).all()


AnyEnd = TypeVar("AnyEnd", SendingEnd, ReceivingEnd)


class Rig:
    """Makes ends, starts them, and closes them all."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._ends: list[SendingEnd | ReceivingEnd] = []

    def sender(self, pool: Bytes) -> SendingEnd:
        return self._start(SendingEnd(pool, self.transport.make_sender(pool)))

    def receiver(self, pool: Bytes) -> ReceivingEnd:
        return self._start(ReceivingEnd(pool, self.transport.make_receiver(pool)))

    def _start(self, end: AnyEnd) -> AnyEnd:
        (end.sender if isinstance(end, SendingEnd) else end.receiver).start(end.log.add)
        self._ends.append(end)
        return end

    def close(self) -> None:
        for end in self._ends:
            (end.sender if isinstance(end, SendingEnd) else end.receiver).close()


@dataclass(frozen=True)
class Plan:
    """Scattered copies of one reservation: `sources[i]` of the sender to `slots[i]`, as block `first_block + i`."""

    reservation: str
    first_block: int
    sources: tuple[int, ...]
    slots: tuple[int, ...]

    @property
    def blocks(self) -> range:
        """Their indices in the prompt."""
        return range(self.first_block, self.first_block + len(self.slots))

    @property
    def copies(self) -> list[BlockPush]:
        return [BlockPush(*numbers) for numbers in zip(self.blocks, self.sources, self.slots, strict=True)]

    def admit(self, end: ReceivingEnd) -> None:
        end.receiver.admit(self.reservation, self.first_block, self.slots)

    def assert_arrived(self, source: Bytes, target: Bytes) -> None:
        """Every slot holds its block's bytes."""
        assert np.array_equal(target[list(self.slots)], source[list(self.sources)])


def scattered(
    reservation: str,
    count: int,
    num_blocks: int,
    random: np.random.Generator,
    *,
    first_block: int = 0,
    slots: Sequence[int] | None = None,
) -> Plan:
    """`count` random blocks to random slots, of pools with `num_blocks`; or to the given slots."""
    sources = random.permutation(num_blocks)[:count]
    drawn = random.permutation(num_blocks)[:count] if slots is None else slots
    return Plan(reservation, first_block, tuple(map(int, sources)), tuple(map(int, drawn)))


async def send_all(source: SendingEnd, target: ReceivingEnd, plan: Plan) -> None:
    """Until all of the plan has landed."""
    plan.admit(target)
    source.push(plan.reservation, target.endpoint, plan.copies)
    await target.until_landed(plan.reservation, plan.blocks)


async def push_each_alone(pool: Bytes, sender: TransferSender, target: TransferReceiver, num_blocks: int) -> None:
    """Each block as a push of its own, with whatever the sender does between them; then both ends are closed."""
    end = SendingEnd(pool, sender)
    try:
        target.start(lambda landed: None)
        target.admit("r", 0, range(num_blocks))
        end.sender.start(end.log.add)
        for block in range(num_blocks):
            end.push("r", target.endpoint, [BlockPush(block, block, block)])
            await end.until_pushed("r", range(block + 1))
    finally:
        end.sender.close()
        target.close()


async def check_both_count(
    source: SendingEnd, target: ReceivingEnd, taken: ReceiverCounters, random: np.random.Generator, block_bytes: int
) -> None:
    """200 blocks between pools of 300: both ends count blocks, bytes and messages alike."""
    await send_all(source, target, scattered("r", 200, 300, random))
    sent = source.sender.counters
    await until(lambda: sent.num_blocks == 200)  # with one-sided writes the receiver may count first
    assert (sent.num_blocks, sent.num_bytes) == (taken.num_blocks, taken.num_bytes) == (200, 200 * block_bytes)
    assert sent.num_messages == taken.num_messages
    assert not taken.dropped
