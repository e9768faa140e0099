"""Which formats of integer weights are served on a CPU, by `quantization_config` of a model's config."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from transformers import PreTrainedConfig

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
    """Returns the format of the checkpoint's weights; None if they are not quantized or by another method.

    Raises:
        UnsupportedModel: a variant of the method that is not served.
    """
    quantization = stated_quantization(config)
    if quantization is None:
        return None
    method, stated = quantization
    readers = {"gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed}
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


def _gptq(stated: Mapping[str, Any]) -> StoredFormat:
    bits, layout = stated.get("bits"), stated.get("checkpoint_format") or stated.get("format") or "gptq"
    _require(bits in _BITS, "bits", bits)
    _require(layout in ("gptq", "gptq_v2"), "checkpoint_format", layout)
    _require(not stated.get("is_marlin_format"), "is_marlin_format", True)
    _require(stated.get("pack_dtype", "int32") == "int32", "pack_dtype", stated.get("pack_dtype"))
    return StoredFormat("gptq", _group_size(stated), layout == "gptq")


def _awq(stated: Mapping[str, Any]) -> StoredFormat:
    bits, layout = stated.get("bits", stated.get("w_bit")), stated.get("version") or stated.get("format") or "gemm"
    _require(bits == 4, "bits", bits)
    _require(str(layout).lower() == "gemm", "version", layout)
    return StoredFormat("awq", _group_size(stated))


def _compressed(stated: Mapping[str, Any]) -> StoredFormat:
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
