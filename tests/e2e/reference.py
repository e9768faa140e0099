"""What `transformers` itself gives, in float32."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

torch.set_num_threads(1)  # beside the services under test


@cache
def load(model: Path) -> Any:
    """The model with transformers' own attention."""
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


@torch.inference_mode()
def greedy(model: Path, prompt: list[int], max_tokens: int, *, ignore_eos: bool = True) -> list[int]:
    reference = load(model)
    end = None if ignore_eos else reference.generation_config.eos_token_id
    output = reference.generate(
        torch.tensor([prompt]), max_new_tokens=max_tokens, do_sample=False, eos_token_id=end, pad_token_id=0
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


@torch.inference_mode()
def logprobs(model: Path, tokens: list[int], num_prompt: int) -> torch.Tensor:
    """Log-probabilities of every possible token at the positions after the prompt: [len(tokens) - num_prompt, V]."""
    logits = load(model)(torch.tensor([tokens])).logits[0, num_prompt - 1 : -1]
    return torch.log_softmax(logits.float(), dim=-1)


def vocab_size(model: Path) -> int:
    size: int = load(model).config.vocab_size
    return size


def check_logprobs(model: Path, prompt: list[int], choice: dict[str, Any]) -> None:
    """The chosen token's and the best tokens' log-probabilities agree to 1e-4."""
    tokens = choice["token_ids"]
    expected = logprobs(model, prompt + tokens, len(prompt))
    given = choice["logprobs"]
    for row, (token_id, logprob, top) in enumerate(
        zip(tokens, given["token_logprobs"], given["top_logprobs"], strict=True)
    ):
        assert abs(logprob - float(expected[row, token_id])) < 1e-4
        # The legacy format is keyed by text, and several tokens may have the same one: then the last of them stands.
        best = torch.topk(expected[row], 5).values.tolist()
        assert top and all(min(abs(value - b) for b in [*best, logprob]) < 1e-4 for value in top.values())
