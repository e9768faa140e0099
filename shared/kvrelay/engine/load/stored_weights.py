"""Quantized checkpoints on a CPU: which formats of integer weights are served, by `quantization_config` of a model's
config, and the reading of their linear layers from safetensors files.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from safetensors import safe_open
from transformers import PreTrainedConfig

from kvrelay.engine.load.integer_weight import IntegerWeight, unpack_awq, unpack_compressed, unpack_gptq
from kvrelay.engine.load.model_files import weight_files
from kvrelay.engine.run.attention import UnsupportedModel

SUPPORTED = (
    "GPTQ with 4 or 8 bits (formats gptq and gptq_v2), AWQ with 4 bits (gemm), and compressed-tensors with integer "
    "weights of 4 or 8 bits (pack-quantized) or 8 bits (int-quantized, naive-quantized)"
)
"""The supported formats, for error messages."""

_BITS = (4, 8)
_COMPRESSED_BITS = {"pack-quantized": (4, 8), "int-quantized": (8,), "naive-quantized": (8,)}
_STRATEGIES = ("group", "channel", "tensor")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredFormat:
    """A format that is served. What differs between layers is in their tensors' shapes."""

    method: Literal["gptq", "awq", "compressed-tensors"]
    group_size: int | None = None  # inputs of a group; None: see the shapes
    zeros_less_one: bool = False  # see `unpack_gptq`


def stated_quantization(config: PreTrainedConfig) -> tuple[Any, Mapping[str, Any]] | None:
    """Returns the method's name and all of `quantization_config`; None if the weights are not quantized."""
    content = getattr(config, "quantization_config", None)
    if content is None:
        return None
    stated: dict[str, Any] = content if isinstance(content, dict) else content.to_dict()
    method = stated.get("quant_method")
    return getattr(method, "value", method), stated


def find_format(config: PreTrainedConfig) -> StoredFormat | None:
    """Returns the format of the checkpoint's weights; None if they are not quantized or by another method. Raises
    UnsupportedModel for a variant of the method that is not served."""
    quantization = stated_quantization(config)
    if quantization is None:
        return None
    method, stated = quantization
    readers = {"gptq": _gptq_format, "awq": _awq_format, "compressed-tensors": _compressed_format}
    if method not in readers:
        return None
    try:
        return readers[method](stated)
    except _NotServed as error:
        raise UnsupportedModel(
            f"{config.model_type}: its weights are quantized by {method} with {error}, which is not served on a CPU. "
            f"Served are {SUPPORTED}"
        ) from None
    except (TypeError, ValueError, AttributeError) as error:
        raise UnsupportedModel(f"{config.model_type}: its quantization_config cannot be read: {error}") from error


class _NotServed(Exception):
    """Names the property."""


def _require(condition: bool, name: str, value: object) -> None:
    if not condition:
        raise _NotServed(f"{name} = {value!r}")


def _gptq_format(stated: Mapping[str, Any]) -> StoredFormat:
    bits, layout = stated.get("bits"), stated.get("checkpoint_format") or stated.get("format") or "gptq"
    _require(bits in _BITS, "bits", bits)
    _require(layout in ("gptq", "gptq_v2"), "checkpoint_format", layout)
    _require(not stated.get("is_marlin_format"), "is_marlin_format", True)
    _require(stated.get("pack_dtype", "int32") == "int32", "pack_dtype", stated.get("pack_dtype"))
    return StoredFormat("gptq", _group_size(stated), layout == "gptq")


def _awq_format(stated: Mapping[str, Any]) -> StoredFormat:
    bits, layout = stated.get("bits", stated.get("w_bit")), stated.get("version") or stated.get("format") or "gemm"
    _require(bits == 4, "bits", bits)
    _require(str(layout).lower() == "gemm", "version", layout)
    return StoredFormat("awq", _group_size(stated))


