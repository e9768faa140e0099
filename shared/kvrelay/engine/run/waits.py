"""Finds the ops of a forward that would make the host wait for the device.

A wait leaves an accelerator idle until the host has launched its next kernel. It also ends the capture of a CUDA graph:
the value, or a shape that depends on it, would be fixed in the graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_ATEN = torch.ops.aten
_ASK_THE_DEVICE = frozenset(
    {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "bincount", "_unique2", "unique_dim"}
    | {"unique_consecutive"}
)
_INDEXED = frozenset({"index", "index_put", "index_put_", "_index_put_impl_"})
_COPIES = frozenset({"_to_copy", "copy_"})


class Waits(TorchDispatchMode):
    """Records in `ops` the names of ops that need a value or a shape from the device before the host can continue, and
    of copies between devices."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if _waits(func, args, kwargs or {}, out):
            self.ops.append(str(func))
        return out


def _waits(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> bool:
    name = func.overloadpacket.__name__
    if name in _INDEXED:
        return any(_is_mask(index) for arg in args if isinstance(arg, list | tuple) for index in arg)
    if name == "repeat_interleave":
        return func._overloadname != "self_int" and kwargs.get("output_size") is None
    if name in _COPIES:
        source = args[0] if name == "_to_copy" else args[1]
        return bool(out.device != source.device and source.dim())  # a single number is passed as a kernel's argument
    return name in _ASK_THE_DEVICE


def _is_mask(index: object) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)
