"""Pinned host memory: how much the driver is asked for, and when it gets it back. The driver is made up."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from kvrelay.engine.run.host_buffer import pinned_memory

pytestmark = pytest.mark.unit
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
