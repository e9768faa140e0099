"""Pages of a pool are there before they are written."""

from __future__ import annotations

import mmap
import sys

import psutil
import pytest
import torch

from kvrelay.backends import host_pages
from kvrelay.backends.host_pages import populate_in_background
from tests.fakes.waiting import PATIENCE_S

pytestmark = pytest.mark.unit
NUM_BYTES = 64 << 20


def pool_of_zeros() -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(-1, NUM_BYTES), dtype=torch.int8)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems take pages as they are written")
def test_all_pages_are_taken_and_keep_what_they_contain() -> None:
    pool, process = pool_of_zeros(), psutil.Process()
    pool[::1_000_003] = 7
    expected, before = pool[::1_000_003].clone(), process.memory_info().rss
    thread = populate_in_background(pool)
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert process.memory_info().rss - before > NUM_BYTES * 0.8
    assert torch.equal(pool[::1_000_003], expected)
    assert pool.count_nonzero() == len(expected)


def test_little_free_memory_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the pool takes what tokens need."""
    pool, process = pool_of_zeros(), psutil.Process()
    before = process.memory_info().rss
    monkeypatch.setattr(host_pages, "available_memory_bytes", lambda: 1 << 30)
    populate_in_background(pool).join(PATIENCE_S)
    assert process.memory_info().rss - before < NUM_BYTES // 2


def test_a_pool_may_be_dropped_meanwhile() -> None:
    for _ in range(20):
        pool = pool_of_zeros()
        thread = populate_in_background(pool)
        del pool
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def test_memory_that_begins_within_a_page() -> None:
    pool = pool_of_zeros()[5000:-300]
    thread = populate_in_background(pool)
    thread.join(PATIENCE_S)
    assert not pool.any()
