"""What the events of several ranks amount to, in any order."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.handoff.transports.base import Corrupted, Landed, Pushed, SenderDrained, TransferFailed
from kvrelay.handoff.transports.sharded import LandingProgress, PushProgress
from tests.thoroughness import examples


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 3), st.integers(1, 6))
def test_a_block_has_left_when_its_last_part_has_and_bytes_add_up(
    seed: int, num_ranks: int, num_parts: int, num_blocks: int
) -> None:
    rng, progress = random.Random(seed), PushProgress(num_ranks)
    progress.started("r", range(num_blocks), num_parts)
    left = [block for block in range(num_blocks) for _ in range(num_parts)]
    rng.shuffle(left)
    total = 0
    while left:
        block = left.pop()
        event = progress.handle(Pushed("r", (block,), 10))
        assert (event is not None) == (block not in left)
        if event is not None:
            assert isinstance(event, Pushed) and event.blocks == (block,)
            total += event.num_bytes
    assert total == 10 * num_parts * num_blocks


def test_blocks_leave_once_each_when_all_parts_have() -> None:
    progress = PushProgress(2)
    progress.started("r", (3, 4), 2)
    assert progress.handle(Pushed("r", (3, 4), 20)) is None
    assert progress.handle(Pushed("r", (4,), 10)) == Pushed("r", (4,), 30)
    assert progress.handle(Pushed("r", (3,), 10)) == Pushed("r", (3,), 10)
    progress.started("r", (3,), 2)  # asked for again
    assert progress.handle(Pushed("r", (3,), 10)) is None
    assert progress.handle(Pushed("r", (3,), 10)) == Pushed("r", (3,), 20)


def test_the_first_failure_counts_and_the_last_drain() -> None:
    progress = PushProgress(3)
    progress.started("r", (0,), 3)
    assert progress.handle(TransferFailed("r", "rank 1")) == TransferFailed("r", "rank 1")
    assert progress.handle(TransferFailed("r", "rank 2")) is None
    assert progress.aborted("r")
    assert not progress.aborted("r")
    drained = SenderDrained("r")
    assert [progress.handle(drained) for _ in range(3)] == [None, None, drained]
    assert progress.aborted("r"), "an unknown reservation drains again"


def test_events_of_whole_blocks_come_through() -> None:
    progress = PushProgress(1)
    for event in (Pushed("r", (0,), 1), TransferFailed("r", "cause")):
        assert progress.handle(event) is event
    assert progress.aborted("r")
    assert progress.handle(SenderDrained("r")) == SenderDrained("r")


def test_a_block_has_landed_when_it_has_on_all_ranks() -> None:
    progress = LandingProgress(2)
    progress.admitted("r", range(2, 5))
    assert progress.handle(0, Landed("r", (2, 3, 4))) is None
    assert progress.handle(1, Landed("r", (3,))) == Landed("r", (3,))
    assert progress.handle(1, Corrupted("r", (2,))) == Corrupted("r", (2,))
    assert progress.handle(1, Landed("r", (2, 4))) == Landed("r", (2, 4))
    progress.released("r")
    assert progress.handle(0, Landed("r", (4,))) is None
