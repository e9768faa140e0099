"""Pages of a pool are there before they are written, and tensors lie side by side in huge pages."""

from __future__ import annotations

import mmap
import sys
from itertools import pairwise

import psutil
import pytest
import torch

from kvrelay.backends import host_pages
from kvrelay.backends.host_pages import HUGE_PAGE_BYTES, HugePages, huge_page_memory, populate_in_background
from tests.fakes.waiting import PATIENCE_S

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


# -- tensors placed side by side in huge pages -----------------------------------------------------------------------


def test_memory_begins_at_a_huge_page_and_is_zero() -> None:
    memory = huge_page_memory(3 * HUGE_PAGE_BYTES + 5)
    assert memory.shape == (3 * HUGE_PAGE_BYTES + 5,) and memory.dtype == torch.uint8
    assert memory.data_ptr() % HUGE_PAGE_BYTES == 0
    assert not memory.any()


def test_placed_tensors_are_equal_and_apart() -> None:
    """Of several types and sizes: empty ones, ones that share a chunk, ones that are larger than a chunk."""
    pages, generator = HugePages(), torch.Generator().manual_seed(0)
    shapes = [(0,), (3,), (5, 7), (1, 1 << 21), (9, 1 << 20), (1 << 21, 3), (2, 5, 64), (1 << 20,), (1 << 21,), (4,)]
    tensors = []
    for number, shape in enumerate(shapes * 2):
        dtype = (torch.float32, torch.bfloat16, torch.int8)[number % 3]
        tensors.append((torch.rand(shape, generator=generator) * 100).to(dtype))
    transposed = torch.rand(6, 10, generator=generator).t()
    tensors.append(transposed)
    placed = [pages.place(each) for each in tensors]
    ranges = sorted((each.data_ptr(), each.data_ptr() + each.nbytes) for each in placed if each.nbytes)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(ranges))
    for before, after in zip(tensors, placed, strict=True):
        assert after.is_contiguous() and after.data_ptr() % 64 == 0
        assert torch.equal(before, after)
