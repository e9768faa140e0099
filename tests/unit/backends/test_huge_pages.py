"""Tensors placed side by side in huge pages."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from kvrelay.backends.host_pages import HUGE_PAGE_BYTES, HugePages, huge_page_memory

pytestmark = pytest.mark.unit


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