def _compressed_format(stated: Mapping[str, Any]) -> StoredFormat:
    sparsity = (stated.get("sparsity_config") or {}).get("format", "dense")
    _require(sparsity == "dense", "sparsity_config.format", sparsity)
    _require(not (stated.get("transform_config") or {}).get("config_groups"), "transform_config", "...")
    groups = stated.get("config_groups") or {}
    _require(bool(groups), "config_groups", groups)
    sizes = set()
    for name, group in groups.items():
        weights = group.get("weights") or {}
        layout = group.get("format") or stated.get("format")
        _require(layout in _COMPRESSED_BITS, f"{name}: format", layout)
        _require(weights.get("type", "int") == "int", f"{name}: weights.type", weights.get("type"))
        bits, strategy = weights.get("num_bits", 8), weights.get("strategy") or "group"
        _require(bits in _COMPRESSED_BITS[str(layout)], f"{name}: weights.num_bits", bits)
        _require(strategy in _STRATEGIES, f"{name}: weights.strategy", strategy)
        sizes.add(weights.get("group_size"))
        if group.get("input_activations"):
            _log.info("%s: activations keep their type, which its config wants quantized as well", name)
    only = sizes.pop() if len(sizes) == 1 else None
    return StoredFormat("compressed-tensors", only if only and only > 0 else None)


def _group_size(stated: Mapping[str, Any]) -> int | None:
    size = int(stated.get("group_size", stated.get("q_group_size", 128)))
    _require(size == -1 or size > 0, "group_size", size)
    return size if size > 0 else None


_PARTS = {
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "awq": ("qweight", "qzeros", "scales"),
    "compressed-tensors": (
        *("weight_packed", "weight_shape", "weight"),  # the last in place of the others
        *("weight_scale", "weight_zero_point", "weight_g_idx"),
    ),
}
_OPTIONAL = frozenset({"g_idx", "weight_zero_point", "weight_g_idx"})
_SCALE_TYPES = ("F16", "BF16", "F32")


class StoredWeights:
    """The checkpoint's tensors. Linear layers that are integers are read one at a time, and others as they are."""

    def __init__(self, name: str, stored_format: StoredFormat) -> None:
        """Opens the files of a directory or a hub name, and checks shapes and types of what is quantized.

        Raises:
            UnsupportedModel: tensors are missing or of other shapes than the format's.
            OSError: there are no safetensors files.
        """
        self._format = stored_format
        self._files: dict[str, Any] = {}
        for path in weight_files(name):
            tensors: Any = safe_open(path, "pt")
            self._files |= dict.fromkeys(tensors.keys(), tensors)
        parts = _PARTS[stored_format.method]
        self._parts: dict[str, dict[str, str]] = {}
        for key in self._files:
            path, _, part = key.rpartition(".")
            if part in parts and self._is_integer(key, part):
                self._parts[path] = {each: f"{path}.{each}" for each in parts if f"{path}.{each}" in self._files}
        if not self._parts:
            raise UnsupportedModel(f"{name}: its config says {stored_format.method}, and no tensor is quantized")
        for path in self._parts:
            self._check(path)

    def _is_integer(self, key: str, part: str) -> bool:
        """Returns whether the tensor holds the codes of a layer."""
        if part == "weight":
            return bool(self._files[key].get_slice(key).get_dtype() == "I8")
        return part in ("qweight", "weight_packed")

    @property
    def method(self) -> str:
        return self._format.method

    @property
    def paths(self) -> list[str]:
        """The quantized layers, as the checkpoint names them."""
        return list(self._parts)

    def state_dict(self, dtype: torch.dtype) -> dict[str, Any]:
        """All tensors, with weights of `dtype` in place of the quantized ones. A value `x` is read by `x[...]`."""
        used = {key for parts in self._parts.values() for key in parts.values()}
        state: dict[str, Any] = {key: file.get_slice(key) for key, file in self._files.items() if key not in used}
        return state | {f"{path}.weight": _Dequantized(self, path, dtype) for path in self._parts}

    def read(self, path: str) -> IntegerWeight:
        parts = {part: self._files[key].get_tensor(key) for part, key in self._parts[path].items()}
        if self._format.method == "compressed-tensors":
            return _compressed(parts, self._format)
        return _by_input(parts, self._format)

    def _check(self, path: str) -> None:
        slices = {part: self._files[key].get_slice(key) for part, key in self._parts[path].items()}
        shapes = {part: tuple(each.get_shape()) for part, each in slices.items()}
        parts = _PARTS[self._format.method]
        if self._format.method == "compressed-tensors":
            unused = ("weight_packed", "weight_shape") if "weight" in shapes else ("weight",)
            parts = tuple(part for part in parts if part not in unused)
        if missing := [part for part in parts if part not in shapes and part not in _OPTIONAL]:
            raise UnsupportedModel(f"{path}: the checkpoint lacks its {' and '.join(missing)}")
        scales = slices["weight_scale" if "weight_scale" in slices else "scales"].get_dtype()
        if scales not in _SCALE_TYPES:
            raise UnsupportedModel(f"{path}: its scales are {scales}, and not one of {', '.join(_SCALE_TYPES)}")
        try:
            if self._format.method == "compressed-tensors":
                shape = (int(each) for each in self._tensor(path, "weight_shape")) if "weight_shape" in shapes else ()
                _compressed_shape(shapes, tuple(shape), self._format)
            else:
                _shape_by_input(shapes, self._format)
        except ValueError as error:
            named = ", ".join(f"{part} {list(shape)}" for part, shape in shapes.items())
            raise UnsupportedModel(f"{path}: {error} ({named})") from None

    def _tensor(self, path: str, part: str) -> torch.Tensor:
        key = self._parts[path][part]
        tensor: torch.Tensor = self._files[key].get_tensor(key)
        return tensor


