"""Times of steps and transfers on a device: built-in rooflines, or measured coefficients from a JSON file.

A roofline step takes the longer of its compute time and its memory time (weights and KV), plus a fixed overhead. Peaks
are from vendors' data sheets (dense, 16-bit), shapes from the models' published configurations. The share of each peak
and the overhead are assumptions, named below. Use rooflines to compare policies and ratios; for figures of a machine,
measure it.

Tensor parallelism divides arithmetic, weights and KV heads among devices. A pipeline divides layers among stages: a
step takes as long as on one stage's devices, plus the time of hidden states between stages, and as many steps are in
flight.

Sources: NVIDIA H100 SXM data sheet (989 TFLOP/s, 3.35 TB/s, 80 GB), H200 SXM (989 TFLOP/s, 4.8 TB/s, 141 GB), A100 80GB
SXM (312 TFLOP/s, 2.039 TB/s), L40S (362 TFLOP/s, 864 GB/s, 48 GB); Llama 3 8B and 70B and Qwen3 32B: the config.json of
their releases (32, 80 and 64 layers, 8 KV heads of 128, 32, 64 and 64 query heads; 8.03, 70.6 and 32.8 billion
parameters). Links: ConnectX-7 at 400 Gbit/s beside an H100 or H200, ConnectX-6 at 200 beside an A100, 100 Gbit/s beside
an L40S.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

REACHED_FLOPS = 0.5  # share of peak arithmetic that prefill reaches
REACHED_BANDWIDTH = 0.8  # share of peak bandwidth that decode reaches
REACHED_LINK = 0.8
STEP_OVERHEAD_S = 2e-3  # scheduling, launches, sampling
SPLIT_OVERHEAD_S = 2e-3  # per step, for tensor parallelism
HOP_OVERHEAD_S = 1e-4  # per message of hidden states from a stage to the next one
MEMORY_SHARE = 0.9  # share of memory for weights and KV


@dataclass(frozen=True, slots=True)
class StepLoad:
    """Contents of a step. A pair is a prompt token and a token it attends to; context is the KV that decodes read."""

    num_prompt_tokens: int
    num_pairs: float
    num_decodes: int
    context_tokens: int

    @classmethod
    def of(cls, rows: Iterable[tuple[int, int, bool]]) -> StepLoad:
        """Sums rows of (position, tokens, whether it is a prompt chunk)."""
        num_prompt, num_pairs, num_decodes, context = 0, 0.0, 0, 0
        for position, num_tokens, is_prefill in rows:
            if is_prefill:
                num_prompt += num_tokens
                num_pairs += num_tokens * (position + num_tokens / 2)
            else:
                num_decodes += 1
                context += position
        return cls(num_prompt, num_pairs, num_decodes, context)


@dataclass(frozen=True, slots=True)
class Device:
    """Peaks of one accelerator in FLOP/s, bytes/s and bytes."""

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
        """Bytes of KV per token in all layers."""
        return 2 * 2 * self.num_layers * self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Roofline:
    """A model on one or more devices: `pipeline_depth` of `stage_size` devices each, which divide a stage's heads."""

    model: Model
    device: Device
    stage_size: int = 1
    pipeline_depth: int = 1

    @property
    def name(self) -> str:
        heads = f"-tp{self.stage_size}" if self.stage_size > 1 else ""
        layers = f"-pp{self.pipeline_depth}" if self.pipeline_depth > 1 else ""
        return f"{self.model.name}-{self.device.name}{heads}{layers}"

    @property
    def num_devices(self) -> int:
        return self.stage_size * self.pipeline_depth

    @property
    def kv_bytes_per_token(self) -> int:
        return self.model.kv_bytes_per_token

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV fits into the memory that the weights leave."""
        free = MEMORY_SHARE * self.device.memory_bytes * self.num_devices - 2 * self.model.num_params
        copies = max(1, self.stage_size // self.model.num_kv_heads)  # per head, if there are more devices
        return max(0, int(free // (copies * self.kv_bytes_per_token)))

    @property
    def transfer_bytes_s(self) -> float:
        return REACHED_LINK * self.device.link_bytes_s * self.num_devices

    def step_s(self, load: StepLoad) -> float:
        """Seconds of the slower of arithmetic and memory, plus overhead. A stage's part of the model is on its own
        devices, so only these count for each."""
        model, device = self.model, self.device
        num_tokens = load.num_prompt_tokens + load.num_decodes
        attended = load.num_pairs + load.context_tokens
        flops = 2 * model.num_params * num_tokens
        flops += 4 * model.num_layers * model.num_heads * model.head_dim * attended
        read = 2 * model.num_params + model.kv_bytes_per_token * load.context_tokens
        arithmetic_s = flops / (REACHED_FLOPS * device.flops * self.stage_size)
        memory_s = read / (REACHED_BANDWIDTH * device.bandwidth * self.stage_size)
        overhead_s = STEP_OVERHEAD_S + (SPLIT_OVERHEAD_S if self.stage_size > 1 else 0.0)
        return max(arithmetic_s, memory_s) + overhead_s + (self.pipeline_depth - 1) * self._hop_s(num_tokens)

    def _hop_s(self, num_tokens: int) -> float:
        """Seconds that 16-bit hidden states take from a stage to the next one."""
        hidden_bytes = 2 * self.model.num_heads * self.model.head_dim * num_tokens
        return HOP_OVERHEAD_S + hidden_bytes / (REACHED_LINK * self.device.link_bytes_s)


class MeasuredProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Coefficients that `kvrelay measure` wrote: seconds per step, per token, per pair of a token and an attended
    token, and per decoding sequence (None: as a token of a prompt)."""

    name: str
    fixed_s: Annotated[float, msgspec.Meta(ge=0)]
    token_s: Annotated[float, msgspec.Meta(ge=0)]
    pair_s: Annotated[float, msgspec.Meta(ge=0)]
    decode_s: Annotated[float, msgspec.Meta(ge=0)] | None = None
    kv_bytes_per_token: Annotated[int, msgspec.Meta(ge=1)]
    kv_tokens: Annotated[int, msgspec.Meta(ge=1)]
    transfer_bytes_s: Annotated[float, msgspec.Meta(gt=0)]
    num_devices: Annotated[int, msgspec.Meta(ge=1)] = 1
    pipeline_depth: Annotated[int, msgspec.Meta(ge=1)] = 1

    def step_s(self, load: StepLoad) -> float:
        """Seconds of a step, linear in the load."""
        decode_s = self.token_s if self.decode_s is None else self.decode_s
        own_s = self.token_s * load.num_prompt_tokens + decode_s * load.num_decodes
        return self.fixed_s + own_s + self.pair_s * (load.num_pairs + load.context_tokens)


