"""Copies between a pool and the host's buffer, against plain lists."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.engine.run.block_copies import HostBuffer, pinned_memory
from kvrelay.step.batch import HostCopies

NUM_BLOCKS, NUM_SLOTS = 9, 7


def make_pool(dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """As the engine's, each block full of its own number."""
    numbers = torch.arange(NUM_BLOCKS, dtype=dtype, device=device)
    return numbers.view(-1, 1, 1, 1, 1, 1).expand(-1, 2, 2, 4, 1, 8).contiguous()


def contents(pool: torch.Tensor) -> list[float]:
    flat = pool.view(NUM_BLOCKS, -1).float()
    assert bool((flat == flat[:, :1]).all())
    return flat[:, 0].tolist()


@st.composite
def steps(draw: st.DrawFn) -> list[tuple[HostCopies, HostCopies]]:
    """Steps of a run: no block or slot twice on one side, none of the slots that are read is written."""
    drawn = []
    for _ in range(draw(st.integers(1, 6))):
        slots = draw(st.permutations(range(NUM_SLOTS)))
        cut = draw(st.integers(0, NUM_SLOTS))
        both = []
        for part in (slots[:cut], slots[cut:]):
            blocks = draw(st.permutations(range(NUM_BLOCKS)))[: len(part)]
            pairs = list(zip(blocks, part, strict=True))
            pairs = sorted(pairs) if draw(st.booleans()) else pairs
            both.append(HostCopies(tuple(b for b, _ in pairs), tuple(s for _, s in pairs)))
        drawn.append((both[0], both[1]))
    return drawn


def check(course: list[tuple[HostCopies, HostCopies]], dtype: torch.dtype, device: str) -> None:
    pool = make_pool(dtype, device)
    buffer = HostBuffer(pool, NUM_SLOTS)
    everywhere = HostCopies(tuple(range(NUM_SLOTS)), tuple(range(NUM_SLOTS)))
    buffer.swap(everywhere, HostCopies())
    blocks, slots = [float(n) for n in range(NUM_BLOCKS)], [float(n) for n in range(NUM_SLOTS)]
    for number, (out, back) in enumerate(course):
        assert buffer.swap(out, back) >= 0
        for block, slot in zip(*out, strict=True):
            slots[slot] = blocks[block]
        for block, slot in zip(*back, strict=True):
            blocks[block] = slots[slot]
        pool[number % NUM_BLOCKS] = 100 + number  # the step's forward
        blocks[number % NUM_BLOCKS] = 100.0 + number
        assert contents(pool) == blocks


@given(steps(), st.sampled_from([torch.float32, torch.bfloat16]))
def test_blocks_go_out_before_others_come_in(course: list[tuple[HostCopies, HostCopies]], dtype: torch.dtype) -> None:
    check(course, dtype, "cpu")


def test_measuring_changes_no_block() -> None:
    pool = make_pool(torch.float32)
    assert HostBuffer(pool, NUM_SLOTS).measure() > 0
    assert contents(pool) == list(range(NUM_BLOCKS))
    assert HostBuffer(pool, 0).measure() == 0


def test_more_memory_than_there_is_is_refused_by_the_settings_name() -> None:
    with pytest.raises(ValueError, match="swap_space: the host does not give"):
        HostBuffer(make_pool(torch.float32), 1 << 50)


@pytest.mark.parametrize("copies", [HostCopies((9,), (0,)), HostCopies((-1,), (0,)), HostCopies((0,), (7,))])
def test_a_block_or_slot_that_there_is_not_is_refused(copies: HostCopies) -> None:
    pool = make_pool(torch.float32)
    with pytest.raises(IndexError, match="but there are"):
        HostBuffer(pool, NUM_SLOTS).swap(copies, HostCopies())
    with pytest.raises(IndexError, match="but there are"):
        HostBuffer(pool, NUM_SLOTS).swap(HostCopies(), copies)


# -- pinned memory: the driver is made up ------------------------------------------------------------------------------

GPU = torch.device("cuda", 1)


class Driver:
    """Pins what it is asked to, unless `status` is an error."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.pinned: dict[int, int] = {}
        self.current: list[torch.device] = []

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        self.current.append(device)
        yield
        self.current.pop()

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:  # noqa: N802
        assert self.current == [GPU] and flags == 0
        if not self.status:
            self.pinned[address] = size_bytes
        return self.status

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.pinned[address]
        return 0


def install(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "device", driver.device)


def test_exactly_what_is_asked_for_is_pinned_until_nobody_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    install(driver, monkeypatch)
    memory = pinned_memory((3, 5000), torch.bfloat16, GPU)
    assert memory.shape == (3, 5000) and not memory.any()
    memory[2, 4999] = 1
    assert driver.pinned == {memory.data_ptr(): 3 * 5000 * 2}
    part = memory[1:]
    del memory
    gc.collect()
    assert driver.pinned and part[1, 4999] == 1, "a part of it is still used"
    del part
    gc.collect()
    assert not driver.pinned


def test_nothing_is_pinned_for_no_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    install(driver, monkeypatch)
    assert pinned_memory((0, 5000), torch.float32, GPU).shape == (0, 5000)
    assert not driver.pinned


def test_where_the_driver_does_not_pin_it_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    install(Driver(status=801), monkeypatch)
    asked: list[dict[str, object]] = []

    def zeros(shape: tuple[int, ...], **how: object) -> torch.Tensor:
        asked.append(how)
        return torch.empty(shape)

    def ones(size: int, device: torch.device) -> None:
        raise torch.AcceleratorError("CUDA error: operation not supported")  # of the call before

    monkeypatch.setattr(torch, "zeros", zeros)
    monkeypatch.setattr(torch, "ones", ones)
    assert pinned_memory((2, 8), torch.float32, GPU).shape == (2, 8)
    assert asked == [{"dtype": torch.float32, "pin_memory": True}]
