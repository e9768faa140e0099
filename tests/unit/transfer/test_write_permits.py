"""The receiver's book: what may be written where."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.handoff.transports.receiver_thread import Dropped, WritePermits
from kvrelay.handoff.transports.wire import BlocksHeader, decode_header, encode_header

pytestmark = pytest.mark.unit

BLOCK_BYTES = 8
NUM_BLOCKS = 16


def header(
    indices: list[int], slots: list[int], reservation: str = "r", block_bytes: int = BLOCK_BYTES
) -> BlocksHeader:
    return decode_header(encode_header(reservation, block_bytes, np.array(indices), np.array(slots)))


@pytest.fixture
def book() -> WritePermits:
    made = WritePermits(NUM_BLOCKS, BLOCK_BYTES)
    made.admit("r", 10, [3, 1, 4])
    return made


def test_blocks_go_to_the_slots_they_were_admitted_to(book: WritePermits) -> None:
    writes = book.check(header([12, 10], [4, 3]), 2 * BLOCK_BYTES)
    assert (writes.rows.tolist(), writes.slots.tolist(), writes.blocks) == ([0, 1], [4, 3], (12, 10))


def test_what_landed_is_left_out_of_the_next_message(book: WritePermits) -> None:
    book.land("r", (11,))
    writes = book.check(header([10, 11, 12], [3, 1, 4]), 3 * BLOCK_BYTES)
    assert (writes.rows.tolist(), writes.slots.tolist(), writes.blocks) == ([0, 2], [3, 4], (10, 12))


@pytest.mark.parametrize(
    ("cause", "message", "num_bytes"),
    [
        ("unknown_reservation", header([10], [3], reservation="s"), BLOCK_BYTES),
        ("block_bytes", header([10], [3], block_bytes=16), 16),
        ("size", header([10], [3]), BLOCK_BYTES - 1),
        ("size", header([10], [3]), 2 * BLOCK_BYTES),
        ("index", header([9], [3]), BLOCK_BYTES),
        ("index", header([13], [3]), BLOCK_BYTES),
        ("slot", header([10], [1]), BLOCK_BYTES),
        ("repeated_index", header([10, 10], [3, 3]), 2 * BLOCK_BYTES),
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
        book.check(header([11, 10], [1, 3]), 2 * BLOCK_BYTES)


def test_nothing_is_written_after_release(book: WritePermits) -> None:
    book.release("r")
    with pytest.raises(Dropped, match="unknown_reservation"):
        book.check(header([10], [3]), BLOCK_BYTES)


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


@pytest.mark.parametrize("slots", [[0, 0], [NUM_BLOCKS], [-1], [0, 3]])
def test_a_refused_admission_changes_nothing(book: WritePermits, slots: list[int]) -> None:
    with pytest.raises(ValueError, match="slot"):
        book.admit("s", 0, slots)
    assert len(book) == 1
    book.admit("s", 0, [0, 15])


@given(st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(0, 9), min_size=1, unique=True)), max_size=20))
def test_each_block_is_written_once_in_the_life_of_a_reservation(messages: list[tuple[int, list[int]]]) -> None:
    book = WritePermits(100, BLOCK_BYTES)
    for reservation in range(6):
        book.admit(str(reservation), 0, range(10 * reservation, 10 * reservation + 10))
    written: list[int] = []
    causes: set[str] = set()
    for reservation, indices in messages:
        slots = [10 * reservation + index for index in indices]
        try:
            writes = book.check(header(indices, slots, str(reservation)), len(indices) * BLOCK_BYTES)
        except Dropped as dropped:
            causes.add(dropped.cause)
            continue
        book.land(str(reservation), writes.blocks)
        written += writes.slots.tolist()
    assert causes <= {"duplicate"}
    assert len(written) == len(set(written))
    assert set(written) == {10 * reservation + index for reservation, indices in messages for index in indices}
