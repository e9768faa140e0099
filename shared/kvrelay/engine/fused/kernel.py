"""The functions of backends/cpu_decoder.c and cpu_linear.c, with types, and the rotary angles that they take.

Calls go through ctypes, which releases the GIL.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_double, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

import torch

from kvrelay.backends.cpu import AttentionCall
from kvrelay.backends.cpu_build import KernelBuildError, load_kernel
from kvrelay.engine.fused.panels import FLOAT32, SCALE_TYPES, TYPES, PackedLinear
from kvrelay.engine.fused.weights import DTYPES, DecoderWeights, LayerWeights
from kvrelay.engine.parallel.shared_memory import RanksInC

FIXED_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Types of rotary embeddings whose angles depend on the position alone. `dynamic` and `longrope` look at the longest
position of a step."""

_FIRST = 2048  # positions in the table
_PIECE = 64
"""Positions whose angles torch computes at once: so few that it does not divide them among threads. It computes the
numbers at the ends of a thread's part by other instructions, with other last bits."""


@dataclass(frozen=True, slots=True)
class Angles:
    """`cos` and `sin`, float32 `[angles, head_dim / 2]`, and each token's row there, `[tokens]` int64."""

    cos: torch.Tensor
    sin: torch.Tensor
    rows: torch.Tensor


