"""The host's memory beside the pretended device: what is pinned, and copies between the two.

A copy from or to pinned memory may be under way while the host goes on; it is then an error to write to that memory,
and what is read of it is spoilt. From and to other memory the host waits, as CUDA documents it: to the device only
until the bytes are staged, where the copy need not block and is small.
"""

from __future__ import annotations

import weakref
from threading import RLock
from typing import TYPE_CHECKING, NamedTuple

import torch

from tests.fakes.pretended_cuda.gpu import Stream, machine, spoil

if TYPE_CHECKING:
    from tests.fakes.pretended_cuda.tensor import DeviceTensor

_STAGED_BYTES = 64 << 10


class _Use(NamedTuple):
    """Pinned memory that a copy reads or writes."""

    start: int
    end: int
    writes: bool
    stream: Stream
    ticket: int


class PinnedMemory:
    """Which of the host's memory is pinned, and what is under way there. Threads may share it."""

    def __init__(self) -> None:
        self.ranges: dict[int, int] = {}
        self._uses: list[_Use] = []
        self._lock = RLock()  # guards `_uses`

    def pin(self, address: int, num_bytes: int) -> None:
        self.ranges[address] = address + num_bytes

    def unpin(self, address: int) -> None:
        """Raises KeyError for what is not pinned."""
        end = self.ranges.pop(address)
        if self.under_way(address, end):
            machine().fault("pinned memory goes while a copy is under way")

    def holds(self, tensor: torch.Tensor) -> bool:
        start, end = span(tensor)
        # Another thread may pin memory, and any thread's garbage unpins some, meanwhile; a copy is made at once.
        return any(first <= start and end <= last for first, last in self.ranges.copy().items())

    def under_way(self, start: int, end: int) -> list[_Use]:
        """Copies that touch this memory and have not run."""
        with self._lock:
            self._uses = [use for use in self._uses if use.stream.done < use.ticket]
            return [use for use in self._uses if use.start < end and start < use.end]

    def use(self, tensor: torch.Tensor, stream: Stream, ticket: int, *, writes: bool) -> None:
        with self._lock:
            self._uses.append(_Use(*span(tensor), writes, stream, ticket))


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses that it reaches from and to."""
    start = tensor.data_ptr()
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (reach + 1) * tensor.element_size() if tensor.numel() else start


pinned = PinnedMemory()


def pin(tensor: torch.Tensor) -> torch.Tensor:
    """The same, in memory of the caching host allocator, which keeps it until the copies are done."""
    storage = tensor.untyped_storage()
    if storage.nbytes():
        address = storage.data_ptr()
        pinned.pin(address, storage.nbytes())
        weakref.finalize(storage, pinned.ranges.pop, address, None)
    return tensor


def _is_direct(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether the bytes go as they are; else torch makes a copy first, which lies in memory that is not pinned."""
    return target.dtype == source.dtype and source.is_contiguous() and source.shape == target.shape


def to_device(target: DeviceTensor, source: torch.Tensor, *, non_blocking: bool) -> None:
    if not target.numel():
        return
    stream, data = target.stream(), target.data_there
    if non_blocking and _is_direct(target, source) and pinned.holds(source):
        start, end = span(source)
        chained = any(use.writes for use in pinned.under_way(start, end))
        before = None if chained else source.clone()

        def move() -> None:
            if before is not None and not torch.equal(_bytes(before), _bytes(source)):
                machine().fault("pinned memory was written to before its copy to the device ran")
            data.copy_(source)

        ticket = target.launch(move)
        if stream.capturing is None:
            pinned.use(source, stream, ticket, writes=False)
        return
    staged = source.clone()
    target.launch(lambda: data.copy_(staged))
    if not non_blocking or staged.nbytes > _STAGED_BYTES:
        machine().wait(stream, stream.submitted, "copy from memory that is not pinned" if non_blocking else "copy")


def to_host(target: torch.Tensor, source: DeviceTensor, *, non_blocking: bool) -> None:
    if not source.numel():
        return
    stream, data = source.stream(), source.data_there
    is_async = non_blocking and target.is_contiguous() and pinned.holds(target)
    if is_async and not pinned.under_way(*span(target)):
        spoil(target)
    ticket = source.launch(lambda: target.copy_(data))
    if is_async:
        if stream.capturing is None:
            pinned.use(target, stream, ticket, writes=True)
    else:
        machine().wait(stream, ticket, "copy to memory that is not pinned" if non_blocking else "copy to the host")


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
