"""The door for requests with several samples: what could never run at once is refused, with numbers."""

from __future__ import annotations

import pytest

from kvrelay.text.request.validation import ModelLimits
from tests.component.router.rig import Router

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
