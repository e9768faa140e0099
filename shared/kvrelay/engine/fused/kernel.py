"""The functions of backends/cpu_decoder.c, with types. Calls go through ctypes, which releases the GIL."""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_int64, c_void_p
from typing import Any

import torch

from kvrelay.backends.cpu import AttentionCall
from kvrelay.backends.cpu_build import KernelBuildError, load_kernel
from kvrelay.engine.fused.weights import DTYPES, DecoderWeights, LayerWeights, LinearWeights

_ALIGNMENT = 64


class _Linear(ctypes.Structure):
    _fields_ = [("weight", c_void_p), ("bias", c_void_p), ("num_out", c_int64), ("num_in", c_int64)]


class _DecoderLayer(ctypes.Structure):
    _fields_ = [
        *((name, _Linear) for name in ("qkv", "output", "gate_up", "down")),
        *((name, c_void_p) for name in ("input_norm", "mlp_norm", "query_norm", "key_norm", "sinks")),
        ("window", c_int64),
        ("scaling", c_double),
        ("softcap", c_double),
    ]


class _Decoder(ctypes.Structure):
    _fields_ = [
        ("layers", c_void_p),
        *((name, c_int64) for name in ("num_layers", "type", "hidden_size", "num_heads", "num_kv_heads", "head_dim")),
        ("intermediate_size", c_int64),
        ("norm_eps", c_double),
    ]


class _DecoderStep(ctypes.Structure):
    _fields_ = [
        ("num_tokens", c_int64),
        *((name, c_void_p) for name in ("hidden", "cos", "sin", "attention", "pool")),
        ("layer_bytes", c_int64),
        *((name, c_void_p) for name in ("write_blocks", "write_slots", "normed", "qkv", "attended")),
        *((name, c_void_p) for name in ("gate_up", "activated")),
    ]


