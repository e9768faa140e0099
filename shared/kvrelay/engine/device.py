"""Which device to compute on; small arrays there and back, with as little waiting as can be.

A step's numbers go to the device without a wait, and what it drew comes back in one copy: each wait would leave an
accelerator idle until the host has found its next kernel.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvrelay.backends.cpu_build import cache_dir
from kvrelay.engine.turns import turn_on_gpu

_thread = threading.local()
_UUID_CHARACTERS = len("GPU-00000000-0000-0000-0000-000000000000")  # the variable takes shorter beginnings too


def find_device(name: str) -> torch.device:
    """The device of that name, `cpu`, `cuda` or `cuda:N`.

    `auto` is the CPU, with or without a GPU: on GPUs too little is tested and measured yet to take one unasked.

    Raises:
        ValueError: a GPU that is not there, or that this torch cannot use.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name in ("auto", "cpu"):
        return torch.device("cpu")
    index = int(name.partition(":")[2] or 0)
    if index >= count:
        has = f"{count} GPUs" if count else f"no GPU (this torch is {torch.__version__})"
        raise ValueError(f"device = {name}: torch finds {has} here (allowed: auto, cpu, cuda or cuda:N)")
    return torch.device("cuda", index)


def device_uuid(device: torch.device) -> str:
    """Of a GPU or a part of one, as nvidia-smi shows it. CUDA is asked only where the environment does not say."""
    index = device.index or 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if index < len(visible) and visible[index].startswith(("GPU-", "MIG-")) and len(visible[index]) >= _UUID_CHARACTERS:
        return visible[index]
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def describe_device(device: torch.device) -> str:
    """`cpu`, or as in `NVIDIA H100 80GB HBM3 (GPU-5c89852c-...)`."""
    if device.type != "cuda":
        return device.type
    return f"{torch.cuda.get_device_name(device)} ({device_uuid(device)})"


@contextmanager
def turn_on(device: torch.device) -> Iterator[None]:
    """Holds up other processes that start on the same GPU; see `turns`. Raises TurnNeverCame."""
    with turn_on_gpu(device_uuid(device), cache_dir()) if device.type == "cuda" else nullcontext():
        yield


def use_on_this_thread(device: torch.device) -> None:
    """Makes a GPU the calling thread's own, and its context the thread's current one.

    Torch finds the device by its tensors. Others take the thread's: pinned memory and streams that are asked for
    without a device would be GPU 0's, and UCX takes no CUDA transport on a thread without a context, or crashes there
    (a new thread has none; vllm-project/vllm pull 36475, ai-dynamo/nixl issue 2102).
    """
    if device.type != "cuda" or getattr(_thread, "device", None) == device:
        return
    torch.cuda.set_device(device)
    torch.zeros(1, device=device)  # naming the device makes no context; a kernel takes one
    _thread.device = device


def to_device(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """The array's elements on the device; on a CPU, shared with the array.

    To a GPU they go by pinned memory: from pageable memory the driver may wait for the stream first. The caching host
    allocator keeps the pinned memory until the copy is done.
    """
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class HostCopy:
    """Parts `[rows]` or `[rows, columns]` on their way to the host, in one copy; nobody has waited yet.

    They come as float64, exact for what a token id or a float32 can be. The copy lies behind what this thread asked the
    device for before, and ahead of what is asked for later: whoever reads it waits for that copy alone. Its pinned
    memory is this object's, and torch's caching allocator gives it to nobody before the copy is done.
    """

    def __init__(self, *parts: torch.Tensor) -> None:
        self._vectors = [part.dim() == 1 for part in parts]
        self._flat = all(self._vectors)
        self._widths = [1 if part.dim() == 1 else part.shape[1] for part in parts]
        if self._flat:
            joined = torch.stack([part.double() for part in parts])
        else:
            joined = torch.cat([(part[:, None] if part.dim() == 1 else part).double() for part in parts], dim=1)
        self._host, self._landed = start_copy(joined)

    def wait(self) -> None:
        """Returns once the copy is done."""
        if self._landed is not None:
            self._landed.synchronize()

    def read(self) -> list[NDArray[np.float64]]:
        """Waits, and gives the parts."""
        self.wait()
        host = self._host.numpy()
        if self._flat:
            return list(host)
        parts = np.split(host, np.cumsum(self._widths)[:-1], axis=1)
        return [part[:, 0] if vector else part for part, vector in zip(parts, self._vectors, strict=True)]


def start_copy(source: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
    """The tensor in the host's memory, and what comes when it is there: None where it is.

    The event puts a waiting thread to sleep, which costs some 20 to 50 us more than spinning. With the next step
    launched already the device does not feel that, and the core is free for the event loop.
    """
    if source.device.type != "cuda":
        return source.cpu(), None
    host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
    host.copy_(source, non_blocking=True)
    landed = torch.cuda.Event(blocking=True)
    landed.record(torch.cuda.current_stream(source.device))
    return host, landed


def to_host(*parts: torch.Tensor) -> list[NDArray[np.float64]]:
    """Parts `[rows]` or `[rows, columns]` in one copy, which is waited for; see `HostCopy`."""
    return HostCopy(*parts).read()


def is_settled(device: torch.device) -> bool:
    """Waits until the device has done all that this process asked of it. False: it never will.

    After an illegal access or a failed kernel every call gives the same error, until the process ends.
    """
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True


class Moment:
    """What this thread has asked of the device by now; on a CPU it is done."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True, blocking=True)
            self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """Returns once that is done, and waits for nothing that was asked for later."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: Moment) -> float:
        """By the device's own clock, waiting for this moment; 0 on a CPU, which has no such clock."""
        if self._event is None or earlier._event is None:
            return 0.0
        self.wait()
        return float(earlier._event.elapsed_time(self._event)) / 1e3
