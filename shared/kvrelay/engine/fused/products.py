"""Matrix products of backends/cpu_linear.c over packed weights. Calls go through ctypes, which releases the GIL."""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p

import torch

from kvrelay.backends.cpu_build import load_kernel
from kvrelay.engine.fused.panels import FLOAT32, SCALE_TYPES, TYPES, PackedLinear

_TOKENS_MULTIPLE = 32  # rows of a pair of AMX tiles
_STORE, _STORE_FLOAT, _GATED = 0, 1, 3  # what becomes of a product, numbered as in cpu_linear.c


class LinearStruct(ctypes.Structure):
    """The struct `Linear` of cpu_linear.c."""

    _fields_ = [
        *((name, c_void_p) for name in ("panels", "scales", "zeros", "bias")),
        *((name, c_int64) for name in ("num_out", "num_in", "format", "group", "scale_type")),
    ]


class PanelProducts:
    """Products of activations of one type, float32 or bfloat16."""

    def __init__(self, dtype: torch.dtype) -> None:
        """Builds or loads the kernels.

        Raises:
            KernelBuildError: the kernels cannot be built here.
        """
        self._library = load_kernel()
        self._library.kvrelay_linear.argtypes = [c_void_p, c_void_p, c_int64, c_void_p, *[c_int64] * 4]
        self._library.kvrelay_linear.restype = None
        self._library.kvrelay_instructions.restype = c_void_p
        self._type = TYPES[dtype]
        self._needs_room = "AMX" in self.instructions  # its tiles are of a multiple of rows

    @property
    def instructions(self) -> str:
        """The CPU's instructions that products of bfloat16 use, for logs."""
        return str(ctypes.string_at(self._library.kvrelay_instructions()).decode())

    def linear(self, linear: PackedLinear, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """`x @ weight.T + bias` in the type of `x` `[tokens, num_in]` or in float32; `silu(gate) * up` of a gated one.

        The sum of each output has an order that depends on neither the batch nor the threads, unless AMX takes batches
        from some size on.
        """
        mode = _GATED if linear.gated else _STORE_FLOAT if dtype == torch.float32 else _STORE
        padded = _with_room(x) if self._needs_room else x.contiguous()  # held until the call returns
        out = torch.empty(len(x), linear.num_out // (1 + linear.gated), dtype=dtype or x.dtype)
        self._library.kvrelay_linear(
            ctypes.byref(linear_struct(linear)),
            padded.data_ptr(),
            len(x),
            out.data_ptr(),
            mode,
            self._type,
            self._needs_room,
            torch.get_num_threads(),
        )
        return out


def linear_struct(linear: PackedLinear) -> LinearStruct:
    """Valid while `linear` is."""
    optional = (linear.scales, linear.zeros, linear.bias)
    return LinearStruct(
        linear.panels.data_ptr(),
        *(None if each is None else each.data_ptr() for each in optional),
        linear.num_out,
        linear.num_in,
        linear.format,
        linear.group,
        FLOAT32 if linear.scales is None else SCALE_TYPES[linear.scales.dtype],
    )


def tokens_with_room(num_tokens: int) -> int:
    """The number of tokens for which a buffer of activations has room."""
    return -(-num_tokens // _TOKENS_MULTIPLE) * _TOKENS_MULTIPLE


def _with_room(x: torch.Tensor) -> torch.Tensor:
    missing = tokens_with_room(len(x)) - len(x)
    return torch.nn.functional.pad(x, (0, 0, 0, missing)) if missing else x.contiguous()
