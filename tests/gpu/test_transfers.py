"""The conformance suite of the transports over pools in device memory: the suite's own tests, with other ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvrelay.engine.run.block_copies import DevicePool
from kvrelay.handoff.transports.base import TransferReceiver, TransferSender
from kvrelay.handoff.transports.nixl_receiver import NixlReceiver
from kvrelay.handoff.transports.nixl_sender import NixlSender
from kvrelay.handoff.transports.pool_memory import PoolChecksums
from kvrelay.handoff.transports.wire import Bytes
from kvrelay.handoff.transports.zmq_receiver import ZmqReceiver
from tests.component.transfer import test_conformance
from tests.component.transfer.rig import ReceivingEnd, Rig, SendingEnd
from tests.component.transfer.transports import NO_NIXL, Transport, zmq_sender
from tests.fakes.pretended_cuda import DeviceTensor

pytestmark = pytest.mark.everyday(4)  # of each test and device: tests/component/transfer runs all over arrays

Key = int | list[int] | slice


@dataclass(frozen=True)
class Ends:
    """A transport over pools in device memory."""

    sender: Callable[[DevicePool], TransferSender]
    receiver: Callable[[DevicePool], TransferReceiver]
    one_sided: bool = False


class DeviceBytes:
    """A pool `[num_blocks, block_bytes]` on a device, read and written as the suite does with arrays: by copies."""

    def __init__(self, host: Bytes, device: torch.device) -> None:
        self.tensor = torch.from_numpy(host).to(device, copy=True)
        self.shape = host.shape

    def __getitem__(self, key: Key) -> Bytes:
        found: NDArray[np.uint8] = self.tensor[key].cpu().numpy()
        return found

    def __setitem__(self, key: Key, value: Bytes | int) -> None:
        self.tensor[key] = torch.as_tensor(value, dtype=torch.uint8, device=self.tensor.device)
        if self.tensor.is_cuda:
            torch.cuda.synchronize()  # a transport's stream does not wait for this one


def device_pool(moved: DeviceBytes) -> DevicePool:
    """Of a pretended device UCX is told what its memory really is: it looks."""
    pool = DevicePool(moved.tensor)
    if isinstance(moved.tensor, DeviceTensor):
        pool.segment = "DRAM"
    return pool


class DeviceRig(Rig):
    """Its ends have copies of the arrays on the device; the same array is the same memory."""

    def __init__(self, transport: Transport, ends: Ends, device: torch.device) -> None:
        super().__init__(transport)
        self._make = ends
        self._device = device
        self._moved: dict[int, tuple[Bytes, DeviceBytes]] = {}

    def sender(self, pool: Bytes) -> SendingEnd:
        moved = self._move(pool)
        return self._start(SendingEnd(cast("Bytes", moved), self._make.sender(device_pool(moved))))

    def receiver(self, pool: Bytes) -> ReceivingEnd:
        moved = self._move(pool)
        return self._start(ReceivingEnd(cast("Bytes", moved), self._make.receiver(device_pool(moved))))

    def _move(self, pool: Bytes) -> DeviceBytes:
        if id(pool) not in self._moved:
            self._moved[id(pool)] = pool, DeviceBytes(pool, self._device)
            if self._device.type == "cuda":
                torch.cuda.synchronize()
        return self._moved[id(pool)][1]


ENDS = {
    "zmq": Ends(zmq_sender, ZmqReceiver),
    "zmq-checksum": Ends(lambda pool: zmq_sender(pool, checksum=True), ZmqReceiver),
    "nixl": Ends(NixlSender, NixlReceiver, one_sided=True),
    "nixl-checksum": Ends(lambda pool: NixlSender(pool, checksums=PoolChecksums(pool)), NixlReceiver, one_sided=True),
}


@pytest.fixture(params=list(ENDS))
def rig(request: pytest.FixtureRequest, device: torch.device) -> Iterator[Rig]:
    name: str = request.param
    if name.startswith("nixl") and NO_NIXL:
        pytest.skip(NO_NIXL)
    ends = ENDS[name]
    unused = Transport(name, zmq_sender, ZmqReceiver, one_sided=ends.one_sided, gathers_all=not ends.one_sided)
    made = DeviceRig(unused, ends, device)
    yield made
    made.close()


@pytest.fixture
def random() -> np.random.Generator:
    """The same numbers in every run."""
    return np.random.default_rng(20)


globals().update({name: test for name, test in vars(test_conformance).items() if name.startswith("test_")})
