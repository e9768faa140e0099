"""The event loop and the thread that copies: who waits for which copy, and that nothing lands after a release."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from threading import Event, Thread

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.handoff.transports.base import Corrupted, Landed, ReceiverEvent
from kvrelay.handoff.transports.pool_memory import BlockPart, HostPool, checksums_of
from kvrelay.handoff.transports.receiver_thread import Dropped, ReceiverThread, WritePermits
from kvrelay.handoff.transports.wire import BlocksHeader, Bytes, Indices, decode_header, encode_header
from tests.fakes.waiting import PATIENCE_S, wait_until

NUM_BLOCKS, BLOCK_BYTES = 24, 16
FREE = 0xEE
"""What a slot holds that belongs to nobody."""


class SlowPool(HostPool):
    """Copies block by block; calls `before` ahead of each."""

    def __init__(self, memory: Bytes, before: Callable[[], None]) -> None:
        super().__init__(memory)
        self._before = before

    def scatter(self, slots: Indices, rows: Bytes, part: BlockPart | None = None) -> None:
        for number in range(len(slots)):
            self._before()
            super().scatter(slots[number : number + 1], rows[number : number + 1])


class QueueReceiver(ReceiverThread):
    """Takes messages out of a queue, on its thread."""

    def __init__(self, pool: SlowPool) -> None:
        super().__init__("receiver", pool)
        self.messages: SimpleQueue[tuple[bytes, memoryview] | None] = SimpleQueue()
        self.events: list[ReceiverEvent] = []
        self.failure: BaseException | None = None
        self.running = Thread(target=self.take_all, daemon=True)
        self.running.start()

    def take_all(self) -> None:
        try:
            while (message := self.messages.get()) is not None:
                self.events += self._take(*message)
        except Exception as error:
            self.failure = error

    def send(
        self, reservation: str, blocks: Sequence[int], slots: Sequence[int], *, corrupt: bool | None = None
    ) -> None:
        """Blocks that are full of their index. `corrupt`: not None with checksums, and true with wrong ones."""
        indices = np.array(blocks, np.int64)
        data = np.repeat(indices.astype(np.uint8), BLOCK_BYTES).reshape(-1, BLOCK_BYTES)
        checksums = None if corrupt is None else checksums_of(data) + np.uint32(corrupt)
        header = encode_header(reservation, BLOCK_BYTES, indices, np.array(slots, np.int64), checksums)
        self.messages.put((header, data.reshape(-1).data))

    def end(self) -> None:
        self.messages.put(None)
        self.running.join(PATIENCE_S)
        assert not self.running.is_alive() and self.failure is None


def target(before: Callable[[], None]) -> tuple[Bytes, QueueReceiver]:
    memory: Bytes = np.full((NUM_BLOCKS, BLOCK_BYTES), FREE, np.uint8)
    return memory, QueueReceiver(SlowPool(memory, before))


def test_only_the_release_of_what_is_copied_waits_for_the_copy() -> None:
    begun, go_on, released = Event(), Event(), Event()

    def before() -> None:
        begun.set()
        assert go_on.wait(PATIENCE_S)

    memory, receiver = target(before)
    receiver.admit("a", 0, [1, 2])
    receiver.admit("b", 0, [3])
    receiver.send("a", [0, 1], [1, 2])
    receiver.send("a", [0, 1], [1, 2])
    assert begun.wait(PATIENCE_S)
    calls = (lambda: receiver.admit("c", 0, [4]), lambda: receiver.release("b"), lambda: receiver.release("unknown"))
    for call in calls:
        each = Thread(target=call, daemon=True)
        each.start()
        each.join(PATIENCE_S)
        assert not each.is_alive()
    with pytest.raises(ValueError, match="another reservation's"):
        receiver.admit("d", 0, [1, 4])

    def release() -> None:
        receiver.release("a")
        assert (memory[[1, 2]] != FREE).all()
        memory[[1, 2]] = FREE
        released.set()

    releasing = Thread(target=release, daemon=True)
    releasing.start()
    wait_until(lambda: "a" not in receiver._permits)
    assert not released.is_set()
    go_on.set()
    assert released.wait(PATIENCE_S)
    receiver.end()
    assert (memory == FREE).all()
    assert receiver.events == []
    assert receiver.counters.dropped["unknown_reservation"] == 2


def test_a_copy_that_fails_holds_no_release() -> None:
    def before() -> None:
        raise OSError("the device is lost")

    _, receiver = target(before)
    receiver.admit("a", 0, [1])
    receiver.send("a", [0], [1])
    wait_until(lambda: receiver.failure is not None)
    receiver.release("a")
    receiver.admit("b", 0, [1])


@pytest.mark.parametrize("seed", range(12))
def test_nothing_is_written_into_slots_that_were_released_whatever_the_threads_do(seed: int) -> None:
    """The loop's side admits and releases at random while messages, also repeated and late ones, are taken."""
    draw, pause = random.Random(seed), random.Random(-seed)
    memory, receiver = target(lambda: time.sleep(pause.choice((0, 0, 0, 1e-5, 2e-4))))
    free, open_, sent = set(range(NUM_BLOCKS)), dict[str, list[int]](), list[tuple[str, list[int], list[int]]]()

    def end(name: str) -> None:
        receiver.release(name)
        slots = open_.pop(name)
        for index, slot in enumerate(slots):
            assert set(memory[slot].tolist()) in ({FREE}, {index}), "whole, or not at all"
        memory[slots] = FREE
        free.update(slots)

    receiver.admit("first", 0, [0, 1])
    for corrupt in (True, False):
        receiver.send("first", [0, 1], [0, 1], corrupt=corrupt)
    wait_until(lambda: len(receiver.events) == 2)
    assert receiver.events == [Corrupted("first", (0, 1)), Landed("first", (0, 1))]
    free, open_["first"] = free - {0, 1}, [0, 1]
    for number in range(300):
        assert (memory[sorted(free)] == FREE).all()
        action = draw.random()
        if action < 0.3 and len(free) >= 4:
            slots = draw.sample(sorted(free), draw.randint(1, 4))
            free.difference_update(slots)
            open_[f"r{number}"] = slots
            receiver.admit(f"r{number}", 0, slots)
            sent.append((f"r{number}", list(range(len(slots))), slots))
        elif action < 0.75 and sent:
            name, blocks, slots = draw.choice(sent[-8:])
            some = draw.sample(blocks, draw.randint(1, len(blocks)))
            receiver.send(name, some, [slots[each] for each in some], corrupt=draw.choice((None, None, False, True)))
        elif open_:
            end(draw.choice(sorted(open_)))
        if draw.random() < 0.1:
            wait_until(receiver.messages.empty)
    for name in list(open_):
        end(name)
    receiver.end()
    assert (memory == FREE).all()
    events = [each for each in receiver.events if isinstance(each, Landed)]
    landed = [(each.reservation, block) for each in events for block in each.blocks]
    assert len(set(landed)) == len(landed)


