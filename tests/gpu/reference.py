"""What transformers itself makes of the same weights on the same device, and how far logits may be from it."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from kvrelay.backends.backend import AttentionBackend, PackedRows, allocate_pool
from kvrelay.backends.flashinfer import FlashInferBackend
from kvrelay.engine.load.causal_model import CausalModel
from kvrelay.kv.table import blocks_for
from tests.fakes import fake_flashinfer

_ROUNDINGS_PER_LAYER = 12
# Two norms, q/k/v, rotation, attention, its projection, gate/up, activation, their product, down, two sums.
_MARGIN = 4.0


def prompts(count: int, longest: int, seed: int = 0) -> list[list[int]]:
    """Random prompts of 1 to `longest` tokens; the last one is the longest."""
    rng = random.Random(seed)
    lengths = [*(rng.randint(1, longest) for _ in range(count - 1)), longest]
    return [rng.choices(range(4, 250), k=length) for length in lengths]


def read_model(directory: Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """transformers' own model, with the attention that it chooses. In some releases its SDPA leaves out soft caps."""
    capped = getattr(AutoConfig.from_pretrained(directory), "attn_logit_softcapping", None)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation="eager" if capped else None
    )
    model.to(device).eval()  # type: ignore[arg-type]
    return model


@torch.inference_mode()
def greedy(model: PreTrainedModel, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """The continuation, whatever the stop tokens."""
    input_ids = torch.tensor([list(prompt)], device=model.device)
    output = model.generate(  # type: ignore[operator]
        input_ids, max_new_tokens=max_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


@torch.inference_mode()
def own_logits(model: PreTrainedModel, prompt: Sequence[int]) -> torch.Tensor:
    """Logits after each token, `[tokens, vocab]`, as float32 on the CPU."""
    input_ids = torch.tensor([list(prompt)], device=model.device)
    logits: torch.Tensor = model(input_ids=input_ids, use_cache=False).logits[0]
    return logits.float().cpu()


def paged_logits(model: CausalModel, prompts: Sequence[Sequence[int]], seed: int = 0) -> list[torch.Tensor]:
    """As `own_logits`, by steps that mix random chunks and single tokens of the prompts, over scattered blocks."""
    rng = np.random.default_rng(seed)
    device, block_size = model.source.device, model.layout.block_size
    counts = [blocks_for(len(prompt), block_size) for prompt in prompts]
    order = rng.permutation(sum(counts)).astype(np.int32)
    tables = np.split(order, np.cumsum(counts)[:-1])
    pool = allocate_pool(model.layout, sum(counts), device)
    done = [0] * len(prompts)
    parts: list[list[torch.Tensor]] = [[] for _ in prompts]
    while any(done[row] < len(prompt) for row, prompt in enumerate(prompts)):
        waiting = [row for row, prompt in enumerate(prompts) if done[row] < len(prompt)]
        lengths = [min(int(rng.choice([1, 1, 7, 40])), len(prompts[row]) - done[row]) for row in waiting]
        padded = np.zeros((len(waiting), max(counts)), np.int32)
        for index, row in enumerate(waiting):
            padded[index, : counts[row]] = tables[row]
        rows = PackedRows(np.array(lengths, np.int32), np.array([done[row] for row in waiting], np.int32), padded)
        tokens = [prompts[row][done[row] : done[row] + n] for row, n in zip(waiting, lengths, strict=True)]
        token_ids = torch.tensor(np.concatenate(tokens).astype(np.int64), device=device)
        positions = torch.tensor(rows.token_positions.astype(np.int64), device=device)
        hidden = model.hidden_states(token_ids, positions, model.backend.plan(pool, rows))
        for row, part in zip(waiting, model.logits(hidden).float().cpu().split(lengths), strict=True):
            parts[row].append(part)
            done[row] += len(part)
    return [torch.cat(each) for each in parts]


def sixteen_bit_backend(device: torch.device) -> AttentionBackend:
    """FlashInfer; on the CPU its kernels as documented, written out."""
    return FlashInferBackend(device, fake_flashinfer if device.type == "cpu" else None)


@dataclass(frozen=True)
class LogitErrors:
    """Relative to the reference, norm by norm: the mean over all positions, and the worst one."""

    mean: float
    worst: float


def errors(got: Sequence[torch.Tensor], reference: Sequence[torch.Tensor]) -> LogitErrors:
    """Of logits `[tokens, vocab]` of several prompts."""
    each = torch.cat([(a - b).norm(dim=-1) / b.norm(dim=-1) for a, b in zip(got, reference, strict=True)])
    return LogitErrors(each.mean().item(), each.max().item())


def bfloat16_tolerance(num_layers: int) -> float:
    """The mean relative error of bfloat16 logits that rounding explains.

    A number is rounded by at most 2^-9 of itself. Roundings are independent, so n of them add up to 2^-9 sqrt(n):
    twelve a layer, and the last norm and the head. Four times that covers what layers amplify; a wrong mask, scale or
    block gives errors near 1.
    """
    return float(_MARGIN * 2**-9 * math.sqrt(_ROUNDINGS_PER_LAYER * num_layers + 2))