class _Dequantized:
    """A tensor of a state dict that is computed when it is read, like a slice of a safetensors file."""

    def __init__(self, weights: StoredWeights, path: str, dtype: torch.dtype) -> None:
        self._weights, self._path, self._dtype = weights, path, dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._weights.read(self._path).dequantize(self._dtype)[index]


def _group(num_in: int, num_groups: int, stated: int | None) -> int:
    """Inputs of a group. Raises ValueError if there cannot be that many groups."""
    if num_groups == 1:
        return num_in
    if stated and -(-num_in // stated) == num_groups:
        return stated
    if num_groups < 1 or num_in % num_groups:
        raise ValueError(f"{num_in} inputs are not {num_groups} groups")
    return num_in // num_groups


# -- GPTQ and AWQ: inputs first ---------------------------------------------------------------------------------------


def _shape_by_input(shapes: Mapping[str, tuple[int, ...]], stored: StoredFormat) -> tuple[int, int]:
    """Bits of a code and inputs of a group. Raises ValueError if the shapes do not go together."""
    (rows, columns), (num_groups, zero_words), scales = shapes["qweight"], shapes["qzeros"], shapes["scales"]
    if len(scales) != 2 or scales[0] != num_groups:
        raise ValueError("its scales and zero points have not the same groups")
    num_out = scales[1]
    bits = zero_words * 32 // num_out if num_out else 0
    if bits not in (4, 8) or zero_words * 32 != num_out * bits:
        raise ValueError("its zero points have neither 4 nor 8 bits")
    if stored.method == "awq":
        if bits != 4 or columns != zero_words:
            raise ValueError("its weights are not AWQ's 4 bits")
        num_in = rows
    else:
        if columns != num_out or shapes.get("g_idx", (rows * 32 // bits,)) != (rows * 32 // bits,):
            raise ValueError("its weights have other shapes than their scales or g_idx")
        num_in = rows * 32 // bits
    return bits, _group(num_in, num_groups, stored.group_size)


def _by_input(parts: Mapping[str, torch.Tensor], stored: StoredFormat) -> IntegerWeight:
    bits, group = _shape_by_input({part: tuple(each.shape) for part, each in parts.items()}, stored)
    if stored.method == "awq":
        codes, zeros = unpack_awq(parts["qweight"], parts["qzeros"])
    else:
        unpacked = unpack_gptq(parts["qweight"], parts["qzeros"], bits, zeros_less_one=stored.zeros_less_one)
        codes, zeros = unpacked
    groups = _permuted(parts.get("g_idx"), group, len(zeros))
    return IntegerWeight(codes, parts["scales"].contiguous(), _or_none(zeros), bits, group, groups)


# -- compressed-tensors: outputs first --------------------------------------------------------------------------------


def _compressed_shape(
    shapes: Mapping[str, tuple[int, ...]], weight_shape: tuple[int, ...], stored: StoredFormat
) -> tuple[int, int, int]:
    """Bits of a code, inputs, and inputs of a group. Raises ValueError if the shapes do not go together."""
    if "weight" in shapes:
        bits, (num_out, num_in) = 8, shapes["weight"]
    else:
        num_out, num_in = weight_shape
        matching = [each for each in (4, 8) if shapes["weight_packed"] == (num_out, -(-num_in * each // 32))]
        if not matching:
            raise ValueError(f"its words do not hold a weight {list(weight_shape)} in 4 or 8 bits")
        bits = matching[0]
    scales = shapes["weight_scale"]
    if scales in ((), (1,), (1, 1), (num_out,), (num_out, 1)):
        return bits, num_in, num_in
    if len(scales) != 2 or scales[0] != num_out:
        raise ValueError("its scales have another shape than its weight")
    return bits, num_in, _group(num_in, scales[1], stored.group_size)


def _compressed(parts: Mapping[str, torch.Tensor], stored: StoredFormat) -> IntegerWeight:
    weight_shape = tuple(parts["weight_shape"].tolist()) if "weight_shape" in parts else ()
    shapes = {part: tuple(each.shape) for part, each in parts.items()}
    bits, num_in, group = _compressed_shape(shapes, weight_shape, stored)
    codes = parts["weight"] if "weight" in parts else unpack_compressed(parts["weight_packed"], bits, num_in)
    num_out = len(codes)
    scales = _by_group(parts["weight_scale"], num_out)
    zeros = parts.get("weight_zero_point")
    if zeros is not None and zeros.dtype == torch.int32 and "weight_packed" in parts:
        zeros = unpack_compressed(zeros.t(), bits, num_out)
    elif zeros is not None:
        zeros = _by_group(zeros.to(torch.int8), num_out)
    groups = _permuted(parts.get("weight_g_idx"), group, len(scales))
    return IntegerWeight(codes, scales, None if zeros is None else _or_none(zeros), bits, group, groups)


def _by_group(values: torch.Tensor, num_out: int) -> torch.Tensor:
    """`[groups, num_out]` of values for each output and group, each output, or the tensor."""
    if values.numel() == 1:
        return values.reshape(1, 1).expand(1, num_out).contiguous()
    return values.reshape(num_out, -1).t().contiguous()


# -- both -------------------------------------------------------------------------------------------------------------


def _permuted(index: torch.Tensor | None, group: int, num_groups: int) -> torch.Tensor | None:
    """The group of each input, unless groups are runs of inputs. Some tools write zeros or -1 in place of no index.
    Raises UnsupportedModel for an index that names no group."""
    if index is None:
        return None
    groups = index.long()
    if torch.equal(groups, torch.arange(len(groups)) // group) or bool((groups <= 0).all()):
        return None
    if int(groups.min()) < 0 or int(groups.max()) >= num_groups:
        raise UnsupportedModel(f"g_idx names the groups {int(groups.min())} to {int(groups.max())} of {num_groups}")
    return groups


def _or_none(zeros: torch.Tensor) -> torch.Tensor | None:
    return zeros.contiguous() if bool(zeros.any()) else None


def layer_readers(model: torch.nn.Module, weights: StoredWeights) -> dict[torch.nn.Linear, Callable[[], IntegerWeight]]:
    """Reads the weights of the model's linear layers that are stored as integers."""
    prefix = getattr(model, "base_model_prefix", "")
    modules = dict(model.named_modules())
    readers: dict[torch.nn.Linear, Callable[[], IntegerWeight]] = {}
    for path in weights.paths:
        for name in (path, f"{prefix}.{path}", path.removeprefix(f"{prefix}.")):
            if isinstance(module := modules.get(name), torch.nn.Linear):
                readers[module] = partial(weights.read, path)
                break
    return readers
