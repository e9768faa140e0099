"""What stands in for `torch.cuda`, and for the functions of torch that ask for memory of a device or pinned memory."""

from __future__ import annotations

import ctypes
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext, _device_constructors

from tests.fakes.pretended_cuda import host
from tests.fakes.pretended_cuda.gpu import CUDAGraph, Event, Machine, Stream, machine, set_machine
from tests.fakes.pretended_cuda.tensor import DeviceTensor, allocate

NUM_SMS = 132


@contextmanager
def pretend_cuda(found: Machine | None = None) -> Iterator[Machine]:
    """As if torch had CUDA and there were GPUs. Raises AssertionError at the end where something was wrong."""
    from kvrelay.engine.run import device, graphs

    found = Machine() if found is None else found
    _device_constructors()  # torch keeps this list from when it is first asked for: it must have the real functions
    with ExitStack() as stack:
        stack.enter_context(_no_guard())
        set_machine(found)
        stack.callback(set_machine, None)
        for name, stand_in in _CUDA.items():
            stack.enter_context(patch.object(torch.cuda, name, stand_in))
        stack.enter_context(patch.object(torch, "Generator", _Generator))
        for name in ("empty", "zeros", "ones", "empty_like"):
            stack.enter_context(patch.object(torch, name, _with_pinned_memory(getattr(torch, name))))
        for name in ("tensor", "as_tensor"):
            stack.enter_context(patch.object(torch, name, _made_on_the_host(getattr(torch, name))))
        stack.enter_context(patch.object(torch.Tensor, "to", _to_numbered(torch.Tensor.to)))
        stack.enter_context(patch.object(torch.Tensor, "pin_memory", _pin_memory))
        stack.enter_context(patch.object(torch.Tensor, "is_pinned", _is_pinned))
        library = torch.library.Library("aten", "IMPL")
        stack.callback(library._destroy)
        for name, make in _FACTORIES.items():
            library.impl(name, make, "CUDA")
        # A module that is moved gets new parameters: one of the CPU cannot become another kind of tensor.
        stack.callback(torch.__future__.set_overwrite_module_params_on_conversion, False)
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        # What kvrelay remembers of a device is of the one before.
        stack.enter_context(patch.object(device, "_thread", type(device._thread)()))
        graphs._capture_stream.cache_clear()
        stack.callback(graphs._capture_stream.cache_clear)
        yield found
        assert not found.faults, found.faults


@contextmanager
def _no_guard() -> Iterator[None]:
    """Torch's C++ looks up who changes the current CUDA device, and a build without CUDA has nobody.

    The one of `meta` tensors, which does nothing, is put in its place.
    """
    guards = _guards()
    guards[_CUDA_TYPE] = guards[_META_TYPE]
    try:
        yield
    finally:
        guards[_CUDA_TYPE] = None


_CUDA_TYPE, _META_TYPE, _NUM_TYPES = 1, 14, 20  # c10/core/DeviceType.h


