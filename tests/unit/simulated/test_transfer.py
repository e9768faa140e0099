"""The pace of a simulated transfer: one link, pieces in order, and nothing read before its time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence

import pytest

from kvrelay.handoff.transports.base import BlockPush, Pushed, SenderCounters, SenderDrained, SenderEvent
from kvrelay.handoff.transports.pool_memory import PartCopy
from kvrelay.simulated.timed_transport import PIECE_S, PacedSender
from tests.fakes.virtual_time import VirtualTimeLoop

BLOCK_BYTES, BLOCK_S = 1000, PIECE_S / 4
ENDPOINT = {"address": "there"}


class Instant:
    """Takes every push at once, and says when."""

    name = "instant"

    def __init__(self) -> None:
        self.counters = SenderCounters()
        self.pushes: list[tuple[float, str, list[int]]] = []

    def start(self, on_event: Callable[[SenderEvent], None]) -> None:
        self._on_event = on_event

    def push(
        self, reservation: str, endpoint: dict[str, str], copies: Sequence[BlockPush], part: PartCopy | None = None
    ) -> None:
        assert endpoint == ENDPOINT
        blocks = [copy.index for copy in copies]
        self.pushes.append((asyncio.get_running_loop().time(), reservation, blocks))
        self._on_event(Pushed(reservation, tuple(blocks), 8 * len(blocks)))

    def abort(self, reservation: str) -> None:
        self._on_event(SenderDrained(reservation))

    def close(self) -> None:
        pass


def copies_of(count: int) -> list[BlockPush]:
    return [BlockPush(index, index, index) for index in range(count)]


def started() -> tuple[PacedSender, Instant, list[SenderEvent]]:
    inner, events = Instant(), list[SenderEvent]()
    sender = PacedSender(inner, BLOCK_BYTES / BLOCK_S, BLOCK_BYTES, 100)
    sender.start(events.append)
    return sender, inner, events


def in_virtual_time(test: Callable[[], Coroutine[None, None, None]]) -> None:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(test())


def test_pushes_take_the_link_one_after_the_other_in_pieces() -> None:
    async def test() -> None:
        sender, inner, events = started()
        sender.push("a", ENDPOINT, copies_of(6))
        sender.push("b", ENDPOINT, copies_of(1))
        assert events == []
        await asyncio.sleep(1)
        assert [(name, blocks) for _, name, blocks in inner.pushes] == [("a", [0, 1, 2, 3]), ("a", [4, 5]), ("b", [0])]
        assert [at for at, _, _ in inner.pushes] == pytest.approx([4 * BLOCK_S, 6 * BLOCK_S, 7 * BLOCK_S])
        assert events == [Pushed("a", (0, 1, 2, 3), 4000), Pushed("a", (4, 5), 2000), Pushed("b", (0,), 1000)]
        sender.push("c", ENDPOINT, copies_of(1))  # the link was idle: its time is not saved up
        await asyncio.sleep(1)
        assert inner.pushes[-1][0] == pytest.approx(1 + BLOCK_S)

    in_virtual_time(test)


def test_an_abort_drops_what_has_not_left_and_frees_the_link() -> None:
    async def test() -> None:
        sender, inner, events = started()
        for name in ("a", "b"):
            sender.push(name, ENDPOINT, copies_of(6))
        await asyncio.sleep(5 * BLOCK_S)
        sender.abort("a")
        assert events == [Pushed("a", (0, 1, 2, 3), 4000), SenderDrained("a")]
        await asyncio.sleep(1)
        assert [(name, blocks) for _, name, blocks in inner.pushes[1:]] == [("b", [0, 1, 2, 3]), ("b", [4, 5])]
        assert inner.pushes[1][0] == pytest.approx(9 * BLOCK_S)
        sender.abort("unknown")
        assert events[-1] == SenderDrained("unknown")

    in_virtual_time(test)


def test_nothing_leaves_after_it_is_closed() -> None:
    async def test() -> None:
        sender, inner, _ = started()
        sender.push("a", ENDPOINT, copies_of(6))
        sender.close()
        await asyncio.sleep(1)
        assert inner.pushes == []

    in_virtual_time(test)
