"""Greedy outputs of transformers' own generate, for comparison."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel


def load_reference(path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")


def generate(model: PreTrainedModel, prompt: list[int], num_output: int) -> list[int]:
    tokens = torch.tensor([prompt])
    out = model.generate(  # type: ignore[operator]
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=num_output,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    tokens_out: list[int] = out[0, len(prompt) :].tolist()
    return tokens_out
