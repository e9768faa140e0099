"""Promised blocks, and the queue of those who wait for them."""

from __future__ import annotations

import pytest

from kvrelay.scheduling.memory.prefixes_in_progress import PrefixesInProgress
from kvrelay.scheduling.queue.queue_orders import ORDERS
from kvrelay.scheduling.queue.waiting_queue import PROBES_A_STEP, WaitingQueue
from kvrelay.scheduling.scheduler_settings import QueueOrderName
from kvrelay.scheduling.sequence import Sequence
from kvrelay.scheduling.tenants import TenantShares
from tests.unit.scheduling.bench import Bench, make_sequence

pytestmark = pytest.mark.unit
A, B, C = (bytes([n]) * 16 for n in range(3))


def test_a_promise_ends_when_it_is_kept_or_given_up() -> None:
    promised = PrefixesInProgress()
    promised.promise(("x", 1, 0), [A, B, C])
    promised.kept(("x", 1, 0), 1)
    assert [A in promised, B in promised, C in promised] == [False, True, True]
    assert promised.withdraw(("x", 1, 0)) == [B, C]
    assert not promised
    assert promised.withdraw(("x", 1, 0)) == ()


def test_a_block_that_two_promised_stays_promised_until_both_are_done() -> None:
    promised = PrefixesInProgress()
    promised.promise(("x", 1, 0), [A])
    promised.promise(("y", 1, 0), [A, B])
    promised.kept(("x", 1, 0), 1)
    assert A in promised
    promised.kept(("y", 1, 0), 2)
    assert not promised


def test_what_was_kept_beyond_the_promise_and_what_was_never_promised_changes_nothing() -> None:
    promised = PrefixesInProgress()
    promised.promise(("x", 1, 0), [A])
    promised.kept(("x", 1, 0), 3)  # blocks of its output are published, too
    promised.kept(("x", 1, 0), 1)
    promised.kept(("z", 1, 0), 1)
    promised.promise(("y", 1, 0), [])
    assert not promised


@pytest.mark.parametrize("order", ["fcfs", "lpm"])
def test_a_queue_that_waits_for_one_block_is_all_there_in_the_step_in_which_it_comes(order: QueueOrderName) -> None:
    """More than a step may look at: those are looked at whose turn it is."""
    bench = Bench(64)
    promised = PrefixesInProgress()
    shares = TenantShares({}, 8)
    queue = WaitingQueue(ORDERS[order], bench.blocks, promised, 1 << 20, shares)
    waiting = [make_sequence([1] * 9, 1, f"r{n}") for n in range(3 * PROBES_A_STEP)]
    promised.promise(("other", 1, 0), waiting[0].block_hashes(1))
    for sequence in waiting:
        shares.enter(sequence)
        queue.add(sequence)
    for _ in range(4):
        queue.refresh()
        assert queue.head() is None
        queue.check_integrity()
    queue.prefixes_changed(promised.withdraw(("other", 1, 0)))
    queue.refresh()
    admitted: list[Sequence] = []
    while (head := queue.head()) is not None:
        queue.admitted(head)
        admitted.append(head)
    assert len(waiting) == len(admitted) == len({s.key for s in admitted})
    assert not queue