# -- the receiver's book ---------------------------------------------------------------------------------------------


SMALL_BLOCK_BYTES = 8
NUM_PERMITTED = 16


def header(
    indices: list[int], slots: list[int], reservation: str = "r", block_bytes: int = SMALL_BLOCK_BYTES
) -> BlocksHeader:
    return decode_header(encode_header(reservation, block_bytes, np.array(indices), np.array(slots)))


@pytest.fixture
def book() -> WritePermits:
    made = WritePermits(NUM_PERMITTED, SMALL_BLOCK_BYTES)
    made.admit("r", 10, [3, 1, 4])
    return made


def test_blocks_go_to_the_slots_they_were_admitted_to(book: WritePermits) -> None:
    writes = book.check(header([12, 10], [4, 3]), 2 * SMALL_BLOCK_BYTES)
    assert (writes.rows.tolist(), writes.slots.tolist(), writes.blocks) == ([0, 1], [4, 3], (12, 10))


def test_what_landed_is_left_out_of_the_next_message(book: WritePermits) -> None:
    book.land("r", (11,))
    writes = book.check(header([10, 11, 12], [3, 1, 4]), 3 * SMALL_BLOCK_BYTES)
    assert (writes.rows.tolist(), writes.slots.tolist(), writes.blocks) == ([0, 2], [3, 4], (10, 12))


