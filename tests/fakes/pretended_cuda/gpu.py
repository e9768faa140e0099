"""Streams, events and graphs of the pretended device: what is launched runs when somebody waits for it, or later.

A stream runs its work in order. Between streams nothing is ordered but by events. By default nothing runs before it
must, which shows whatever relied on luck; with `random`, work of any stream may run at any launch, as a GPU would.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

Work = Callable[[], object]
MIB = 1 << 20
_ROUNDED = 512  # bytes; as torch's allocator


@dataclass(frozen=True, slots=True)
class Wait:
    """The host waited: `what` for (an op, or a call), and the function of kvrelay that asked."""

    what: str
    where: str
    asked: bool  # by a call that is there to wait; else it hides in an op


@dataclass(slots=True)
class _Item:
    """Of a stream's queue: some work, or a wait for another stream's."""

    work: Work | None
    stream: Stream | None = None
    ticket: int = 0


class Gpu:
    """One device's streams and memory."""

    def __init__(self, machine: Machine, index: int, total_bytes: int) -> None:
        self.machine = machine
        self.device = torch.device("cuda", index)
        self.total = total_bytes
        self.allocated = 0
        self.reserved = 0
        self.most_reserved = 0
        self.default_stream = Stream(self.device, gpu=self)

    def allocate(self, num_bytes: int) -> int:
        """Counts memory of a tensor; returns what is counted. Raises torch.OutOfMemoryError."""
        rounded = -(-num_bytes // _ROUNDED) * _ROUNDED
        if self.allocated + rounded > self.total:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {num_bytes >> 20} MiB")
        self.allocated += rounded
        self.reserved = max(self.reserved, self.allocated)
        self.most_reserved = max(self.most_reserved, self.reserved)
        return rounded

    def trim(self) -> None:
        """Torch's allocator gives back what no tensor has."""
        self.reserved = self.allocated


class Machine:
    """All devices of a process, and what was noticed."""

    def __init__(self, num_gpus: int = 1, total_bytes: int = 1024 * MIB, random: Random | None = None) -> None:
        self.lock = threading.RLock()
        self.waits: list[Wait] = []
        self.faults: list[str] = []
        self.random = random
        self.lost: BaseException | None = None
        self.clock = 0  # pieces of work that ran
        self.sync_mode = "default"
        self.thread = threading.local()
        self.streams: list[Stream] = []
        self.gpus: list[Gpu] = []
        for index in range(num_gpus):
            self.gpus.append(Gpu(self, index, total_bytes))

    # -- who and where ------------------------------------------------------------------------------------------------

    def current_index(self) -> int:
        index: int = getattr(self.thread, "index", 0)
        return index

    def gpu(self, device: torch.device | str | int | None = None) -> Gpu:
        """The device that is named; without a number, the thread's. Raises RuntimeError where there is none."""
        if isinstance(device, int):
            index: int | None = device
        else:
            named = torch.device("cuda" if device is None else device)
            if named.type != "cuda":
                raise ValueError(f"Expected a cuda device, but got: {named}")
            index = named.index
        index = self.current_index() if index is None else index
        if not 0 <= index < len(self.gpus):
            raise torch.AcceleratorError("CUDA error: invalid device ordinal")
        return self.gpus[index]

    def current_stream(self, device: torch.device | str | int | None = None) -> Stream:
        """The calling thread's stream on a device."""
        gpu = self.gpu(device)
        chosen: dict[Gpu, Stream] = self.thread.__dict__.setdefault("streams", {})
        return chosen.get(gpu, gpu.default_stream)

    def use_stream(self, stream: Stream) -> None:
        """The thread's from now on, on its device."""
        self.thread.__dict__.setdefault("streams", {})[stream.gpu] = stream

    @property
    def capture(self) -> CUDAGraph | None:
        found: CUDAGraph | None = getattr(self.thread, "capture", None)
        return found

    # -- work ---------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises what every call raises after a kernel failed."""
        if self.lost is not None:
            raise torch.AcceleratorError(f"CUDA error: device-side assert triggered ({self.lost})")

    def submit(self, stream: Stream, item: _Item) -> int:
        """Puts work behind the stream's; returns the ticket by which it is waited for."""
        with self.lock:
            self.check()
            if stream.capturing is not None:
                if item.work is None:
                    raise NotImplementedError("a capture over several streams")
                stream.capturing.launches.append(item.work)
                return stream.submitted
            stream.queue.append(item)
            stream.submitted += 1
            ticket = stream.submitted
            if self.random is not None:
                self._run_some(self.random)
        return ticket

    def _run_some(self, random: Random) -> None:
        if random.random() < 0.3:
            other = random.choice(self.streams)
            self.run_until(other, other.done + random.randint(0, len(other.queue)))

    def run_until(self, stream: Stream, ticket: int) -> None:
        """Runs the stream's work up to the ticket, and before it what that waits for."""
        with self.lock, _disable_current_modes(), torch._C.DisableTorchFunction(), torch.inference_mode():
            self._run_until(stream, ticket)

    def _run_until(self, stream: Stream, ticket: int) -> None:
        self.check()
        while stream.done < ticket:
            item = stream.queue.popleft()
            if item.stream is not None:
                self._run_until(item.stream, item.ticket)
            elif item.work is not None:
                self._run(item.work)
            stream.done += 1

    def _run(self, work: Work) -> None:
        self.clock += 1
        try:
            work()
        except BaseException as error:  # of a kernel: from here on nothing works
            self.lost = error
            raise torch.AcceleratorError(f"CUDA error: device-side assert triggered ({error})") from error

    def wait(self, stream: Stream, ticket: int, what: str, *, asked: bool = False) -> None:
        """The host waits for the stream's work up to the ticket."""
        if self.capture is not None:
            raise torch.AcceleratorError(f"CUDA error: operation not permitted when stream is capturing ({what})")
        if not asked and self.sync_mode == "error":
            raise RuntimeError(f"called a synchronizing CUDA operation ({what})")
        with self.lock:
            self.waits.append(Wait(what, _asker(), asked))
        self.run_until(stream, ticket)

    def wait_for_all(self, gpu: Gpu, what: str) -> None:
        """The host waits for all of a device."""
        for stream in [stream for stream in self.streams if stream.gpu is gpu]:
            self.wait(stream, stream.submitted, what, asked=True)

    def fault(self, what: str) -> None:
        """Notes what a GPU would not, and which is wrong nevertheless."""
        self.faults.append(f"{what} (in {_asker()})")


def _asker() -> str:
    """`module:function` of kvrelay that is nearest, else of the test."""
    frame = sys._getframe(1)
    found = "?"
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("kvrelay"):
            return f"{name}:{frame.f_code.co_name}"
        if found == "?" and name.startswith("tests.") and "pretended_cuda" not in name:
            found = f"{name}:{frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return found


class Stream:
    """In the place of `torch.cuda.Stream`."""

    def __init__(self, device: Any = None, priority: int = 0, *, gpu: Gpu | None = None) -> None:
        self.gpu = machine().gpu(device) if gpu is None else gpu
        self.device = self.gpu.device
        self.priority = priority
        self.queue: deque[_Item] = deque()
        self.submitted = 0
        self.done = 0
        self.seen: dict[Stream, int] = {}  # tickets of others that whatever comes here now is behind
        self.capturing: CUDAGraph | None = None
        with self.gpu.machine.lock:
            self.gpu.machine.streams.append(self)

    @property
    def cuda_stream(self) -> int:
        return id(self)

    def launch(self, work: Work) -> int:
        """Puts work behind all that is here."""
        return self.gpu.machine.submit(self, _Item(work))

    def synchronize(self) -> None:
        self.gpu.machine.wait(self, self.submitted, "Stream.synchronize", asked=True)

    def query(self) -> bool:
        """Whoever asks again and again sees it end."""
        self.gpu.machine.run_until(self, min(self.submitted, self.done + 1))
        return self.done == self.submitted

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        if event.mark is not None:
            self.wait_ticket(*event.mark)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def wait_ticket(self, stream: Stream, ticket: int, seen: dict[Stream, int]) -> None:
        """What comes here from now on is behind `stream`'s work up to `ticket`, and behind what that was behind."""
        self.gpu.machine.submit(self, _Item(None, stream, ticket))
        for other, at in [*seen.items(), (stream, ticket)]:
            self.seen[other] = max(self.seen.get(other, 0), at)

    def is_behind(self, other: Stream, ticket: int) -> bool:
        """Whether all that comes here from now on runs after `other`'s work up to `ticket`."""
        return other is self or max(other.done, self.seen.get(other, 0)) >= ticket


class Event:
    """In the place of `torch.cuda.Event`."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> None:
        self.mark: tuple[Stream, int, dict[Stream, int]] | None = None
        self._device: torch.device | None = None
        self._timed = enable_timing
        self._time: int | None = None

    def record(self, stream: Stream | None = None) -> None:
        stream = machine().current_stream() if stream is None else stream
        if self._device not in (None, stream.device):
            raise RuntimeError(f"Event device {self._device} does not match recording stream's device {stream.device}.")
        if stream.capturing is not None:
            raise NotImplementedError("an event within a capture")
        self._device, self._time = stream.device, None

        def note() -> None:
            self._time = stream.gpu.machine.clock

        self.mark = stream, stream.launch(note), dict(stream.seen)

    def wait(self, stream: Stream | None = None) -> None:
        (machine().current_stream() if stream is None else stream).wait_event(self)

    def synchronize(self) -> None:
        if self.mark is not None:
            stream, ticket, _ = self.mark
            if stream.done < ticket:
                stream.gpu.machine.wait(stream, ticket, "Event.synchronize", asked=True)

    def query(self) -> bool:
        """Whoever asks again and again sees it come."""
        if self.mark is None:
            return True
        stream, ticket, _ = self.mark
        was_there = stream.done >= ticket
        stream.gpu.machine.run_until(stream, min(ticket, stream.done + 1))
        return was_there

    def elapsed_time(self, end: Event) -> float:
        if not (self._timed and end._timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._time is None or end._time is None:
            raise torch.AcceleratorError("CUDA error: device not ready")
        return float(end._time - self._time)


@dataclass
class GraphPool:
    """Memory that graphs share: whatever one of them computed, another one's replay overwrites."""

    freed: list[torch.Tensor] = field(default_factory=list)
    live: int = 0
    most: int = 0


class CUDAGraph:
    """In the place of `torch.cuda.CUDAGraph`: a replay gives the stream all that was launched in the capture."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.launches: list[Work] = []
        self.graph_pool = GraphPool()
        self._stream: Stream | None = None
        self._gpu: Gpu | None = None

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        if capture_error_mode not in ("global", "thread_local", "relaxed"):
            raise RuntimeError(f"Unknown capture error mode. Expected `global`... got {capture_error_mode}")
        if pool is not None:
            if not isinstance(pool, GraphPool):
                raise TypeError(f"capture_begin(): pool is {pool!r}")
            self.graph_pool = pool
        found = machine()
        stream = found.current_stream()
        if stream is stream.gpu.default_stream:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        if found.capture is not None:
            raise RuntimeError("a capture is under way")
        found.run_until(stream, stream.submitted)
        stream.capturing = found.thread.capture = self
        self._stream, self._gpu = stream, stream.gpu

    def capture_end(self) -> None:
        if self._stream is None:
            raise RuntimeError("no capture is under way")
        if machine().current_stream() is not self._stream:
            raise RuntimeError("Capture must end on the same stream it began on.")
        self._stream.capturing = machine().thread.capture = None
        self._stream = None

    def pool(self) -> GraphPool:
        return self.graph_pool

    def reset(self) -> None:
        self.launches.clear()

    def replay(self) -> None:
        if self._gpu is None or self._stream is not None:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        found = machine()
        if found.capture is not None:
            raise RuntimeError("a replay within a capture")

        def run() -> None:
            for data in self.graph_pool.freed:
                spoil(data)
            for launch in self.launches:
                launch()

        found.current_stream(self._gpu.device).launch(run)


def spoil(data: torch.Tensor) -> None:
    """What lies in memory that nobody has written to yet, or that somebody else has by now."""
    if data.dtype.is_floating_point or data.dtype.is_complex:
        data.fill_(float("nan"))
    elif data.dtype == torch.bool:
        data.fill_(True)
    else:
        data.fill_(0x5B if data.dtype.itemsize == 1 else torch.iinfo(data.dtype).max // 3)


_machine: Machine | None = None


def machine() -> Machine:
    """The one that is pretended now."""
    if _machine is None:
        raise AssertionError("Torch not compiled with CUDA enabled")
    return _machine


def set_machine(found: Machine | None) -> None:
    """From now on this one."""
    global _machine
    _machine = found
