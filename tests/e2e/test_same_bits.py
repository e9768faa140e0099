"""Tokens and log-probabilities through the full handoff are, bit for bit, those of one undisturbed process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvrelay import LLM, SamplingParams
from tests.e2e.prompts import prompt_of
from tests.fakes.stack import Stack
from tests.faults.storm.processes import usual_dtype
from tests.tiny_models import VOCAB_SIZE

pytestmark = pytest.mark.e2e
NUM_OUTPUT = 20
CASES = [("float32", "fp8_e4m3", "auto"), ("", "auto", "zmq"), ("", "auto", "nixl")]


@pytest.mark.everyday(1)
@pytest.mark.parametrize(("dtype", "kv_cache_dtype", "transfer"), CASES)
def test_bits_are_those_of_one_process(
    dtype: str, kv_cache_dtype: str, transfer: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    dtype, model = dtype or usual_dtype(), tiny_model("mistral")
    prompts = [prompt_of(length, VOCAB_SIZE) for length in (1, 16, 17, 130, 200)]
    with LLM(str(model), dtype=dtype, kv_cache_dtype=kv_cache_dtype, num_blocks=64) as llm:
        params = [
            SamplingParams(temperature=1, seed=seed, logprobs=0, max_tokens=NUM_OUTPUT, ignore_eos=True)
            for seed in range(len(prompts))
        ]
        alone = [llm.generate([prompt], each)[0].outputs[0] for prompt, each in zip(prompts, params, strict=True)]
    flags = ("--dtype", dtype, "--kv-cache-dtype", kv_cache_dtype, "--transfer", transfer, "--transfer-checksums")
    with Stack(model, tmp_path, *flags, "--token-budget", "48", "--max-running", "32", "--num-blocks", "300") as stack:
        for _ in range(2):  # the second time with what was cached
            for seed, (prompt, expected) in enumerate(zip(prompts, alone, strict=True)):
                asked = {"temperature": 1, "seed": seed, "logprobs": 0, "ignore_eos": True}
                given = stack.complete(prompt, NUM_OUTPUT, **asked)
                assert given["token_ids"] == list(expected.token_ids)
                assert given["logprobs"]["token_logprobs"] == [entry.logprob for entry in expected.logprobs or ()]
        stack.wait_until_clean()
        workers = [*stack.workers("prefill"), *stack.workers("decode")]
        assert len({worker["numerics"] for worker in workers}) == 1
        decode = stack.workers("decode")
        assert sum(worker["totals"]["handoffs_committed"] for worker in decode) == 2 * len(prompts)
        assert sum(worker["totals"]["computed_blocks"] for worker in decode) == 0
