"""Beam search and several samples at the router: what is asked of the workers, how their texts are answered, and what
could never run at once, which is refused with numbers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvrelay.protocol.sampling import BeamSpec, FinishReason, ScoredText
from kvrelay.text.request.validation import ModelLimits
from tests.component.router.rig import Router
from tests.fakes.scripted_dispatcher import Script
from tests.fakes.waiting import PATIENCE_S

HELLO = [{"role": "user", "content": "hi"}]


def finds(router: Router, *texts: str) -> list[ScoredText]:
    """From now on every search gives these texts; the first one ends by itself, the others by length."""
    end = router.tokens("<|im_end|>")
    results = [ScoredText(router.tokens(texts[0]) + end, -0.5, -2.0, FinishReason.STOP_TOKEN)]
    results += [
        ScoredText(router.tokens(text), -0.5 - number, -3.0 - number, FinishReason.LENGTH)
        for number, text in enumerate(texts[1:], 1)
    ]
    router.dispatcher.script = lambda request, sequence: Script([], beams=results)
    return results


async def test_completions_are_answered_best_first(router: Router) -> None:
    results = finds(router, "An otter", "A boat")
    answer = await router.post(
        "/v1/completions",
        prompt="x",
        use_beam_search=True,
        n=2,
        best_of=5,
        length_penalty=0.5,
        early_stopping="never",
        temperature=0,
        stop_token_ids=[7],
        repetition_penalty=1.5,
        return_token_ids=True,
    )
    assert answer.status_code == 200, answer.text
    (request,) = router.dispatcher.requests
    assert request.num_sequences == 1
    sampling = request.sampling
    assert sampling.beams == BeamSpec(width=5, num_returned=2, length_penalty=0.5, early_stopping="never")
    assert (sampling.temperature, sampling.stop_token_ids, sampling.repetition_penalty) == (0.0, (7,), 1.5)
    body = answer.json()
    assert [choice["text"] for choice in body["choices"]] == ["An otter", "A boat"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert [choice["finish_reason"] for choice in body["choices"]] == ["stop", "length"]
    assert [choice["score"] for choice in body["choices"]] == [-0.5, -1.5]
    assert [choice["cumulative_logprob"] for choice in body["choices"]] == [-2.0, -4.0]
    assert [choice["token_ids"] for choice in body["choices"]] == [each.token_ids for each in results]
    assert body["usage"]["completion_tokens"] == sum(len(each.token_ids) for each in results)
    assert body["usage"]["prompt_tokens"] == len(request.prompt_ids)


@pytest.mark.parametrize("body", [{}, {"n": 1, "length_penalty": 1, "early_stopping": False}])
async def test_chat_searches_with_n_beams_unless_told_otherwise(router: Router, body: dict[str, Any]) -> None:
    finds(router, "An otter")
    answer = await router.post("/v1/chat/completions", messages=HELLO, use_beam_search=True, **body)
    (choice,) = answer.json()["choices"]
    assert choice["message"]["content"] == "An otter"
    assert choice["score"] == -0.5
    assert router.dispatcher.requests[0].sampling.beams == BeamSpec(width=1, num_returned=1)


async def test_without_a_search_nothing_speaks_of_scores(router: Router) -> None:
    router.answers("An otter")
    answer = await router.post("/v1/completions", prompt="x", length_penalty=1.0, early_stopping=False)
    (choice,) = answer.json()["choices"]
    assert "score" not in choice
    assert router.dispatcher.requests[0].sampling.beams is None


async def test_a_stream_has_each_text_in_one_event(router: Router) -> None:
    finds(router, "An otter", "A boat")
    body: dict[str, Any] = {"messages": HELLO, "use_beam_search": True, "n": 2}
    chunks = await router.events("/v1/chat/completions", **body, stream_options={"include_usage": True})
    assert chunks.pop()["usage"]["completion_tokens"] > 0
    texts = [c["choices"][0] for c in chunks if c["choices"][0]["delta"].get("content")]
    assert [(text["delta"]["content"], text["score"]) for text in texts] == [("An otter", -0.5), ("A boat", -1.5)]


async def test_too_few_texts_are_an_error_and_no_silence(router: Router) -> None:
    finds(router, "An otter")
    answer = await asyncio.wait_for(router.post("/v1/completions", prompt="x", use_beam_search=True, n=2), PATIENCE_S)
    assert answer.status_code == 502
    assert "without a finish reason" in answer.json()["error"]["message"]


async def test_without_a_worker_that_runs_searches_it_is_unavailable(router: Router) -> None:
    router.dispatcher.model_limits = ModelLimits(512, 400)
    answer = await router.post("/v1/completions", prompt="x", use_beam_search=True)
    assert answer.status_code == 503
    assert answer.headers["retry-after"]


pytestmark = pytest.mark.component
FOUR_SEQUENCES = ModelLimits(512, 400, 4, 20, 16)


@pytest.mark.parametrize("param", ["n", "best_of"])
async def test_more_samples_than_run_at_a_time_are_refused(router: Router, param: str) -> None:
    router.dispatcher.model_limits = FOUR_SEQUENCES
    answer = await router.post("/v1/completions", prompt="x", max_tokens=5, **{param: 5})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert "5 samples" in error["message"]
    assert "up to 4 sequences" in error["message"]
    assert not router.dispatcher.requests


async def test_samples_whose_first_tokens_do_not_fit_are_refused(router: Router) -> None:
    """One prompt of 160 tokens takes 11 blocks of 16 with its first token; four share ten: 14."""
    router.dispatcher.model_limits = ModelLimits(512, 400, 4, 13, 16)
    answer = await router.post("/v1/completions", prompt=[5] * 160, n=4, max_tokens=5)
    assert answer.status_code == 400, answer.text
    assert "14 blocks of 16 tokens; a worker has 13" in answer.json()["error"]["message"]
    answer = await router.post("/v1/completions", prompt=[5] * 160, n=3, max_tokens=5)
    assert answer.status_code == 200, answer.text


async def test_chat_has_the_same_door(router: Router) -> None:
    router.dispatcher.model_limits = FOUR_SEQUENCES
    messages = [{"role": "user", "content": "hi"}]
    answer = await router.post("/v1/chat/completions", messages=messages, n=5, max_tokens=5)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == "n"


@pytest.mark.parametrize(
    ("limits", "max_tokens"),
    [
        (ModelLimits(512, 400), 5),
        (FOUR_SEQUENCES, 1),
    ],
    ids=["no decode worker", "single tokens, which are prefill's"],
)
async def test_what_need_not_run_at_once_is_served(router: Router, limits: ModelLimits, max_tokens: int) -> None:
    router.dispatcher.model_limits = limits
    answer = await router.post("/v1/completions", prompt="x", n=5, max_tokens=max_tokens)
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["choices"]) == 5
