"""A pool of 8 bits through the full handoff: tokens are those of one process that nothing disturbs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvrelay.engine.make import make_runner
from kvrelay.engine.run.transformers_runner import TransformersRunner
from kvrelay.protocol.sampling import Sampling
from tests.e2e.prompts import prompt_of
from tests.fakes.stack import Stack
from tests.tiny_models import VOCAB_SIZE
from tests.unit.engine import driving

pytestmark = pytest.mark.e2e
NUM_OUTPUT = 20
NEARLY_EQUAL = 0.02
"""Of log-probabilities. Matrix products of other shapes may differ in a last bit that decides how a key is rounded."""


def alone(runner: TransformersRunner, prompt: list[int]) -> driving.Driven:
    """The prompt in one chunk, and a token at a time."""
    (sequence,) = driving.start(runner, [prompt], Sampling(temperature=0, logprobs=2), NUM_OUTPUT)
    driving.run(runner, [sequence], max_chunk=1000)
    runner.drop_sequence(sequence.key)
    return sequence


def check(given: list[int], expected: driving.Driven) -> None:
    for ours, theirs, entry in zip(given, expected.output, expected.logprobs, strict=True):
        if ours != theirs:
            assert entry is not None and entry.top_logprobs[0] - entry.top_logprobs[1] < NEARLY_EQUAL
            return


@pytest.mark.slow
@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3"])
def test_tokens_are_those_of_one_process(
    kv_cache_dtype: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    model = tiny_model("mistral")
    prompts = [prompt_of(length, VOCAB_SIZE) for length in (1, 16, 17, 130, 200)]
    runner = make_runner(str(model), dtype="float32", kv_cache_dtype=kv_cache_dtype, num_blocks=32)
    expected = [alone(runner, prompt) for prompt in prompts]
    flags = ("--dtype", "float32", "--kv-cache-dtype", kv_cache_dtype, "--transfer-checksums")
    with Stack(model, tmp_path, *flags, "--token-budget", "48", "--max-running", "32", "--num-blocks", "300") as stack:
        for _ in range(2):  # the second time with what was cached
            for prompt, reference in zip(prompts, expected, strict=True):
                check(stack.complete(prompt, NUM_OUTPUT, ignore_eos=True)["token_ids"], reference)
        stack.wait_until_clean()
        workers = [*stack.workers("prefill"), *stack.workers("decode")]
        assert {worker["kv_dtype"] for worker in workers} == {kv_cache_dtype}
        decode = stack.workers("decode")
        assert sum(worker["totals"]["handoffs_committed"] for worker in decode) == 2 * len(prompts)
        assert sum(worker["totals"]["computed_blocks"] for worker in decode) == 0