class AngleTable:
    """The angles of a model's rotary module `rotary(x, position_ids)`. Not thread-safe: steps use it one at a time.

    It grows with the longest position, by `4 * head_dim` bytes for each.
    """

    def __init__(self, rotary: Any, half: int) -> None:
        """`half` is half of `head_dim`."""
        self._rotary = rotary
        self._half = half
        self.is_fixed = getattr(rotary, "rope_type", None) in FIXED_TYPES
        """Whether a token's angles do not depend on the other tokens of its step."""
        self._cos = self._sin = torch.empty(0, half)

    def at(self, positions: torch.Tensor) -> Angles:
        """The angles at positions `[tokens]` int64."""
        longest = int(positions.numpy().max(initial=0))
        if not self.is_fixed:
            return Angles(*self._compute(positions), torch.arange(len(positions)))
        if longest >= (start := len(self._cos)):
            new = torch.arange(start, max(_FIRST, 1 << longest.bit_length())).split(_PIECE)
            cos, sin = zip(*map(self._compute, new), strict=True)
            self._cos, self._sin = torch.cat([self._cos, *cos]), torch.cat([self._sin, *sin])
        return Angles(self._cos, self._sin, positions)

    def _compute(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self._rotary(torch.empty(1), positions[None])
        return cos[0, :, : self._half].contiguous(), sin[0, :, : self._half].contiguous()


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
        """Builds or loads the kernels. Raises KernelBuildError if they cannot be built here."""
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


_ALIGNMENT = 64


class _DecoderLayer(ctypes.Structure):
    _fields_ = [
        *((name, LinearStruct) for name in ("qkv", "output", "gate_up", "down")),
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
        *((name, c_void_p) for name in ("hidden", "cos", "sin", "angles", "attention", "pool")),
        ("layer_bytes", c_int64),
        *((name, c_void_p) for name in ("write_blocks", "write_slots", "normed", "qkv", "attended", "activated")),
        *((name, c_void_p) for name in ("ranks", "partial", "counts", "gathered")),
        ("wait_ms", c_int64),
        ("goes_on", c_void_p),
    ]


class DecoderKernel:
    """The kernels, bound to one model's weights. All tensors are contiguous; activations have the weights' dtype."""

    def __init__(self, weights: DecoderWeights) -> None:
        """Builds or loads the kernels. Raises KernelBuildError if they cannot be built here, or their structs differ
        from the ones above."""
        self._library = _declare(load_kernel())
        self.products = PanelProducts(weights.dtype)
        self._weights = weights
        self._type = DTYPES.index(weights.dtype)
        self._space = torch.empty(0, dtype=torch.uint8)  # kept between steps: new pages cost more than some layers
        self._layers = (_DecoderLayer * len(weights.layers))(*map(self._layer, weights.layers))
        self._decoder = _Decoder(
            ctypes.addressof(self._layers),
            len(weights.layers),
            self._type,
            weights.hidden_size,
            weights.num_heads,
            weights.num_kv_heads,
            weights.head_dim,
            weights.intermediate_size,
            weights.norm_eps,
        )

    @staticmethod
    def _layer(layer: LayerWeights[PackedLinear]) -> _DecoderLayer:
        params = layer.attention
        norms = (layer.input_norm, layer.mlp_norm, layer.query_norm, layer.key_norm)
        return _DecoderLayer(
            *map(linear_struct, (layer.qkv, layer.output, layer.gate_up, layer.down)),
            *(None if norm is None else norm.data_ptr() for norm in norms),
            None,  # sinks: `decoder_weights` refuses them
            params.sliding_window or 0,
            params.scaling,
            params.softcap or 0.0,
        )

    def add_and_norm(
        self, hidden: torch.Tensor, delta: torch.Tensor | None, norm: torch.Tensor, normed: torch.Tensor
    ) -> None:
        """`hidden += delta`, then `normed = rms_norm(hidden) * norm`; `hidden` is float32 `[tokens, hidden_size]`."""
        self._library.kvrelay_add_and_norm(
            hidden.data_ptr(),
            None if delta is None else delta.data_ptr(),
            norm.data_ptr(),
            normed.data_ptr(),
            *hidden.shape,
            self._weights.norm_eps,
            self._type,
            torch.get_num_threads(),
        )

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The embeddings of tokens `[tokens]` int64, in float32 `[tokens, hidden_size]`. Raises IndexError for a token
        without an embedding."""
        weights, library = self._weights, self._library
        out = torch.empty(len(token_ids), weights.hidden_size)
        ids = (token_ids.data_ptr(), len(token_ids), out.data_ptr())
        if (table := weights.embedding) is None:
            assert weights.head is not None
            num_tokens = weights.head.num_out
            found = library.kvrelay_embed_from_panels(ctypes.byref(linear_struct(weights.head)), *ids)
        else:
            num_tokens = len(table)
            found = library.kvrelay_embed(table.data_ptr(), *table.shape, self._type, *ids)
        if not found:
            raise IndexError(f"a token is beyond the {num_tokens} of the vocabulary")
        return out

    def norm_and_rotate(self, layer: int, qkv: torch.Tensor, angles: Angles) -> None:
        """Norms and rotates the queries and keys of `qkv` in place."""
        self._library.kvrelay_norm_and_rotate(
            ctypes.byref(self._decoder),
            layer,
            qkv.data_ptr(),
            len(qkv),
            angles.rows.data_ptr(),
            angles.cos.data_ptr(),
            angles.sin.data_ptr(),
            torch.get_num_threads(),
        )

    def layers(
        self,
        hidden: torch.Tensor,
        angles: Angles | None,
        attention: AttentionCall | None,
        ranks: RanksInC | None = None,
        counts: Sequence[int] | None = None,
    ) -> None:
        """Runs all layers over a step's tokens in one call: `hidden` becomes the last layer's output.

        `attention` is the step's plan; the pool has the weights' type. `ranks`: those that divide heads and MLPs. If
        one of them is lost, the output is of no use. `counts`: if the ranks divide MLPs alone, the number of tokens of
        each; then those of this rank may do without attention, if their output is of no use.
        """
        weights, count = self._weights, len(hidden)
        all_heads = weights.num_heads + 2 * weights.num_kv_heads
        widths = (weights.hidden_size, all_heads * weights.head_dim, weights.num_heads * weights.head_dim)
        own, every = tokens_with_room(count), tokens_with_room(sum(counts) if counts else count)
        sums = 0 if ranks is None else weights.hidden_size * torch.float32.itemsize // weights.dtype.itemsize
        in_mlps = (weights.intermediate_size, sums, weights.hidden_size if counts else 0)
        *buffers, partial, gathered = self._carve(
            *((own, each) for each in widths), *((every, each) for each in in_mlps)
        )
        step = _DecoderStep(num_tokens=count, hidden=hidden.data_ptr())
        step.normed, step.qkv, step.attended, step.activated = buffers
        if angles is not None:
            step.cos, step.sin, step.angles = (each.data_ptr() for each in (angles.cos, angles.sin, angles.rows))
        if attention is not None:
            step.attention, step.pool, step.layer_bytes = attention.plan, attention.pool, attention.layer_bytes
            step.write_blocks, step.write_slots = attention.write_blocks, attention.write_slots
        if ranks is not None:
            step.ranks, step.partial, step.wait_ms = ranks.ranks, partial, ranks.wait_ms
            step.goes_on = ctypes.cast(ranks.goes_on, c_void_p).value
        held = (c_int64 * len(counts))(*counts) if counts else None
        if held is not None:
            step.counts, step.gathered = ctypes.addressof(held), gathered
        self._library.kvrelay_decoder_layers(ctypes.byref(self._decoder), ctypes.byref(step), torch.get_num_threads())

    def _carve(self, *sizes: tuple[int, int]) -> list[int]:
        """Addresses of aligned buffers `[tokens, width]` of activations. They last until the next call."""
        starts, total = [], 0
        for num_tokens, width in sizes:
            starts.append(total)
            total += -(-num_tokens * width * self._weights.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        if total > len(self._space):
            self._space = torch.zeros(total, dtype=torch.uint8)
        return [self._space.data_ptr() + start for start in starts]


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    pointer, number = c_void_p, c_int64
    signatures: dict[str, list[Any]] = {
        "add_and_norm": [pointer, pointer, pointer, pointer, number, number, c_double, number, number],
        "norm_and_rotate": [pointer, number, pointer, number, pointer, pointer, pointer, number],
        "decoder_layers": [pointer, pointer, number],
    }
    for name, types in signatures.items():
        function = getattr(library, f"kvrelay_{name}")
        function.argtypes, function.restype = types, None
    library.kvrelay_embed_from_panels.argtypes = [pointer, pointer, number, pointer]
    library.kvrelay_embed.argtypes = [pointer, number, number, number, pointer, number, pointer]
    for function in (library.kvrelay_embed_from_panels, library.kvrelay_embed, library.kvrelay_decoder_struct_bytes):
        function.restype = c_int64
    sizes = [ctypes.sizeof(struct) for struct in (LinearStruct, _DecoderLayer, _Decoder, _DecoderStep)]
    ours = sizes[0] * 10**9 + sizes[1] * 10**6 + sizes[2] * 10**3 + sizes[3]
    if library.kvrelay_decoder_struct_bytes() != ours:
        raise KernelBuildError("the structs of cpu_decoder.c differ from their declarations in Python")
    return library