class DecoderKernel:
    """The kernels, bound to one model's weights. All tensors are contiguous; `type` is the weights' dtype."""

    def __init__(self, weights: DecoderWeights) -> None:
        """Builds or loads the kernels.

        Raises:
            KernelBuildError: the kernels cannot be built here, or their structs differ from the ones above.
        """
        self._library = _declare(load_kernel())
        self._weights = weights
        self._type = DTYPES.index(weights.dtype)
        self._keep: list[Any] = []  # biases in float32, to which the structs point
        self._layers = (_DecoderLayer * len(weights.layers))(*map(self._layer, weights.layers))
        self._linears = {id(each): self._linear(each) for each in _all_linears(weights)}
        self._decoder = _Decoder(
            *(ctypes.addressof(self._layers), len(weights.layers), self._type, weights.hidden_size, weights.num_heads),
            *(weights.num_kv_heads, weights.head_dim, weights.intermediate_size, weights.norm_eps),
        )

    def _layer(self, layer: LayerWeights) -> _DecoderLayer:
        params = layer.attention
        norms = (layer.input_norm, layer.mlp_norm, layer.query_norm, layer.key_norm)
        return _DecoderLayer(
            *map(self._linear, (layer.qkv, layer.output, layer.gate_up, layer.down)),
            *(None if norm is None else norm.data_ptr() for norm in norms),
            None,  # sinks: `decoder_weights` refuses them
            *(params.sliding_window or 0, params.scaling, params.softcap or 0.0),
        )

    def _linear(self, linear: LinearWeights) -> _Linear:
        bias = None if linear.bias is None else linear.bias.float().contiguous()
        self._keep.append(bias)
        return _Linear(linear.weight.data_ptr(), None if bias is None else bias.data_ptr(), *linear.weight.shape)

    def linear(self, linear: LinearWeights, x: torch.Tensor, out: torch.Tensor) -> None:
        """`out = x @ weight.T + bias` for `x` `[tokens, num_in]` of the weights' type; `out` of that type or float32.

        The sum of each output has an order that depends on neither the batch nor the threads.
        """
        to_float = out.dtype == torch.float32
        self._library.kvrelay_linear(
            *(ctypes.byref(self._linears[id(linear)]), x.data_ptr(), len(x), out.data_ptr()),
            *(to_float, self._type, torch.get_num_threads()),
        )

    def add_and_norm(
        self, hidden: torch.Tensor, delta: torch.Tensor | None, norm: torch.Tensor, normed: torch.Tensor
    ) -> None:
        """`hidden += delta`, then `normed = rms_norm(hidden) * norm`; `hidden` is float32 `[tokens, hidden_size]`."""
        self._library.kvrelay_add_and_norm(
            *(hidden.data_ptr(), None if delta is None else delta.data_ptr(), norm.data_ptr(), normed.data_ptr()),
            *(*hidden.shape, self._weights.norm_eps, self._type, torch.get_num_threads()),
        )

    def norm_and_rotate(self, layer: int, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Norms and rotates the queries and keys of `qkv` in place; `cos` and `sin` are `[tokens, head_dim / 2]`."""
        self._library.kvrelay_norm_and_rotate(
            *(ctypes.byref(self._decoder), layer, qkv.data_ptr(), len(qkv), cos.data_ptr(), sin.data_ptr()),
            torch.get_num_threads(),
        )

    def silu_and_multiply(self, gate_up: torch.Tensor, activated: torch.Tensor) -> None:
        """`activated = silu(gate) * up`, with gate and up the halves of `gate_up` `[tokens, 2 * size]`."""
        self._library.kvrelay_silu_and_multiply(
            *(gate_up.data_ptr(), DTYPES.index(gate_up.dtype), activated.data_ptr(), self._type, *activated.shape),
            torch.get_num_threads(),
        )

    def layers(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attention: AttentionCall) -> None:
        """Runs all layers over a few tokens in one call: `hidden` becomes the last layer's output.

        `attention` is the step's plan; the pool has the weights' type.
        """
        weights, count, size = self._weights, len(hidden), self._weights.dtype.itemsize
        num_heads, all_heads = weights.num_heads, weights.num_heads + 2 * weights.num_kv_heads
        buffers = _carve(
            count * weights.hidden_size * size,
            count * all_heads * weights.head_dim * size,
            count * num_heads * weights.head_dim * size,
            count * 2 * weights.intermediate_size * 4,
            count * weights.intermediate_size * size,
        )
        step = _DecoderStep(
            *(count, hidden.data_ptr(), cos.data_ptr(), sin.data_ptr(), attention.plan, attention.pool),
            *(attention.layer_bytes, attention.write_blocks, attention.write_slots, *buffers[1]),
        )
        self._library.kvrelay_decoder_layers(ctypes.byref(self._decoder), ctypes.byref(step), torch.get_num_threads())


def _carve(*sizes: int) -> tuple[torch.Tensor, list[int]]:
    """One allocation, and the addresses of aligned parts of it."""
    starts, total = [], 0
    for size in sizes:
        starts.append(total)
        total += -(-size // _ALIGNMENT) * _ALIGNMENT
    space = torch.empty(total, dtype=torch.uint8)
    return space, [space.data_ptr() + start for start in starts]


def _all_linears(weights: DecoderWeights) -> list[LinearWeights]:
    inside = [each for layer in weights.layers for each in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    return [*inside, weights.head]


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    pointer, number = c_void_p, c_int64
    signatures: dict[str, list[Any]] = {
        "linear": [pointer, pointer, number, pointer, number, number, number],
        "add_and_norm": [pointer, pointer, pointer, pointer, number, number, c_double, number, number],
        "norm_and_rotate": [pointer, number, pointer, number, pointer, pointer, number],
        "silu_and_multiply": [pointer, number, pointer, number, number, number, number],
        "decoder_layers": [pointer, pointer, number],
    }
    for name, types in signatures.items():
        function = getattr(library, f"kvrelay_{name}")
        function.argtypes, function.restype = types, None
    library.kvrelay_decoder_struct_bytes.restype = c_int64
    sizes = [ctypes.sizeof(struct) for struct in (_Linear, _DecoderLayer, _Decoder, _DecoderStep)]
    ours = sizes[0] * 10**9 + sizes[1] * 10**6 + sizes[2] * 10**3 + sizes[3]
    if library.kvrelay_decoder_struct_bytes() != ours:
        raise KernelBuildError("the structs of cpu_decoder.c differ from their declarations in Python")
    return library
