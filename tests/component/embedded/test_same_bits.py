"""A request's tokens and log-probabilities are the same bits, however it is scheduled, stored and computed.

Sampled at temperature 1 over the whole vocabulary, so that the last bit of a logit may decide.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from kvrelay import LLM, SamplingParams
from kvrelay.backends.cpu_build import load_kernel
from tests.tiny_models import VOCAB_SIZE, build_model

pytestmark = pytest.mark.component
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
LONGEST = 900
ROOMY: dict[str, Any] = {"threads": 2, "num_blocks": 400, "max_model_len": LONGEST, "max_running": 16}
WAYS: dict[str, dict[str, Any]] = {
    "one at a time": {"max_running": 1},
    "small chunks": {"token_budget": 16},
    "one thread": {"threads": 1},
    "larger blocks": {"block_size": 32, "num_blocks": 200},
    "preempted and computed again": {"num_blocks": 64},
    "preempted and swapped": {"num_blocks": 64, "preemption": "swap", "swap_space": "64MiB"},
    "without a cache": {"prefix_cache": False},
    "with drafts": {"speculation": "ngram"},
}
TYPES = [("float32", "auto", "none"), ("bfloat16", "auto", "none"), ("bfloat16", "fp8_e4m3", "none")]
TYPES += [("bfloat16", "auto", "int8"), ("float32", "auto", "int4")]


def prompts() -> list[list[int]]:
    """Some begin alike, one crosses the position at which attention begins anew."""
    rng = random.Random(4)
    start = rng.choices(range(1, VOCAB_SIZE - 5), k=60)
    made = [rng.choices(range(1, VOCAB_SIZE - 5), k=length) for length in (1, 17, 130, 500, 40)]
    return made + [start + rng.choices(range(1, VOCAB_SIZE - 5), k=length) for length in (3, 30, 90)]


def answers(model: Path, kinds: tuple[str, str, str], **settings: Any) -> list[Any]:
    """Tokens and log-probabilities of outputs, and of the same tokens in a prompt."""
    dtype, kv_cache_dtype, quantization = kinds
    values = {**ROOMY, "dtype": dtype, "kv_cache_dtype": kv_cache_dtype, "quantization": quantization} | settings
    params = [
        SamplingParams(temperature=1.0, seed=seed, max_tokens=40, ignore_eos=True, logprobs=0)
        for seed in range(len(prompts()))
    ]
    with LLM(str(model), **values) as llm:
        outputs = [output.outputs[0] for output in llm.generate(prompts(), params)]
        found = [(list(each.token_ids), [entry.logprob for entry in each.logprobs]) for each in outputs]
        again = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        whole = [prompt + tokens for prompt, (tokens, _) in zip(prompts(), found, strict=True)]
        scored = [output.prompt_logprobs[-40:] for output in llm.generate(whole, again)]
    assert [[entry.logprob for entry in each] for each in scored] == [logprobs for _, logprobs in found]
    return found


@pytest.mark.everyday(4)
@pytest.mark.parametrize("kinds", TYPES, ids="-".join)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_way_gives_the_same_bits(family: str, kinds: tuple[str, str, str], tmp_path: Path) -> None:
    if load_kernel().kvrelay_tiles() and kinds[0] == "bfloat16":
        pytest.skip("by AMX prompts and decoding differ")
    model = build_model(family, tmp_path)
    usual = answers(model, kinds)
    for name, settings in WAYS.items():
        assert answers(model, kinds, **settings) == usual, name
