"""The pool's size from a profile of the largest step, and the swap space beside it, on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.engine import make as make_module
from kvrelay.engine.make import PoolSizing, make_runner
from kvrelay.engine.pool_size import HostGauge, MemoryGauge, PoolDoesNotFit, make_gauge, profile_memory
from kvrelay.step.batch import HostCopies
from tests.tiny_models import build_model
from tests.unit.engine.test_host_buffer import check, steps

MIB = 1 << 20
TOKEN_BUDGET, MAX_RUNNING = 2048, 64
SHARE = 0.05
CONTEXT_BYTES = 64 * MIB
"""What libraries load with their first kernels, beside torch's allocator, at most; of the tiny models."""


class OfficeGauge(HostGauge):
    """A CPU's share of the test: a memory of 16 GiB in which nothing but the step takes anything."""

    def __init__(self) -> None:
        self.resting = 100 * MIB

    def total(self) -> int:
        return 16384 * MIB

    def rest(self) -> int:
        return self.resting

    def peak(self) -> int:
        return self.resting + 200 * MIB


@pytest.fixture
def gauge(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> MemoryGauge:
    """Made before the model is loaded, as the runner's own is."""
    if device.type == "cuda":
        return make_gauge(device)
    office = OfficeGauge()  # what a process with other tests in it takes says nothing about this one
    monkeypatch.setattr(make_module, "make_gauge", lambda _: office)
    return office


def test_a_pool_sized_by_its_share_leaves_room_for_the_largest_step(
    device: torch.device, gauge: MemoryGauge, tmp_path: Path
) -> None:
    directory = str(build_model("llama", tmp_path))
    sizing = PoolSizing(SHARE, TOKEN_BUDGET, MAX_RUNNING)
    runner = make_runner(directory, dtype="float32", device=device, size_pool=sizing)
    taken = runner.spec.num_blocks * runner.spec.block_bytes
    profile = profile_memory(runner, TOKEN_BUDGET, MAX_RUNNING, gauge)
    assert 0 < taken < profile.total * SHARE
    if device.type == "cuda":
        assert profile.resting + profile.step <= profile.total * SHARE + CONTEXT_BYTES
        assert taken > profile.total * SHARE / 2, "most of the share is the pool's: the model is tiny"


def test_a_share_without_room_for_a_pool_is_refused_with_the_numbers(
    device: torch.device, gauge: MemoryGauge, tmp_path: Path
) -> None:
    sizing = PoolSizing(1e-5, TOKEN_BUDGET, MAX_RUNNING)
    with pytest.raises(PoolDoesNotFit, match=r"memory_utilization 1e-05 of \d+ MiB"):
        make_runner(str(build_model("llama", tmp_path)), dtype="float32", device=device, size_pool=sizing)


def test_blocks_swapped_to_the_host_come_back_as_they_were(device: torch.device) -> None:
    @given(steps(), st.sampled_from([torch.float32, torch.bfloat16]))
    def any_course(course: list[tuple[HostCopies, HostCopies]], dtype: torch.dtype) -> None:
        check(course, dtype, str(device))

    any_course()
