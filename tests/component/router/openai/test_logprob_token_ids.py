"""`logprob_token_ids`: what a worker is asked, what the client gets of it, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.component.router.rig import Router

HELLO: list[Any] = [{"role": "user", "content": "Otter?"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO, "logprobs": True},
    TEXT: {"prompt": "Otter?", "logprobs": 1},
}


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_the_wanted_tokens_replace_the_most_likely(router: Router, path: str) -> None:
    wanted = [300, 5, 301, 6, 7, 8]
    fields = {"logprob_token_ids": [*wanted, 5], "return_tokens_as_token_ids": True}
    answer = await router.post(path, **BODIES[path], **fields)
    assert answer.status_code == 200, answer.text
    sampling = router.dispatcher.requests[0].sampling
    assert sampling.logprob_token_ids == tuple(wanted) and sampling.logprobs == len(wanted)
    logprobs = answer.json()["choices"][0]["logprobs"]
    if path == CHAT:
        top = {each["token"]: each["logprob"] for each in logprobs["content"][0]["top_logprobs"]}
        own = logprobs["content"][0]["token"]
        assert list(top) == [own, *(f"token_id:{each}" for each in wanted)] and top.pop(own) == -0.5
    else:
        top = logprobs["top_logprobs"][0]
        assert top.pop(logprobs["tokens"][0]) == -0.5
    assert top == {f"token_id:{each}": -float(number + 1) for number, each in enumerate(wanted)}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_sampled_token_among_the_wanted_ones_comes_once(router: Router, stream: bool) -> None:
    router.answers("Otter")
    (first, *_) = router.tokens("Otter")
    fields = {"logprob_token_ids": [5, first], "return_tokens_as_token_ids": True, "max_tokens": 1}
    if stream:
        events = await router.events(CHAT, **BODIES[CHAT], **fields)
        logprobs = next(found for each in events if (found := each["choices"][0]["logprobs"]))
    else:
        logprobs = (await router.post(CHAT, **BODIES[CHAT], **fields)).json()["choices"][0]["logprobs"]
    assert [each["token"] for each in logprobs["content"][0]["top_logprobs"]] == ["token_id:5", f"token_id:{first}"]


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_an_empty_list_changes_nothing(router: Router, path: str) -> None:
    empty: list[Any] = [[], None]
    for value in empty:
        assert (await router.post(path, **BODIES[path], logprob_token_ids=value)).status_code == 200
    assert {request.sampling.logprob_token_ids for request in router.dispatcher.requests} == {()}


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    "fields",
    [
        {"logprob_token_ids": [5], "logprobs": None},
        {"logprob_token_ids": [5], "use_beam_search": True, "logprobs": None},
        {"logprob_token_ids": [-1]},
        {"logprob_token_ids": [10**6]},
        {"logprob_token_ids": [1.5]},
        {"logprob_token_ids": "5"},
        {"logprob_token_ids": [*range(129)]},
    ],
)
async def test_what_makes_no_sense_is_refused(router: Router, path: str, fields: dict[str, Any]) -> None:
    answer = await router.post(path, **{**BODIES[path], **fields})
    assert answer.status_code == 400 and answer.json()["error"]["param"].startswith("logprob_token_ids"), answer.text
    assert not router.dispatcher.requests


async def test_an_echoed_prompt_has_none(router: Router) -> None:
    answer = await router.post(TEXT, **BODIES[TEXT], logprob_token_ids=[5], echo=True)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "logprob_token_ids"
