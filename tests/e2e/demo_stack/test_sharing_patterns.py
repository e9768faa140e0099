"""The four ways in which calls of programs share prefixes: their cache hits, held against the best possible."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoTokenizer

from benchmarks.programs.calls import KeptCalls, best_possible_hits, tokenized
from kvrelay_programs.workloads import find_workload
from tests.e2e.conftest import DEMO_MODEL
from tests.fakes.stack import Stack

LEAST_SHARE = 0.95


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DEMO_MODEL)


@pytest.mark.parametrize("pattern", ["few-shot-5", "self-consistency", "multi-turn-short", "tree-of-thought"])
def test_calls_find_nearly_all_that_a_cache_without_end_would_have(
    demo_stack: Stack, tokenizer: Any, pattern: str
) -> None:
    workload = find_workload(pattern)
    endpoint = KeptCalls(demo_stack.base_url, demo_stack.model)
    endpoint.salt = f"sharing pattern {pattern}"
    # Programs that begin at the same time may each compute what all share. A batch has it computed first.
    states = workload.program.run_batch(
        workload.draw(2, seed=1), endpoint=endpoint, sampling={"temperature": 0}, prefetch=True, progress=False
    )
    calls = tokenized(endpoint.take_calls(), tokenizer)
    num_prompt = sum(state.usage.prompt_tokens for state in states)
    num_hits = sum(state.usage.cached_tokens for state in states)
    prefetched = sum(call.num_prompt for call in calls) - num_prompt
    assert 0 <= prefetched < num_prompt / 2  # the tokenizer here gives what the server's gives
    assert num_hits >= LEAST_SHARE * best_possible_hits(calls) > 0
