"""Cores that workers of one machine lend each other."""

from __future__ import annotations

import errno
import os
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.core_leases import GAP_LEASE_NS, INHERITED, STEP_LEASE_NS, CoreLeases, SharedLeases, leases_bytes

pytestmark = pytest.mark.unit


class Machine:
    def __init__(self, num_cores: int, shares: list[int]) -> None:
        self.now_ns = 1_000
        self.threads = [0] * len(shares)
        memory = memoryview(bytearray(leases_bytes(len(shares))))
        self.workers = [
            CoreLeases(memory, number, num_cores, shares, self._setter(number), lambda: self.now_ns)
            for number in range(len(shares))
        ]

    def _setter(self, number: int):  # type: ignore[no-untyped-def]
        def set_num_threads(num_threads: int) -> None:
            self.threads[number] = num_threads

        return set_num_threads


def test_a_worker_alone_has_all_cores_and_two_have_their_shares() -> None:
    machine = Machine(4, [2, 2])
    prefill, decode = machine.workers
    prefill.begin_step()
    assert machine.threads == [4, 0]
    decode.begin_step()
    prefill.end_step()
    prefill.begin_step()  # the gap between two steps lends nothing
    assert machine.threads == [2, 2]
    prefill.end_step()
    prefill.end()
    decode.end_step()
    decode.begin_step()
    assert machine.threads == [2, 4]


def test_cores_of_a_worker_that_died_or_stands_still_are_lent() -> None:
    machine = Machine(2, [1, 1])
    dead, other = machine.workers
    dead.begin_step()
    machine.now_ns += STEP_LEASE_NS - 1
    other.begin_step()
    assert machine.threads[1] == 1
    machine.now_ns += 1
    other.begin_step()
    assert machine.threads[1] == 2
    dead.begin_step()
    dead.end_step()
    machine.now_ns += GAP_LEASE_NS
    other.begin_step()
    assert machine.threads[1] == 2


@given(st.lists(st.integers(1, 8), min_size=1, max_size=6), st.integers(-2, 9), st.data())
def test_steps_never_have_more_threads_than_cores(shares: list[int], spare: int, data: st.DataObject) -> None:
    """Nor fewer than a worker's share, even if the shares are more than there are."""
    num_cores = max(1, sum(shares) + spare)
    machine = Machine(num_cores, shares)
    busy = data.draw(st.sets(st.integers(0, len(shares) - 1), min_size=1))
    for number in range(len(shares)):
        machine.workers[number].begin_step()
        machine.workers[number].end_step()
        if number not in busy:
            machine.workers[number].end()
    for number in busy:
        machine.workers[number].begin_step()
    threads = [machine.threads[number] for number in busy]
    assert all(machine.threads[number] >= shares[number] for number in busy)
    assert sum(threads) <= max(num_cores, sum(shares[number] for number in busy))
    if len(busy) == 1:
        assert threads == [max(num_cores, *threads)]
    # Less than a thread of each is left over.
    assert sum(threads) > num_cores - len(busy) or sum(threads) >= num_cores


@pytest.mark.parametrize("has_memfd", [True, False])
def test_processes_share_the_leases(has_memfd: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_memfd:
        monkeypatch.setattr(os, "memfd_create", Mock(side_effect=OSError(errno.ENOSYS, "no")))
    shared = SharedLeases(2, [1, 1])
    threads: list[tuple[int, int]] = []
    workers = []
    for number in range(2):
        environ = shared.environ_of(number)
        environ[INHERITED] = environ[INHERITED].replace(str(shared.descriptor), str(os.dup(shared.descriptor)), 1)
        worker = CoreLeases.inherited(environ, lambda count, number=number: threads.append((number, count)))  # type: ignore[misc]
        assert worker is not None
        workers.append(worker)
    os.close(shared.descriptor)
    workers[0].begin_step()
    workers[1].begin_step()
    workers[0].end()
    workers[1].begin_step()
    assert threads == [(0, 2), (1, 1), (1, 2)]
    assert CoreLeases.inherited({}, lambda count: None) is None
