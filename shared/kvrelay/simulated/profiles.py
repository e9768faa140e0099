"""What a step and a transfer take on a device: built-in roofline profiles, or measured coefficients from a JSON file.

A roofline step takes as long as the slower of two: its arithmetic, and reading weights and K/V from memory, plus a
fixed overhead. The peaks are the vendors' data sheets' (dense, 16-bit), the models' shapes their published
configurations; what share of a peak is reached, and the overhead, are assumptions, named below. They are there to
compare policies and ratios; for figures about a machine, measure a profile on it.

Sources: NVIDIA H100 SXM data sheet (989 TFLOP/s, 3.35 TB/s, 80 GB), H200 SXM (989 TFLOP/s, 4.8 TB/s, 141 GB), A100
80GB SXM (312 TFLOP/s, 2.039 TB/s), L40S (362 TFLOP/s, 864 GB/s, 48 GB); Llama 3 8B and 70B and Qwen3 32B: the
config.json of their releases (32, 80 and 64 layers, 8 K/V heads of 128, 32, 64 and 64 query heads; 8.03, 70.6 and 32.8
billion parameters). Links: ConnectX-7 at 400 Gbit/s beside an H100 or H200, ConnectX-6 at 200 beside an A100, 100
Gbit/s beside an L40S.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Protocol

import msgspec

from kvrelay.scheduling.step_cost import pairs

REACHED_FLOPS = 0.5  # share of the peak that prefill reaches
REACHED_BANDWIDTH = 0.8  # share of the peak that decode reads at
REACHED_LINK = 0.8
STEP_OVERHEAD_S = 2e-3  # scheduling, launches, sampling
SPLIT_OVERHEAD_S = 2e-3  # of tensor parallelism, a step
MEMORY_SHARE = 0.9  # of the device's memory, for weights and K/V


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What a step holds. Pairs: of a prompt token and what it attends to. Context: K/V that its decodes read."""

    num_prompt_tokens: int
    num_pairs: float
    num_decodes: int
    context_tokens: int

    @classmethod
    def of(cls, rows: Iterable[tuple[int, int, bool]]) -> StepLoad:
        """Of a step's rows: position, tokens, whether it is a part of a prompt."""
        num_prompt, num_pairs, num_decodes, context = 0, 0.0, 0, 0
        for position, num_tokens, is_prefill in rows:
            if is_prefill:
                num_prompt += num_tokens
                num_pairs += pairs(position, num_tokens)
            else:
                num_decodes += 1
                context += position
        return cls(num_prompt, num_pairs, num_decodes, context)


class Profile(Protocol):
    """One worker's devices with a model."""

    @property
    def name(self) -> str:
        """As `--profile` takes it."""
        ...

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of all layers."""
        ...

    @property
    def kv_tokens(self) -> int:
        """That its pool holds."""
        ...

    @property
    def transfer_bytes_s(self) -> float:
        """Of its link."""
        ...

    @property
    def num_devices(self) -> int:
        """Of one worker."""
        ...

    def step_s(self, load: StepLoad) -> float:
        """A step's time."""
        ...


@dataclass(frozen=True, slots=True)
class Device:
    """Peaks of one accelerator."""

    name: str
    flops: float
    bandwidth: float  # bytes a second
    memory_bytes: float
    link_bytes_s: float


