"""Tensors of the pretended device. An op is given its shapes when it is launched, and its numbers when it runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from tests.fakes.pretended_cuda import host
from tests.fakes.pretended_cuda.gpu import CUDAGraph, Gpu, Stream, machine, spoil

_DEPEND_ON_DATA = frozenset(
    {"nonzero", "masked_select", "equal", "is_nonzero", "bincount", "_unique2", "unique_dim", "unique_consecutive"}
    | {"allclose", "isclose_all"}
)
_RANDOM = frozenset({"normal_", "uniform_", "random_", "exponential_", "bernoulli_"})
_UNFILLED = frozenset({"empty_like", "new_empty", "new_empty_strided"})
_INDEXED = frozenset({"index", "index_put", "index_put_", "_index_put_impl_"})
_REFUSED = frozenset({"resize_", "set_", "t_", "transpose_", "squeeze_", "unsqueeze_", "as_strided_"})


class Memory:
    """What one allocation's tensors have in common; it is freed with the last of them."""

    def __init__(self, gpu: Gpu, data: torch.Tensor) -> None:
        self.uses: dict[Stream, int] = {}
        stream = machine().current_stream(gpu.device)
        counted = 0
        if stream.capturing is None:
            counted = gpu.allocate(data.untyped_storage().nbytes())
            spoil(data)
        weakref.finalize(self, _free, gpu, stream, stream.capturing, counted, data, self.uses).atexit = False


def _free(
    gpu: Gpu, stream: Stream, graph: CUDAGraph | None, counted: int, data: torch.Tensor, uses: dict[Stream, int]
) -> None:
    """The next tensor of the same stream may have this memory at once, in the stream's order."""
    gpu.allocated -= counted
    if graph is not None:
        graph.graph_pool.freed.append(data)
    for other, ticket in uses.items():
        if not stream.is_behind(other, ticket):
            gpu.machine.fault("memory is freed that another stream still uses: record_stream, or a wait, is missing")


