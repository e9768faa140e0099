"""A device's pool as transports see it, on the CPU: the right bytes of the right blocks, however wide a block is."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.engine.run.block_copies import DevicePool

pytestmark = pytest.mark.unit
NUM_BLOCKS = 7


@given(
    st.sampled_from([torch.float32, torch.bfloat16, torch.uint8]),
    st.integers(1, 24),
    st.integers(0, 3),
    st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=1, max_size=NUM_BLOCKS, unique=True),
    st.randoms(use_true_random=False),
)
def test_blocks_are_gathered_and_scattered_as_an_array_s(
    dtype: torch.dtype, elements: int, skipped: int, blocks: list[int], random: Random
) -> None:
    """Also of a pool that does not begin where its memory does."""
    num_bytes = NUM_BLOCKS * elements * dtype.itemsize
    memory = torch.tensor([random.randint(0, 255) for _ in range(num_bytes + skipped * dtype.itemsize)]).to(torch.uint8)
    pool = memory.view(dtype)[skipped:].view(NUM_BLOCKS, elements)
    array = pool.view(torch.uint8).view(NUM_BLOCKS, -1).numpy().copy()
    device_pool, ids = DevicePool(pool), np.array(blocks, np.int64)
    assert (device_pool.num_blocks, device_pool.block_bytes) == array.shape
    assert device_pool.address == pool.data_ptr()
    out = device_pool.buffer(len(blocks) + 1)
    device_pool.gather(ids, out)
    assert np.array_equal(out[: len(blocks)], array[ids])
    assert [row.tolist() for row in device_pool.rows(ids)] == array[ids].tolist()
    rows = array[ids][::-1]
    device_pool.scatter(ids, rows)
    array[ids] = rows
    assert np.array_equal(pool.view(torch.uint8).view(NUM_BLOCKS, -1).numpy(), array)
