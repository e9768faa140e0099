"""Answers with many log-probabilities: refused if they are too large, otherwise complete."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvrelay.protocol.sampling import FinishReason
from kvrelay.text.request.validation import ModelLimits
from tests.component.router.rig import Router
from tests.fakes.scripted_dispatcher import Script

LONG = ModelLimits(4096, 400, 64, 2000, 16)


def scored(num_prompts: int, num_tokens: int, **fields: Any) -> dict[str, Any]:
    prompts = [[5 + number % 300 for number in range(num_tokens)]] * num_prompts
    return {"prompt": prompts, "echo": True, "logprobs": 20, "max_tokens": 1, **fields}


async def test_an_answer_above_the_limit_is_400_before_anything_runs(router: Router) -> None:
    router.dispatcher.model_limits = LONG
    answer = await router.post("/v1/completions", **scored(200, 2000, prompt_logprobs=20))
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "answer_too_large", "logprobs")
    assert "400000 tokens" in error["message"]
    assert not router.dispatcher.handles


async def test_the_limit_is_a_setting(make_router: Callable[..., Any]) -> None:
    async with make_router(max_answer_bytes=10_000) as router:
        assert (await router.post("/v1/completions", prompt="x", max_tokens=4)).status_code == 200
        assert (await router.post("/v1/completions", **scored(1, 100))).status_code == 400
        chat = await router.post("/v1/chat/completions", messages=[{"role": "user", "content": "x"}], logprobs=True)
        assert chat.status_code == 200
        assert router.dispatcher.requests[-1].sampling.max_tokens < 200, "what fits into the answer"


@pytest.mark.parametrize("num_tokens", [20, 1500])
async def test_a_stream_says_the_same_as_an_answer_in_one_piece(router: Router, num_tokens: int) -> None:
    router.dispatcher.model_limits = LONG
    router.answers("An otter is a mammal.")
    body = scored(3, num_tokens, max_tokens=8)
    whole = (await router.post("/v1/completions", **body)).json()
    found: dict[int, dict[str, Any]] = {}
    for event in await router.events("/v1/completions", **body):
        (choice,) = event["choices"]
        into = found.setdefault(choice["index"], {"text": "", "logprobs": {}})
        into["text"] += choice["text"]
        for name, values in (choice["logprobs"] or {}).items():
            into["logprobs"].setdefault(name, []).extend(values)
    assert len(whole["choices"]) == 3
    for choice in whole["choices"]:
        assert found[choice["index"]] == {"text": choice["text"], "logprobs": choice["logprobs"]}
        assert len(choice["logprobs"]["tokens"]) == num_tokens + len(router.tokens("An otter is a mammal.")) + 1


async def test_scores_of_a_prompt_are_complete(router: Router) -> None:
    router.dispatcher.model_limits = LONG
    for num_tokens in (20, 1500):
        body = scored(2, num_tokens, prompt_logprobs=5, n=2, temperature=1.0)
        answer = await router.post("/v1/completions", **body)
        for choice in answer.json()["choices"]:
            assert len(choice["prompt_logprobs"]) == num_tokens
            assert choice["prompt_logprobs"][0] is None
            assert all(len(each) == 5 for each in choice["prompt_logprobs"][1:])


async def streamed_choice(router: Router, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The events of the one choice, joined, as the answer in one piece has them."""
    joined: dict[str, Any] = {"text": "", "scores": {}, "finish_reason": None}
    for event in await router.events(path, **body):
        (choice,) = event["choices"]
        assert joined["finish_reason"] is None, "nothing follows the last event"
        joined["text"] += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        joined["finish_reason"] = choice["finish_reason"]
        for name, values in (choice["logprobs"] or {}).items():
            joined["scores"].setdefault(name, []).extend(values or [])
    return joined


@pytest.mark.parametrize("per_delta", [1, 100, 10_000])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_scores_of_tokens_that_come_many_at_a_time_are_complete(
    router: Router, path: str, per_delta: int
) -> None:
    """As for tokens without text, whose scores wait for the next event."""
    router.dispatcher.model_limits = LONG
    router.answers("An otter is a mammal. " * 100, per_delta=per_delta, finish=FinishReason.LENGTH)
    if path == "/v1/completions":
        body: dict[str, Any] = {"prompt": "x", "logprobs": 20}
    else:
        body = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 20}
    body["max_tokens"] = 1500
    (whole,) = (await router.post(path, **body)).json()["choices"]
    text = whole["text"] if "text" in whole else whole["message"]["content"]
    scores = {name: values or [] for name, values in whole["logprobs"].items()}
    found = await streamed_choice(router, path, body)
    assert found == {"text": text, "scores": scores, "finish_reason": "length"}
    assert len(max(scores.values(), key=len)) > 400


async def test_the_scores_of_many_tokens_without_text_come_at_the_end(router: Router) -> None:
    """The client makes them likely; nothing is sent before the end."""
    router.dispatcher.model_limits = LONG
    (silent,) = router.tokens("<|im_start|>")
    router.dispatcher.script = lambda request, sequence: Script([silent] * 1500, FinishReason.LENGTH, per_delta=50)
    body = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 20, "max_tokens": 1500}
    found = await streamed_choice(router, "/v1/chat/completions", body)
    assert found["text"] == "" and len(found["scores"]["content"]) == 1500