class DeviceTensor(torch.Tensor):
    """On `cuda:N` for all that look at it."""

    data_there: torch.Tensor
    memory: Memory

    @staticmethod
    def __new__(cls, data: torch.Tensor, device: torch.device, memory: Memory) -> DeviceTensor:
        made: DeviceTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            data.size(),
            strides=data.stride(),
            storage_offset=data.storage_offset(),
            dtype=data.dtype,
            device=device,
        )
        made.data_there = data
        made.memory = memory
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return dispatch(func, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"DeviceTensor(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(_without_lists(key))

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(_without_lists(key), value)

    def data_ptr(self) -> int:
        return self.data_there.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if force:
            return self.cpu().numpy()
        raise TypeError(f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() first")

    def record_stream(self, stream: Any) -> None:
        """The allocator waits for that stream by itself before it gives the memory to anybody."""
        self.memory.uses.pop(stream, None)

    def stream(self) -> Stream:
        """Which its ops are launched on."""
        return machine().current_stream(self.device)

    def launch(self, work: Callable[[], object], others: Iterable[torch.Tensor] = ()) -> int:
        """On its stream, with memory of others, too."""
        stream = self.stream()
        ticket = stream.launch(work)
        if stream.capturing is None:
            for tensor in (self, *others):
                if isinstance(tensor, DeviceTensor):
                    tensor.memory.uses[stream] = ticket
        return ticket


def _without_lists(key: Any) -> Any:
    """Lists as tensors of the host; torch's C++ would take them past Python."""
    if isinstance(key, tuple):
        return tuple(_without_lists(part) for part in key)
    return torch.tensor(key) if isinstance(key, list) else key


def allocate(data: torch.Tensor, device: torch.device) -> DeviceTensor:
    """A tensor of its own over new memory, which holds whatever was there before."""
    gpu = machine().gpu(device)
    return DeviceTensor(data, gpu.device, Memory(gpu, data))


def launch(kernel: Callable[..., None], *arguments: Any) -> None:
    """Runs a kernel that is no op of torch, in its turn: it sees its arguments' memory, and writes to some of it."""
    machine().check()
    found = [leaf for leaf in _leaves(arguments) if isinstance(leaf, torch.Tensor)]
    there = [tensor for tensor in found if isinstance(tensor, DeviceTensor)]
    assert there and len(there) == len(found), "a kernel reads the device's memory alone"
    _one_device(str(kernel), there)
    given = _map(_data_there, arguments)
    there[0].launch(lambda: kernel(*given), there)


def _data_there(leaf: Any) -> Any:
    return leaf.data_there if isinstance(leaf, DeviceTensor) else leaf


def _map(change: Callable[[Any], Any], tree: Any) -> Any:
    """The same with each leaf changed. Torch's own function for that takes far longer."""
    if isinstance(tree, tuple | list):
        return (
            type(tree)(_map(change, part) for part in tree) if type(tree) in (tuple, list) else _map_tuple(change, tree)
        )
    if isinstance(tree, dict):
        return {name: _map(change, part) for name, part in tree.items()}
    return change(tree)


def _map_tuple(change: Callable[[Any], Any], tree: Any) -> Any:
    """Torch's own kinds of tuples and lists: sizes are leaves, results of several tensors become tuples."""
    return change(tree) if isinstance(tree, torch.Size) else tuple(_map(change, part) for part in tree)


def _leaves(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return [leaf for part in tree.values() for leaf in _leaves(part)]
    if isinstance(tree, tuple | list):
        return [leaf for part in tree for leaf in _leaves(part)]
    return [tree]


# -- ops --------------------------------------------------------------------------------------------------------------


def dispatch(func: Any, args: Any, kwargs: Any) -> Any:
    """Launches an op of ATen."""
    machine().check()
    name = func.overloadpacket.__name__
    if name in _SPECIAL:
        return _SPECIAL[name](func, args, kwargs)
    if name in _REFUSED:
        raise NotImplementedError(f"the pretended device knows no {func}")
    kind = _kind(func)
    if kind == "view":
        if func._can_decompose():
            return func.decompose(*args, **kwargs)
        return _view(func, args, kwargs)
    leaves = _leaves((args, kwargs))
    there = [leaf for leaf in leaves if isinstance(leaf, DeviceTensor)]
    _check_devices(func, name, there, leaves)
    masked = name in _INDEXED and any(
        isinstance(leaf, DeviceTensor) and leaf.dtype in (torch.bool, torch.uint8) for leaf in _leaves(args[1])
    )
    if kind == "mutates":
        if masked:
            machine().wait(there[0].stream(), there[0].stream().submitted, f"{name} with a mask")
        return _mutate(func, name, there, args, kwargs)
    leaves_the_device = any(isinstance(leaf, torch.device) and leaf.type != "cuda" for leaf in leaves)
    if masked or leaves_the_device or name in _DEPEND_ON_DATA:
        return _run_now(func, there[0], args, kwargs, to_host=leaves_the_device)
    return _compute(func, name, there, args, kwargs)


@cache
def _kind(func: Any) -> str:
    schema = func._schema
    if any(argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments):
        return "mutates"
    return "view" if any(result.alias_info is not None for result in schema.returns) else "computes"


def _view(func: Any, args: Any, kwargs: Any) -> Any:
    whole = next(leaf for leaf in _leaves((args, kwargs)) if isinstance(leaf, DeviceTensor))
    out = func(*_map(_data_there, args), **_map(_data_there, kwargs))
    with torch.inference_mode(whole.is_inference()):  # a view is what its base is
        return _map(
            lambda leaf: DeviceTensor(leaf, whole.device, whole.memory) if isinstance(leaf, torch.Tensor) else leaf, out
        )


def _check_devices(func: Any, name: str, there: list[DeviceTensor], leaves: list[Any]) -> None:
    """Raises RuntimeError for tensors of several devices, and waits where torch would move some of them itself."""
    _one_device(str(func), there)
    here = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DeviceTensor)]
    if not there or not here:
        return
    if name in _INDEXED:
        if isinstance(leaves[0], DeviceTensor):
            stream = there[0].stream()
            machine().wait(stream, stream.submitted, f"copy of what {name} is given on the host")
            return
    elif all(tensor.dim() == 0 for tensor in here) and any(tensor.dim() or len(there) == 1 for tensor in there):
        return
    raise RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, {there[0].device} and "
        f"{here[0].device}! ({func})"
    )


def _one_device(what: str, there: list[DeviceTensor]) -> None:
    if len({tensor.device for tensor in there}) > 1:
        devices = " and ".join(sorted({str(tensor.device) for tensor in there}))
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {devices} ({what})")


def _given(leaf: Any) -> Any:
    """The leaf for when the op runs. Lone numbers of the host go along by their value."""
    if isinstance(leaf, DeviceTensor):
        return leaf.data_there
    if isinstance(leaf, torch.Tensor):
        return leaf.clone()
    return torch.device("cpu") if isinstance(leaf, torch.device) and leaf.type == "cuda" else leaf


def _compute(func: Any, name: str, there: list[DeviceTensor], args: Any, kwargs: Any) -> Any:
    """An op with results of its own."""
    made: list[DeviceTensor] = []

    def make(leaf: Any) -> Any:
        if not isinstance(leaf, _Shape):
            return leaf
        data = torch.empty_strided(leaf.size, leaf.stride, dtype=leaf.dtype)
        made.append(allocate(data, there[0].device))
        return made[-1]

    outs = _map(make, _shapes(func, args, kwargs))
    if name in _UNFILLED:
        return outs
    given_args, given_kwargs = _map(_given, args), _map(_given, kwargs)
    targets = [tensor.data_there for tensor in made]

    def run() -> None:
        found = [leaf for leaf in _leaves(func(*given_args, **given_kwargs)) if isinstance(leaf, torch.Tensor)]
        for target, result in zip(targets, found, strict=True):
            assert target.shape == result.shape and target.dtype == result.dtype, f"{func}: {target} and {result}"
            target.copy_(result)

    there[0].launch(run, [*there, *made])
    return outs


