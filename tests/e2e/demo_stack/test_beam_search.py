"""Beam search over HTTP is transformers' beam search: the same texts in the same order, with the same scores."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from kvrelay.protocol.sampling import BeamSpec, Sampling
from tests.component.engine.beam_reference import reference_beams
from tests.e2e import reference
from tests.e2e.conftest import DEMO_MODEL
from tests.e2e.prompts import prompt_of
from tests.fakes.stack import Stack
from tests.fakes.waiting import PATIENCE_S

pytestmark = pytest.mark.e2e


def post(stack: Stack, path: str, **body: Any) -> dict[str, Any]:
    body = {"model": stack.model, "use_beam_search": True, "return_token_ids": True, **body}
    answer = httpx.post(stack.base_url + path, json=body, timeout=2 * PATIENCE_S)
    assert answer.status_code == 200, answer.text
    content: dict[str, Any] = answer.json()
    return content


def check(choices: list[dict[str, Any]], prompt: list[int], sampling: Sampling, *, ignore_eos: bool) -> None:
    model = reference.load(DEMO_MODEL)
    eos = model.generation_config.eos_token_id
    ends = [] if ignore_eos else [eos] if isinstance(eos, int) else list(eos)
    expected = reference_beams(model, prompt, sampling, [*ends, *sampling.stop_token_ids] or None)
    assert [choice["index"] for choice in choices] == list(range(len(expected)))
    assert [choice["token_ids"] for choice in choices] == [text.token_ids for text in expected]
    for choice, text in zip(choices, expected, strict=True):
        assert abs(choice["score"] - text.score) < 1e-4
        penalised = choice["cumulative_logprob"] / len(text.token_ids) ** sampling.beams.length_penalty  # type: ignore[union-attr]
        assert abs(choice["score"] - penalised) < 1e-4
        ended = text.token_ids[-1] in [*ends, *sampling.stop_token_ids]
        assert choice["finish_reason"] == ("stop" if ended else "length")


@pytest.mark.parametrize("length", [1, 16, 33, 500, 1200])
def test_completions(demo_stack: Stack, length: int) -> None:
    prompt = prompt_of(length)
    spec = BeamSpec(width=4, num_returned=3, length_penalty=0.5, early_stopping=True)
    answer = post(
        demo_stack,
        "/v1/completions",
        prompt=prompt,
        n=3,
        best_of=4,
        length_penalty=0.5,
        early_stopping=True,
        max_tokens=20,
    )
    check(answer["choices"], prompt, Sampling(max_tokens=20, beams=spec), ignore_eos=False)
    usage = answer["usage"]
    assert usage["prompt_tokens"] == length
    assert usage["completion_tokens"] == sum(len(choice["token_ids"]) for choice in answer["choices"])
    demo_stack.wait_until_clean()


def test_chat_with_a_text_that_ends(demo_stack: Stack) -> None:
    messages = [{"role": "user", "content": "What is an otter?"}]
    answer = post(demo_stack, "/v1/chat/completions", messages=messages, n=2, best_of=5, max_tokens=60)
    choices = [{**choice, "text": choice["message"]["content"]} for choice in answer["choices"]]
    prompt = answer["prompt_token_ids"]
    sampling = Sampling(max_tokens=60, beams=BeamSpec(width=5, num_returned=2))
    check(choices, prompt, sampling, ignore_eos=False)
    assert all(choice["text"] and choice["finish_reason"] == "stop" for choice in choices)


def test_many_searches_at_once_beside_others(demo_stack: Stack) -> None:

    def search(number: int) -> None:
        prompt, width = prompt_of(30 + 40 * number, seed=number), 2 + number % 7
        answer = post(demo_stack, "/v1/completions", prompt=prompt, n=width, max_tokens=15, ignore_eos=number % 2 == 0)
        sampling = Sampling(max_tokens=15, beams=BeamSpec(width=width, num_returned=width))
        check(answer["choices"], prompt, sampling, ignore_eos=number % 2 == 0)

    def greedy(number: int) -> None:
        prompt = prompt_of(50 + number, seed=number)
        choice = demo_stack.complete(prompt, 15, ignore_eos=True)
        assert choice["token_ids"] == reference.greedy(DEMO_MODEL, prompt, 15)

    with ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(job, number) for number in range(8) for job in (search, greedy)]
        for job in jobs:
            job.result()
    demo_stack.wait_until_clean()


def test_several_prompts_and_a_stop_token(demo_stack: Stack) -> None:
    prompts = [prompt_of(20, seed=1), prompt_of(64, seed=2)]
    plain = post(demo_stack, "/v1/completions", prompt=prompts, n=2, max_tokens=12, ignore_eos=True)["choices"]
    stop = plain[0]["token_ids"][5]
    choices = post(
        demo_stack,
        "/v1/completions",
        prompt=prompts,
        n=2,
        max_tokens=12,
        ignore_eos=True,
        stop_token_ids=[stop],
        early_stopping="never",
    )["choices"]
    spec = BeamSpec(width=2, num_returned=2, early_stopping="never")
    for number, prompt in enumerate(prompts):
        of_prompt = [{**c, "index": c["index"] - 2 * number} for c in choices[2 * number : 2 * number + 2]]
        sampling = Sampling(max_tokens=12, beams=spec, stop_token_ids=(stop,))
        check(of_prompt, prompt, sampling, ignore_eos=True)
