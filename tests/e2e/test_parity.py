"""Greedy output in float32 is that of `transformers.generate`, token for token, through the full handoff."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e import reference
from tests.e2e.prompts import prompt_of
from tests.fakes.stack import Stack
from tests.fakes.waiting import PATIENCE_S

pytestmark = pytest.mark.e2e

CHUNK = 48  # token budget of the small stacks
LENGTHS = [1, 15, 16, 17, 2 * 16, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK + 7]


OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2", "qwen3", "mistral", "gemma")]


@pytest.fixture(scope="module", params=["llama", *OTHERS])
def small(
    request: pytest.FixtureRequest, tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, Stack]]:
    """A random small model behind one prefill and one decode worker, with chunks of 48 tokens."""
    model = tiny_model(request.param)
    flags = ("--dtype", "float32", "--token-budget", str(CHUNK), "--max-running", "32", "--num-blocks", "600")
    with Stack(model, tmp_path_factory.mktemp("stack"), *flags) as stack:
        yield model, stack


def test_prompts_of_all_critical_lengths(small: tuple[Path, Stack]) -> None:
    model, stack = small
    for length in LENGTHS:
        prompt = prompt_of(length, reference.vocab_size(model))
        choice = stack.complete(prompt, 20, ignore_eos=True, logprobs=5)
        assert choice["token_ids"] == reference.greedy(model, prompt, 20), f"a prompt of {length} tokens"
        reference.check_logprobs(model, prompt, choice)
    stack.wait_until_clean()


def test_samples_are_those_of_generate(small: tuple[Path, Stack]) -> None:
    """Greedy ones, so that each is known; what is drawn differs by sequence index alone."""
    model, stack = small
    for length in LENGTHS:
        prompt = prompt_of(length, reference.vocab_size(model), seed=8)
        body = {"model": stack.model, "prompt": prompt, "max_tokens": 20, "n": 8, "temperature": 0}
        answer = stack.http.post("/v1/completions", json=body | {"return_token_ids": True, "ignore_eos": True})
        found = answer.raise_for_status().json()
        expected = reference.greedy(model, prompt, 20)
        assert [choice["token_ids"] for choice in found["choices"]] == [expected] * 8, f"{length} tokens"
        assert (found["usage"]["prompt_tokens"], found["usage"]["completion_tokens"]) == (length, 160)
        cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == 0, "what samples share with each other was not there before"
        record = stack.http.get(f"/requests/{answer.headers['x-request-id']}").json()
        usages = [sequence["usage"] for sequence in record["sequences"]]
        assert all(each["received_blocks"] + each["cached_blocks"] == -(-length // 16) for each in usages)
    stack.wait_until_clean()


def test_each_sample_comes_with_the_scores_of_the_prompt(small: tuple[Path, Stack]) -> None:
    model, stack = small
    for length in LENGTHS[1:]:
        prompt = prompt_of(length, reference.vocab_size(model), seed=9)
        body = {"model": stack.model, "prompt": prompt, "max_tokens": 4, "temperature": 0, "prompt_logprobs": 2, "n": 4}
        answer = stack.http.post("/v1/completions", json=body).raise_for_status().json()
        expected = reference.logprobs(model, prompt, 1)
        for choice in answer["choices"]:
            scores = choice["prompt_logprobs"]
            assert scores[0] is None
            assert len(scores) == length
            for row, (token_id, entry) in enumerate(zip(prompt[1:], scores[1:], strict=True)):
                assert abs(entry[str(token_id)]["logprob"] - float(expected[row, token_id])) < 1e-4
    stack.wait_until_clean()


def test_the_cached_part_of_a_prompt_is_not_computed_to_score_the_rest(small: tuple[Path, Stack]) -> None:
    model, stack = small
    prompt = prompt_of(150, reference.vocab_size(model), seed=77)
    expected = reference.logprobs(model, prompt, 1)
    for start in (149, 100, 97, 96, 1, 0):
        body = {"model": stack.model, "prompt": prompt, "max_tokens": 0, "prompt_logprobs": 1}
        answer = stack.http.post("/v1/completions", json=body | {"logprob_start_len": start}).raise_for_status().json()
        scores = answer["choices"][0]["prompt_logprobs"]
        first = max(start, 1)
        assert scores[:first] == [None] * first and len(scores) == len(prompt)
        for row, (token_id, entry) in enumerate(zip(prompt[first:], scores[first:], strict=True), start=first - 1):
            assert abs(entry[str(token_id)]["logprob"] - float(expected[row, token_id])) < 1e-4
        # Position `first - 1` is computed, so at most the blocks that end before it are reused.
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == (0 if start == 149 else (first - 1) // 16 * 16)
    stack.wait_until_clean()


@pytest.mark.parametrize("start", [149, 140, 1])
def test_prompts_of_a_request_are_scored_behind_what_they_share(small: tuple[Path, Stack], start: int) -> None:
    """They differ within a block, whose first part is computed once and copied."""
    model, stack = small
    size = reference.vocab_size(model)
    prefix = prompt_of(150, size, seed=7000 + start)
    prompts = [[*prefix, *prompt_of(1 + number % 5, size, seed=number)] for number in range(12)]
    body = {"model": stack.model, "prompt": prompts, "max_tokens": 0, "prompt_logprobs": 1, "logprob_start_len": start}
    answer = stack.http.post("/v1/completions", json=body).raise_for_status().json()
    for choice, prompt in zip(answer["choices"], prompts, strict=True):
        expected, scores = reference.logprobs(model, prompt, 1), choice["prompt_logprobs"]
        assert scores[:start] == [None] * start and len(scores) == len(prompt)
        for row, (token_id, entry) in enumerate(zip(prompt[start:], scores[start:], strict=True), start=start - 1):
            assert abs(entry[str(token_id)]["logprob"] - float(expected[row, token_id])) < 1e-4
    # The first computes all, the others nothing but the last common token and what follows it.
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 11 * 149
    stack.wait_until_clean()


def test_many_at_once_with_staggered_arrivals_and_early_stops(small: tuple[Path, Stack]) -> None:
    model, stack = small
    rng = random.Random(3)
    size = reference.vocab_size(model)
    jobs = [(prompt_of(rng.randint(1, 180), size, seed=n), rng.randint(1, 40)) for n in range(64)]

    async def run() -> list[dict[str, Any]]:
        async with httpx.AsyncClient(base_url=stack.base_url, timeout=2 * PATIENCE_S) as client:

            async def one(number: int, prompt: list[int], max_tokens: int) -> dict[str, Any]:
                await asyncio.sleep(number * 0.01)
                body = {"model": stack.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
                answer = await client.post(
                    "/v1/completions", json=body | {"return_token_ids": True, "ignore_eos": number % 2 == 0}
                )
                return answer.raise_for_status().json()["choices"][0]  # type: ignore[no-any-return]

            return await asyncio.gather(*(one(n, *job) for n, job in enumerate(jobs)))

    for number, (choice, (prompt, max_tokens)) in enumerate(zip(asyncio.run(run()), jobs, strict=True)):
        expected = reference.greedy(model, prompt, max_tokens, ignore_eos=number % 2 == 0)
        assert choice["token_ids"] == expected, f"request {number}"
    stack.wait_until_clean()
    assert sum(worker["totals"]["computed_blocks"] for worker in stack.workers("decode")) == 0