@dataclass(frozen=True, slots=True)
class Model:
    """Shape of a decoder in 16-bit."""

    name: str
    num_params: float
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of all layers."""
        return 2 * 2 * self.num_layers * self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Roofline:
    """A model on one or more devices (tensor parallel)."""

    model: Model
    device: Device
    num_devices: int = 1

    @property
    def name(self) -> str:
        """As `--profile` takes it."""
        split = f"-tp{self.num_devices}" if self.num_devices > 1 else ""
        return f"{self.model.name}-{self.device.name}{split}"

    @property
    def kv_bytes_per_token(self) -> int:
        return self.model.kv_bytes_per_token

    @property
    def kv_tokens(self) -> int:
        """What the weights leave."""
        free = MEMORY_SHARE * self.device.memory_bytes * self.num_devices - 2 * self.model.num_params
        return int(free // self.kv_bytes_per_token)

    @property
    def transfer_bytes_s(self) -> float:
        return REACHED_LINK * self.device.link_bytes_s * self.num_devices

    def step_s(self, load: StepLoad) -> float:
        """The slower of arithmetic and memory."""
        model, device = self.model, self.device
        num_tokens = load.num_prompt_tokens + load.num_decodes
        attended = load.num_pairs + load.context_tokens
        flops = 2 * model.num_params * num_tokens
        flops += 4 * model.num_layers * model.num_heads * model.head_dim * attended
        read = 2 * model.num_params + model.kv_bytes_per_token * load.context_tokens
        arithmetic_s = flops / (REACHED_FLOPS * device.flops * self.num_devices)
        memory_s = read / (REACHED_BANDWIDTH * device.bandwidth * self.num_devices)
        overhead_s = STEP_OVERHEAD_S + (SPLIT_OVERHEAD_S if self.num_devices > 1 else 0.0)
        return max(arithmetic_s, memory_s) + overhead_s


class MeasuredProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Coefficients of a measured machine, as `kvrelay measure` writes them. Seconds a step, a token, a pair of a token
    and what it attends to, and a sequence that decodes (its token, its sampling; None: as a token of a prompt)."""

    name: str
    fixed_s: Annotated[float, msgspec.Meta(ge=0)]
    token_s: Annotated[float, msgspec.Meta(ge=0)]
    pair_s: Annotated[float, msgspec.Meta(ge=0)]
    decode_s: Annotated[float, msgspec.Meta(ge=0)] | None = None
    kv_bytes_per_token: Annotated[int, msgspec.Meta(ge=1)]
    kv_tokens: Annotated[int, msgspec.Meta(ge=1)]
    transfer_bytes_s: Annotated[float, msgspec.Meta(gt=0)]
    num_devices: Annotated[int, msgspec.Meta(ge=1)] = 1

    def step_s(self, load: StepLoad) -> float:
        """Linear."""
        decode_s = self.token_s if self.decode_s is None else self.decode_s
        own_s = self.token_s * load.num_prompt_tokens + decode_s * load.num_decodes
        return self.fixed_s + own_s + self.pair_s * (load.num_pairs + load.context_tokens)


class UnknownProfile(ValueError):
    """Neither a built-in name nor a file with a profile; the text says which there are."""


_H100 = Device("h100", 989e12, 3.35e12, 80e9, 50e9)
_H200 = Device("h200", 989e12, 4.8e12, 141e9, 50e9)
_A100 = Device("a100", 312e12, 2.039e12, 80e9, 25e9)
_L40S = Device("l40s", 362e12, 864e9, 48e9, 12.5e9)
_8B = Model("llama3-8b", 8.03e9, 32, 32, 8, 128)
_70B = Model("llama3-70b", 70.6e9, 80, 64, 8, 128)
_32B = Model("qwen3-32b", 32.8e9, 64, 64, 8, 128)
BUILT_IN: dict[str, Profile] = {
    profile.name: profile
    for profile in (
        Roofline(_8B, _H100),
        Roofline(_8B, _H200),
        Roofline(_8B, _A100),
        Roofline(_8B, _L40S),
        Roofline(_32B, _H100, 2),
        Roofline(_70B, _H100, 4),
        Roofline(_70B, _H200, 2),
        Roofline(_70B, _A100, 4),
    )
}


def find_profile(name: str) -> Profile:
    """A built-in profile by its name, or one from a JSON file. Raises UnknownProfile."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    if not Path(name).is_file():
        raise UnknownProfile(f"must be one of {', '.join(BUILT_IN)}, or a JSON file")
    try:
        return msgspec.json.decode(Path(name).read_bytes(), type=MeasuredProfile)
    except (msgspec.DecodeError, OSError) as error:
        raise UnknownProfile(f"{name} is no profile: {error}") from error