@pytest.mark.parametrize(
    ("cause", "message", "num_bytes"),
    [
        ("unknown_reservation", header([10], [3], reservation="s"), SMALL_BLOCK_BYTES),
        ("block_bytes", header([10], [3], block_bytes=16), 16),
        ("size", header([10], [3]), SMALL_BLOCK_BYTES - 1),
        ("size", header([10], [3]), 2 * SMALL_BLOCK_BYTES),
        ("index", header([9], [3]), SMALL_BLOCK_BYTES),
        ("index", header([13], [3]), SMALL_BLOCK_BYTES),
        ("slot", header([10], [1]), SMALL_BLOCK_BYTES),
        ("repeated_index", header([10, 10], [3, 3]), 2 * SMALL_BLOCK_BYTES),
    ],
)
def test_a_message_that_disagrees_is_dropped(
    book: WritePermits, cause: str, message: BlocksHeader, num_bytes: int
) -> None:
    with pytest.raises(Dropped) as dropped:
        book.check(message, num_bytes)
    assert dropped.value.cause == cause


def test_a_message_of_landed_blocks_alone_is_a_duplicate(book: WritePermits) -> None:
    book.land("r", (10, 11))
    with pytest.raises(Dropped, match="duplicate"):
        book.check(header([11, 10], [1, 3]), 2 * SMALL_BLOCK_BYTES)


def test_nothing_is_written_after_release(book: WritePermits) -> None:
    book.release("r")
    with pytest.raises(Dropped, match="unknown_reservation"):
        book.check(header([10], [3]), SMALL_BLOCK_BYTES)


def test_a_slot_is_free_again_after_release_or_landing(book: WritePermits) -> None:
    for slot in (3, 1, 4):
        with pytest.raises(ValueError, match="slot"):
            book.admit("s", 0, [slot])
    book.land("r", (10,))
    book.admit("s", 0, [3])
    book.release("r")
    book.admit("t", 0, [1, 4])
    with pytest.raises(ValueError, match="slot"):
        book.admit("u", 0, [3])


def test_releasing_does_not_free_a_landed_slot_that_another_reservation_holds(book: WritePermits) -> None:
    book.land("r", (10,))
    book.admit("s", 0, [3])
    book.release("r")
    with pytest.raises(ValueError, match="slot"):
        book.admit("t", 0, [3])


@pytest.mark.parametrize("slots", [[0, 0], [NUM_PERMITTED], [-1], [0, 3]])
def test_a_refused_admission_changes_nothing(book: WritePermits, slots: list[int]) -> None:
    with pytest.raises(ValueError, match="slot"):
        book.admit("s", 0, slots)
    assert len(book) == 1
    book.admit("s", 0, [0, 15])


@given(st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(0, 9), min_size=1, unique=True)), max_size=20))
def test_each_block_is_written_once_in_the_life_of_a_reservation(messages: list[tuple[int, list[int]]]) -> None:
    book = WritePermits(100, SMALL_BLOCK_BYTES)
    for reservation in range(6):
        book.admit(str(reservation), 0, range(10 * reservation, 10 * reservation + 10))
    written: list[int] = []
    causes: set[str] = set()
    for reservation, indices in messages:
        slots = [10 * reservation + index for index in indices]
        try:
            writes = book.check(header(indices, slots, str(reservation)), len(indices) * SMALL_BLOCK_BYTES)
        except Dropped as dropped:
            causes.add(dropped.cause)
            continue
        book.land(str(reservation), writes.blocks)
        written += writes.slots.tolist()
    assert causes <= {"duplicate"}
    assert len(written) == len(set(written))
    assert set(written) == {10 * reservation + index for reservation, indices in messages for index in indices}