def _guards() -> Any:
    """C10's table, by type of device. Raises ValueError where it is not exported."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    return (ctypes.c_void_p * _NUM_TYPES).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")


def _no_pretence() -> str:
    if torch.version.cuda:
        return "this torch has the real CUDA"
    try:
        _guards()
    except (OSError, ValueError) as error:
        return f"this torch's libraries are others: {error}"
    return ""


NO_PRETENCE = _no_pretence()


# -- factories --------------------------------------------------------------------------------------------------------


def _empty(size: Any, *, dtype: Any = None, device: Any = None, memory_format: Any = None, **_: Any) -> torch.Tensor:
    options = {} if memory_format is None else {"memory_format": memory_format}
    return allocate(torch.empty(size, dtype=dtype, device="cpu", **options), device)


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> torch.Tensor:
    return allocate(torch.empty_strided(size, stride, dtype=dtype, device="cpu"), device)


def _arange(*args: Any, dtype: Any = None, device: Any = None, **_: Any) -> torch.Tensor:
    numbers = torch.arange(*args, dtype=dtype, device="cpu")
    out = allocate(torch.empty_like(numbers), device)
    target = out.data_there
    out.launch(lambda: target.copy_(numbers))
    return out


_FACTORIES: dict[str, Callable[..., torch.Tensor]] = {
    "empty.memory_format": _empty,
    "empty_strided": _empty_strided,
    "arange": _arange,
    "arange.start": _arange,
    "arange.start_step": _arange,
}


def _with_pinned_memory(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        tensor = make(*args, **kwargs)
        if pin_memory:
            if tensor.device.type != "cpu":
                raise RuntimeError("Only dense CPU tensors can be pinned")
            host.pin(tensor)
        return tensor

    return made


def _made_on_the_host(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """From Python's numbers: they are copied from memory that is not pinned."""

    def made(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        there = _asked_by_context() if device is None else torch.device(device)
        if there.type != "cuda":
            return make(data, *args, device=device, **kwargs)
        if isinstance(data, DeviceTensor):
            return data.to(device=there, **kwargs)
        return make(data, *args, device="cpu", **kwargs).to(there)

    return made


def _asked_by_context() -> torch.device:
    contexts = [mode for mode in _get_current_function_mode_stack() if isinstance(mode, DeviceContext)]
    return contexts[-1].device if contexts else torch.device("cpu")


def _pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
    if self.device.type != "cpu":
        raise RuntimeError("cannot pin a tensor that is not in the CPU's memory")
    return self if host.pinned.holds(self) else host.pin(torch.empty_like(self, device="cpu").copy_(self))


def _is_pinned(self: torch.Tensor, device: Any = None) -> bool:
    return self.device.type == "cpu" and host.pinned.holds(self)


def _to_numbered(to: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`Tensor.to`, for which the table's guard cannot tell which device `cuda` is."""

    def numbered(given: Any) -> Any:
        is_cuda = given == "cuda" or (isinstance(given, torch.device) and given.type == "cuda")
        return machine().gpu(given).device if is_cuda else given

    def moved(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return to(self, *map(numbered, args), **{name: numbered(given) for name, given in kwargs.items()})

    return moved


class _Generator(torch.Generator):
    """Of any device; its numbers are the CPU's."""

    def __new__(cls, device: Any = None) -> _Generator:
        made: _Generator = super().__new__(cls, "cpu")  # type: ignore[call-arg]
        return made


# -- torch.cuda -------------------------------------------------------------------------------------------------------


class _DeviceContext:
    def __init__(self, device: Any) -> None:
        self._index = machine().gpu(device).device.index

    def __enter__(self) -> None:
        self._before = machine().current_index()
        machine().thread.index = self._index

    def __exit__(self, *_: object) -> None:
        machine().thread.index = self._before


class _StreamContext:
    """`torch.cuda.stream`: its device becomes the thread's, too."""

    def __init__(self, stream: Stream | None) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        if self._stream is None:
            return
        found = machine()
        self._index, self._before = found.current_index(), found.current_stream(self._stream.device)
        found.thread.index = self._stream.device.index
        found.use_stream(self._stream)

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            machine().use_stream(self._before)
            machine().thread.index = self._index


class _Graph:
    def __init__(
        self, cuda_graph: CUDAGraph, pool: Any = None, stream: Stream | None = None, capture_error_mode: str = "global"
    ) -> None:
        self._graph = cuda_graph
        self._options = (pool, capture_error_mode)
        self._stream = _StreamContext(Stream() if stream is None else stream)

    def __enter__(self) -> None:
        _synchronize()
        machine().gpu().trim()
        self._stream.__enter__()
        self._graph.capture_begin(*self._options)

    def __exit__(self, *args: object) -> None:
        self._graph.capture_end()
        self._stream.__exit__(*args)


def _set_device(device: Any) -> None:
    machine().thread.index = machine().gpu(device).device.index


def _synchronize(device: Any = None) -> None:
    machine().wait_for_all(machine().gpu(device), "torch.cuda.synchronize")


def _properties(device: Any = None) -> SimpleNamespace:
    gpu = machine().gpu(device)
    return SimpleNamespace(
        name="Pretended GPU",
        uuid=uuid.UUID(int=gpu.device.index + 1),
        multi_processor_count=NUM_SMS,
        total_memory=gpu.total,
        major=9,
        minor=0,
    )


def _mem_get_info(device: Any = None) -> tuple[int, int]:
    gpu = machine().gpu(device)
    return gpu.total - gpu.reserved, gpu.total


def _reset_peak(device: Any = None) -> None:
    gpu = machine().gpu(device)
    gpu.most_reserved = gpu.reserved


def _empty_cache() -> None:
    for gpu in machine().gpus:
        gpu.trim()


class _Runtime:
    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:  # noqa: N802
        assert size_bytes > 0
        host.pinned.pin(address, size_bytes)
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        host.pinned.unpin(address)
        return 0


def _set_sync_debug_mode(mode: str) -> None:
    machine().sync_mode = mode


def _keep_busy(cycles: int) -> None:
    machine().current_stream().launch(lambda: None)


_CUDA: dict[str, Any] = {
    "_lazy_init": lambda: None,
    "_sleep": _keep_busy,
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "device_count": lambda: len(machine().gpus),
    "current_device": lambda: machine().current_index(),
    "set_device": _set_device,
    "device": _DeviceContext,
    "Stream": Stream,
    "Event": Event,
    "stream": _StreamContext,
    "set_stream": lambda stream: machine().use_stream(stream),
    "current_stream": lambda device=None: machine().current_stream(device),
    "default_stream": lambda device=None: machine().gpu(device).default_stream,
    "synchronize": _synchronize,
    "CUDAGraph": CUDAGraph,
    "graph": _Graph,
    "is_current_stream_capturing": lambda: machine().capture is not None,
    "get_device_properties": _properties,
    "get_device_name": lambda device=None: _properties(device).name,
    "get_device_capability": lambda device=None: (9, 0),
    "mem_get_info": _mem_get_info,
    "memory_reserved": lambda device=None: machine().gpu(device).reserved,
    "max_memory_reserved": lambda device=None: machine().gpu(device).most_reserved,
    "memory_allocated": lambda device=None: machine().gpu(device).allocated,
    "reset_peak_memory_stats": _reset_peak,
    "empty_cache": _empty_cache,
    "cudart": _Runtime,
    "set_sync_debug_mode": _set_sync_debug_mode,
    "get_rng_state": lambda device=None: torch.get_rng_state(),
    "set_rng_state": lambda state, device=None: None,
}
