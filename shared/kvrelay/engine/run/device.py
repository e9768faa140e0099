"""Chooses the device to compute on, and moves small arrays between it and the host with as few waits as possible.

A step's numbers go to the device without a wait, and its sampled tokens come back in one copy. Each wait would leave an
accelerator idle until the host has launched its next kernel.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_thread = threading.local()
_UUID_CHARACTERS = len("GPU-00000000-0000-0000-0000-000000000000")  # the variable accepts shorter prefixes too


def find_device(name: str) -> torch.device:
    """The device of that name: `cpu`, `cuda` or `cuda:N`.

    `auto` is the CPU, with or without a GPU: GPUs are too little tested and measured yet to be chosen by default.
    Raises ValueError for a GPU that is not there, or that this torch cannot use.
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
    """The UUID of a GPU or of a MIG slice, as nvidia-smi shows it. Asks CUDA only if the environment does
    not name it."""
    index = device.index or 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if index < len(visible) and visible[index].startswith(("GPU-", "MIG-")) and len(visible[index]) >= _UUID_CHARACTERS:
        return visible[index]
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def describe_device(device: torch.device) -> str:
    """Returns `cpu`, or text like `NVIDIA H100 80GB HBM3 (GPU-5c89852c-...)`."""
    if device.type != "cuda":
        return device.type
    return f"{torch.cuda.get_device_name(device)} ({device_uuid(device)})"


def use_on_this_thread(device: torch.device) -> None:
    """Makes a GPU the calling thread's current device, and its context the thread's current context.

    torch finds the device by its tensors. Other code uses the thread's device: pinned memory and streams that are
    requested without a device would be GPU 0's, and UCX uses no CUDA transport on a thread without a context, or
    crashes there (a new thread has none; vllm-project/vllm pull 36475, ai-dynamo/nixl issue 2102).
    """
    if device.type != "cuda" or getattr(_thread, "device", None) == device:
        return
    torch.cuda.set_device(device)
    torch.zeros(1, device=device)  # setting the device creates no context; running a kernel does
    _thread.device = device


def to_device(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """The array's elements on the device. On a CPU the tensor shares the array's memory.

    Arrays go to a GPU through pinned memory, because the driver may wait for the stream before it reads pageable
    memory. The caching host allocator keeps the pinned memory until the copy is done.
    """
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class HostCopy:
    """An asynchronous copy of parts `[rows]` or `[rows, columns]` to the host, as one transfer.

    The parts arrive as float64, which represents token ids and float32 exactly. The copy is ordered behind what this
    thread launched before and ahead of what it launches later, so a reader waits for this copy alone. This object owns
    the pinned memory, and torch's caching allocator does not reuse it before the copy is done.
    """

    def __init__(self, *parts: torch.Tensor) -> None:
        self._vectors = [part.dim() == 1 for part in parts]
        self._flat = all(self._vectors)
        self._widths = [1 if part.dim() == 1 else part.shape[1] for part in parts]
        if self._flat and parts[0].device.type == "cpu":
            # numpy does this in half the time, which is not hidden behind a device here.
            joined = torch.from_numpy(np.stack([_as_array(part) for part in parts], dtype=np.float64))
        elif self._flat:
            joined = torch.stack([part.double() for part in parts])
        else:
            joined = torch.cat([(part[:, None] if part.dim() == 1 else part).double() for part in parts], dim=1)
        self._host, self._landed = start_copy(joined)

    def wait(self) -> None:
        """Returns once the copy is done."""
        if self._landed is not None:
            self._landed.synchronize()

    def read(self) -> list[NDArray[np.float64]]:
        """Waits, and returns the parts."""
        self.wait()
        host = self._host.numpy()
        if self._flat:
            return list(host)
        parts = np.split(host, np.cumsum(self._widths)[:-1], axis=1)
        return [part[:, 0] if vector else part for part, vector in zip(parts, self._vectors, strict=True)]


def _as_array(part: torch.Tensor) -> NDArray[Any]:
    """The tensor's memory if numpy has its type, else a float64 copy."""
    return part.double().numpy() if part.dtype == torch.bfloat16 else part.numpy()


def start_copy(source: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
    """Returns the tensor in host memory, and an event that fires when it has arrived, or None if it is there already.

    Waiting for the event puts the thread to sleep, which costs 20 to 50 us more than spinning. If the next step is
    launched already, the device does not notice that, and the core is free for the event loop.
    """
    if source.device.type != "cuda":
        return source.cpu(), None
    host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
    host.copy_(source, non_blocking=True)
    landed = torch.cuda.Event(blocking=True)
    landed.record(torch.cuda.current_stream(source.device))
    return host, landed


def to_host(*parts: torch.Tensor) -> list[NDArray[np.float64]]:
    """Copies tensors of shape `[rows]` or `[rows, columns]` to the host in one transfer, and waits for it."""
    return HostCopy(*parts).read()


def is_settled(device: torch.device) -> bool:
    """Waits until the device has finished everything that this process launched. False if it never will.

    After an illegal access or a failed kernel every call returns the same error until the process ends.
    """
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True


class Moment:
    """Marks what this thread has launched on the device so far. On a CPU that is done already."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True, blocking=True)
            self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """Returns once the marked work is done. Does not wait for work launched later."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: Moment) -> float:
        """Waits, and returns the seconds since `earlier` by the device's clock; 0 on a CPU, which has no such clock."""
        if self._event is None or earlier._event is None:
            return 0.0
        self.wait()
        return float(earlier._event.elapsed_time(self._event)) / 1e3
