"""A request's tokens and log-probabilities are the same bits, however it is scheduled, stored and computed.

Sampled at temperature 1 over the whole vocabulary, so that the last bit of a logit may decide.
"""

from __future__ import annotations

import platform
import random
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from kvrelay import LLM, SamplingParams
from kvrelay.backends.cpu_build import load_kernel
from tests.tiny_models import VOCAB_SIZE, build_model

pytestmark = pytest.mark.component
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
LONGEST = 900
GRAMMAR = {"regex": "(the quick brown fox [0-9a-f]{1,9} ){9}"}
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
    "forced tokens sampled": {"jump_forward": False},
}
TYPES = [("float32", "auto", "none"), ("bfloat16", "auto", "none"), ("bfloat16", "fp8_e4m3", "none")]
TYPES += [("bfloat16", "auto", "int8"), ("float32", "auto", "int4")]
CASES = [(family, kinds) for family in FAMILIES for kinds in TYPES] + [("gemma3", TYPES[0])]  # the last: by modules


def prompts() -> list[list[int]]:
    """Some begin alike, one crosses the position at which attention begins anew."""
    rng = random.Random(4)
    start = rng.choices(range(1, VOCAB_SIZE - 5), k=60)
    made = [rng.choices(range(1, VOCAB_SIZE - 5), k=length) for length in (1, 17, 130, 500, 40)]
    return made + [start + rng.choices(range(1, VOCAB_SIZE - 5), k=length) for length in (3, 30, 90)]


def sampled(llm: LLM, asked: list[list[int]], max_tokens: int) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probabilities of outputs. Every fourth has a grammar, which forces some of its tokens."""
    free: dict[str, Any] = {"temperature": 1.0, "max_tokens": max_tokens, "ignore_eos": True, "logprobs": 0}
    constrained = free | {"structured_outputs": GRAMMAR}
    params = [SamplingParams(seed=seed, **(free if seed % 4 < 3 else constrained)) for seed in range(len(asked))]
    outputs = [output.outputs[0] for output in llm.generate(asked, params)]
    return [(list(each.token_ids), [entry.logprob for entry in each.logprobs]) for each in outputs]


def answers(model: Path, kinds: tuple[str, str, str], **settings: Any) -> list[Any]:
    """Outputs, which the same tokens as a prompt repeat, and those of a turn that follows them."""
    dtype, kv_cache_dtype, quantization = kinds
    values = {**ROOMY, "dtype": dtype, "kv_cache_dtype": kv_cache_dtype, "quantization": quantization} | settings
    with LLM(str(model), **values) as llm:
        found = sampled(llm, prompts(), 40)
        whole = [prompt + tokens for prompt, (tokens, _) in zip(prompts(), found, strict=True)]
        next_turn = sampled(llm, [[*tokens, 7, 8, 9] for tokens in whole], 8)  # upon what decoding left in the cache
        again = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        scored = [output.prompt_logprobs for output in llm.generate(whole, again)]
    for (tokens, logprobs), every in zip(found, scored, strict=True):
        assert [entry.logprob for entry in every[-len(tokens) :]] == logprobs
    return [found, next_turn]


@pytest.mark.everyday(4)
@pytest.mark.parametrize(("family", "kinds"), CASES, ids=lambda each: each if isinstance(each, str) else "-".join(each))
def test_every_way_gives_the_same_bits(family: str, kinds: tuple[str, str, str], tmp_path: Path) -> None:
    if load_kernel().kvrelay_tiles() and kinds[0] == "bfloat16":
        pytest.skip("by AMX prompts and decoding differ")
    check_ways(build_model(family, tmp_path), kinds, WAYS)


def check_ways(model: Path, kinds: tuple[str, str, str], ways: Iterable[str], **settings: Any) -> None:
    usual = answers(model, kinds, **settings)
    for name in ways:
        assert answers(model, kinds, **settings, **WAYS[name]) == usual, name


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the instructions are those of x86-64")
@pytest.mark.parametrize("without", ["-mno-avx512bf16", "-mno-avx512f"])
def test_kernels_of_older_instructions_hold_it_too(without: str, tmp_path: Path) -> None:
    model = build_model("qwen3", tmp_path)
    script = f"""
from pathlib import Path
from kvrelay.backends import cpu_build
cpu_build._FLAGS += ({without!r},)
from tests.component.embedded.test_same_bits import TYPES, check_ways
for kinds in TYPES:
    check_ways(Path({str(model)!r}), kinds, ["small chunks", "one thread", "without a cache"])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.everyday(1)
@pytest.mark.parametrize("kinds", TYPES[:2], ids="-".join)
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_give_the_same_bits_in_every_way(kinds: tuple[str, str, str], size: int, tmp_path: Path) -> None:
    if load_kernel().kvrelay_tiles() and kinds[0] == "bfloat16":
        pytest.skip("by AMX prompts and decoding differ")
    divided = {"tensor_parallel_size": size, "threads": 1}
    check_ways(build_model("qwen3", tmp_path), kinds, ["small chunks", "preempted and computed again"], **divided)