@dataclass(frozen=True, slots=True)
class _Shape:
    """Of a tensor of the device, without its numbers."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


_known_shapes: dict[Any, Any] = {}


def _shapes(func: Any, args: Any, kwargs: Any) -> Any:
    """Of what the op gives: told by the same op over tensors without numbers, once for the same shapes."""

    def told(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return _Shape(tuple(leaf.size()), leaf.stride(), leaf.dtype), leaf.dim()
        return type(leaf), leaf

    key = func, repr(_map(told, (args, kwargs))), torch.get_default_dtype()
    if key not in _known_shapes:
        outs = func(*_map(_without_numbers, args), **_map(_without_numbers, kwargs))
        _known_shapes[key] = _map(
            lambda leaf: _Shape(leaf.size(), leaf.stride(), leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf,
            outs,
        )
    return _known_shapes[key]


def _without_numbers(leaf: Any) -> Any:
    if isinstance(leaf, DeviceTensor):
        return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device="meta")
    return torch.device("meta") if isinstance(leaf, torch.device) else leaf


def _mutate(func: Any, name: str, there: list[DeviceTensor], args: Any, kwargs: Any) -> Any:
    given_args, given_kwargs = _map(_given, args), _map(_given, kwargs)
    if name in _RANDOM:  # a generator gives its numbers in the order of launches
        target = given_args[0]
        numbers = func(torch.empty_like(target), *given_args[1:], **given_kwargs)
        there[0].launch(lambda: target.copy_(numbers))
    else:
        there[0].launch(lambda: func(*given_args, **given_kwargs), there)
    if not func._schema.returns:
        return None
    return kwargs["out"] if "out" in kwargs else args[0]


def _run_now(func: Any, first: DeviceTensor, args: Any, kwargs: Any, *, to_host: bool) -> Any:
    """What depends on numbers, or goes to the host, waits for them."""
    machine().wait(first.stream(), first.stream().submitted, func.overloadpacket.__name__)

    def placed(leaf: Any) -> Any:
        if to_host or not isinstance(leaf, torch.Tensor):
            return leaf
        out = allocate(torch.empty_like(leaf), first.device)
        out.data_there.copy_(leaf)
        return out

    return _map(placed, func(*_map(_given, args), **_map(_given, kwargs)))


# -- ops that are more than numbers -----------------------------------------------------------------------------------


def _to_copy(
    func: Any,
    args: Any,
    kwargs: Any,
) -> torch.Tensor:
    (source,) = args
    device = torch.device(kwargs.get("device") or source.device)
    dtype, non_blocking = kwargs.get("dtype") or source.dtype, bool(kwargs.get("non_blocking"))
    how = {"dtype": dtype, "memory_format": kwargs.get("memory_format") or torch.preserve_format}
    if device.type == "cpu":
        shape = torch.empty_like(source.data_there, **how)
        target = host.pin(shape) if non_blocking else shape
        moved = source if dtype == source.dtype else _launched_copy(source, how)
        host.to_host(target, moved, non_blocking=non_blocking)
        return target
    if isinstance(source, DeviceTensor) and machine().gpu(device).device == source.device:
        return _launched_copy(source, how)
    assert not isinstance(source, DeviceTensor), "copies between two GPUs"
    out = allocate(torch.empty_like(source, **how), device)
    host.to_device(out, source, non_blocking=non_blocking)
    return out


def _launched_copy(source: DeviceTensor, how: Any) -> DeviceTensor:
    out = allocate(torch.empty_like(source.data_there, **how), source.device)
    target, data = out.data_there, source.data_there
    source.launch(lambda: target.copy_(data), [out])
    return out


def _copy(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    target, source = args[:2]
    non_blocking = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking"))
    if not isinstance(target, DeviceTensor):
        host.to_host(target, source, non_blocking=non_blocking)
    elif not isinstance(source, DeviceTensor):
        host.to_device(target, source, non_blocking=non_blocking)
    else:
        _one_device("copy_", [target, source])
        to, data = target.data_there, source.data_there
        target.launch(lambda: to.copy_(data), [source])
    return target  # type: ignore[no-any-return]


def _value(func: Any, args: Any, kwargs: Any) -> Any:
    (tensor,) = args
    machine().wait(tensor.stream(), tensor.stream().submitted, "item")
    return tensor.data_there.item()


def _not_pinned(func: Any, args: Any, kwargs: Any) -> bool:
    return False


def _no_pinning(func: Any, args: Any, kwargs: Any) -> Any:
    raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")


_SPECIAL: dict[str, Callable[[Any, Any, Any], Any]] = {
    "_to_copy": _to_copy,
    "copy_": _copy,
    "_local_scalar_dense": _value,
    "item": _value,
    "is_pinned": _not_pinned,
    "_pin_memory": _no_pinning,
}