Profile = Roofline | MeasuredProfile
"""The devices of one worker with a model. `num_devices` are those of all stages, which compute different steps at the
same time; `kv_tokens` fit the pool, `kv_bytes_per_token` counts all layers, and `transfer_bytes_s` is the link's speed.
`step_s` is the time of a step through all stages, of which each takes an equal part."""


class UnknownProfile(ValueError):
    """No built-in profile, no model on a device that holds it, and no valid profile file. The message lists the
    built-in names, or says what does not fit."""


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


_MODELS = {model.name: model for model in (_8B, _70B, _32B)}
DEVICES = {device.name: device for device in (_H100, _H200, _A100, _L40S)}
_ROOFLINE = re.compile(rf"({'|'.join(_MODELS)})-({'|'.join(DEVICES)})(?:-tp([1-9]\d?))?(?:-pp([1-9]\d?))?")


def find_profile(name: str) -> Profile:
    """Finds a built-in profile by name, one of their models on other numbers of devices (`MODEL-DEVICE-tpN-ppM`), or
    reads a JSON file. Raises UnknownProfile."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    if (found := _ROOFLINE.fullmatch(name)) is not None:
        model, device, size, stages = found.groups(default="1")
        return _fitting(Roofline(_MODELS[model], DEVICES[device], int(size), int(stages)))
    if not Path(name).is_file():
        raise UnknownProfile(
            f"must be one of {', '.join(BUILT_IN)}, one of these models on one of these devices as in "
            f"llama3-70b-h100-tp4-pp2, or a JSON file"
        )
    try:
        return msgspec.json.decode(Path(name).read_bytes(), type=MeasuredProfile)
    except (msgspec.DecodeError, OSError) as error:
        raise UnknownProfile(f"{name} is no profile: {error}") from error


def _fitting(profile: Roofline) -> Roofline:
    """Raises UnknownProfile if heads or layers do not divide, or the weights do not fit."""
    model, size = profile.model, profile.stage_size
    if model.num_heads % size or (model.num_kv_heads % size and size % model.num_kv_heads):
        raise UnknownProfile(
            f"{model.name} has {model.num_heads} query heads and {model.num_kv_heads} KV heads, which do not divide "
            f"among {size} devices"
        )
    if profile.pipeline_depth > model.num_layers:
        raise UnknownProfile(f"{model.name} has {model.num_layers} layers, too few for {profile.pipeline_depth} stages")
    if not profile.kv_tokens:
        raise UnknownProfile(
            f"the weights of {model.name} ({2e-9 * model.num_params:.0f} GB) leave no memory for KV on "
            f"{profile.num_devices} {profile.device.name} (add -tpN or -ppN)"
        )
    return profile


class PipelineClock:
    """Steps go through all stages in order, one at a time on each. With one stage, they follow each other."""

    def __init__(self, pipeline_depth: int) -> None:
        self._free_s = [0.0] * pipeline_depth

    @property
    def free_s(self) -> float:
        """Returns the time at which the first stage has computed the last step that entered."""
        return self._free_s[0]

    def enter(self, now_s: float, stage_s: float) -> float:
        """A step enters that takes `stage_s` on each stage. Returns when the last stage has computed it."""
        at_s = now_s
        for stage, free_s in enumerate(self._free_s):
            at_s = self._free_s[stage] = max(at_s, free_s) + stage_s
        return at_s
