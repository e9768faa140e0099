"""Writes small checkpoints in the formats of GPTQ, AWQ and compressed-tensors, bit by bit as their tools pack them, and
beside each one the same weights as float32."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The columns of a word of AWQ, from the lowest bits on."""


@dataclass(frozen=True)
class Scheme:
    """How a checkpoint is quantized. `group` -1: one for all inputs; `shuffled`: groups are not runs of inputs."""

    method: str = "gptq"  # or "awq", or a format of compressed-tensors
    bits: int = 4
    group: int = 32
    symmetric: bool = True
    shuffled: bool = False
    version: str = "gptq"
    scale_type: torch.dtype = torch.float16
    head: bool = False  # also the head

    def __str__(self) -> str:
        parts = [self.method if self.method != "gptq" else self.version, f"{self.bits} bits", f"groups of {self.group}"]
        marks = {"asymmetric": not self.symmetric, "shuffled": self.shuffled, "head": self.head}
        return ", ".join([*parts, *(name for name, holds in marks.items() if holds)])

    @property
    def config(self) -> dict[str, Any]:
        """The `quantization_config`."""
        named: dict[str, Any]
        if self.method == "gptq":
            named = {"bits": self.bits, "group_size": self.group, "desc_act": self.shuffled, "sym": self.symmetric}
            return {"quant_method": "gptq", "checkpoint_format": self.version, **named}
        if self.method == "awq":
            named = {"bits": self.bits, "group_size": self.group, "zero_point": True, "version": "gemm"}
            return {"quant_method": "awq", "modules_to_not_convert": None, **named}
        weights: dict[str, Any] = {"num_bits": self.bits, "type": "int", "symmetric": self.symmetric}
        weights |= {"strategy": "channel"} if self.group == -1 else {"strategy": "group", "group_size": self.group}
        group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
        return {
            "quant_method": "compressed-tensors",
            "format": self.method,
            "config_groups": {"group_0": group},
            "ignore": [] if self.head else ["lm_head"],
        }


def write_quantized(model: Path, directory: Path, scheme: Scheme, *, seed: int = 0) -> Path:
    """Copies a model into `directory` with its linear layers quantized, and returns the directory of the float32 model
    of the same weights."""
    generator = torch.Generator().manual_seed(seed)
    weights = load_file(model / "model.safetensors")
    quantized: Tensors = {}
    plain: Tensors = {}
    for key, weight in weights.items():
        path = key.removesuffix(".weight")
        if "proj.weight" in key or (scheme.head and key == "lm_head.weight"):
            parts, exact = quantize(weight, scheme, generator)
            quantized |= {f"{path}.{name}": each.contiguous() for name, each in parts.items()}
            plain[key] = exact
        else:
            quantized[key] = plain[key] = weight
    reference = directory.with_name(f"{directory.name}-float32")
    for target, tensors in ((directory, quantized), (reference, plain)):
        shutil.copytree(model, target)
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": scheme.config}))
    return reference


def quantize(weight: torch.Tensor, scheme: Scheme, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    """The tensors that stand for a weight, and the weight that they stand for, in float32."""
    num_out, num_in = weight.shape
    size = num_in if scheme.group == -1 else scheme.group
    groups = torch.arange(num_in) // size
    if scheme.shuffled:
        groups = groups[torch.randperm(num_in, generator=generator)]
    levels = 2**scheme.bits
    shape = (int(groups.max()) + 1, num_out)
    spread = 3.0 * weight.std() / (levels / 2)
    scales = (spread * (0.7 + 0.6 * torch.rand(shape, generator=generator))).to(scheme.scale_type)
    zeros = torch.full(shape, levels // 2)
    if not scheme.symmetric:
        zeros = torch.randint(0, levels, shape, generator=generator)
    steps = weight.t() / scales.float()[groups]
    codes = (steps.round() + zeros[groups]).clamp(0, levels - 1).long()  # [num_in, num_out]
    exact = ((codes - zeros[groups]).float() * scales.float()[groups]).t().contiguous()
    return _PACKERS[scheme.method](codes, zeros, scales, groups, scheme), exact


def pack_words(codes: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Packs the last axis of unsigned codes into words of 32 bits. `order`: a word's codes, from the lowest bits on."""
    per_word = 32 // bits
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % per_word))
    words = np.zeros((*padded.shape[:-1], padded.shape[-1] // per_word), np.uint32)
    for place, index in enumerate(order or range(per_word)):
        words |= padded[..., index::per_word].numpy().astype(np.uint32) << np.uint32(bits * place)
    return torch.from_numpy(words.view(np.int32))


def _pack_gptq(codes: Any, zeros: Any, scales: Any, groups: Any, scheme: Scheme) -> Tensors:
    stored = (zeros - int(scheme.version == "gptq")) % 2**scheme.bits
    return {
        "qweight": pack_words(codes.t(), scheme.bits).t(),
        "qzeros": pack_words(stored, scheme.bits),
        "scales": scales,
        "g_idx": groups.int(),
    }


def _pack_awq(codes: Any, zeros: Any, scales: Any, groups: Any, scheme: Scheme) -> Tensors:
    packed = (pack_words(each, 4, AWQ_ORDER) for each in (codes, zeros))
    return dict(zip(("qweight", "qzeros", "scales"), (*packed, scales), strict=True))


def _pack_compressed(codes: Any, zeros: Any, scales: Any, groups: Any, scheme: Scheme) -> Tensors:
    parts = {
        "weight_packed": pack_words(codes.t(), scheme.bits),
        "weight_shape": torch.tensor(tuple(codes.t().shape)),
        "weight_scale": scales.t(),
    }
    if not scheme.symmetric:
        parts["weight_zero_point"] = pack_words(zeros, scheme.bits).t()
    return parts | ({"weight_g_idx": groups.int()} if scheme.shuffled else {})


def _pack_plain(codes: Any, zeros: Any, scales: Any, groups: Any, scheme: Scheme) -> Tensors:
    parts = {"weight": (codes.t() - 128).to(torch.int8), "weight_scale": scales.t()}
    return parts if scheme.symmetric else parts | {"weight_zero_point": (zeros.t() - 128).to(torch.int8)}


_PACKERS: dict[str, Any] = {
    "gptq": _pack_gptq,
    "awq": _pack_awq,
    "pack-quantized": _pack_compressed,
    "int-quantized": _pack_plain,
    "naive-quantized": _pack_plain,
}


def schemes() -> Iterator[Scheme]:
    """Every format, group size and number of bits that is served, and combinations."""
    bfloat16, float32 = torch.bfloat16, torch.float32
    for bits in (4, 8):
        yield Scheme(bits=bits, group=-1)
        yield Scheme(bits=bits, group=64, symmetric=False)
        yield Scheme(bits=bits, group=32, shuffled=True, symmetric=False)
        yield Scheme("pack-quantized", bits, 32, scale_type=bfloat16)
        yield Scheme("pack-quantized", bits, -1, symmetric=False)
    yield Scheme(group=128, head=True)  # the last group of 192 inputs has 64
    yield Scheme(version="gptq_v2", symmetric=False, scale_type=float32)
    yield Scheme("awq", group=32, symmetric=False)
    yield Scheme("awq", group=64, symmetric=False, head=True)
    yield Scheme("awq", group=-1)
    yield Scheme("pack-quantized", 4, 64, shuffled=True, scale_type=bfloat16)
    yield Scheme("int-quantized", 8, -1, scale_type=float32, head=True)
    yield Scheme("naive-quantized", 8, 64, symmetric=False, scale_type=bfloat16)
