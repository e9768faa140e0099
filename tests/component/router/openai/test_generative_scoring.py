"""Generative scoring: a prompt and one token for each item, and the probability of the first label."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.component.router.rig import MODEL, Router

PATH = "/generative_scoring"
BODY: dict[str, Any] = {"query": "Is this a bird? ", "items": ["An otter.", "A heron."], "label_token_ids": [300, 5]}


async def scored(router: Router, **fields: Any) -> dict[str, Any]:
    answer = await router.post(PATH, **{**BODY, **fields})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_the_score_is_the_first_labels_share(router: Router) -> None:
    answer = await scored(router)
    share = 1 / (1 + math.exp(-1))  # the script's labels have the log-probabilities -1, -2, ...
    assert answer["data"] == [
        {"index": index, "object": "score", "score": pytest.approx(share)} for index in range(len(BODY["items"]))
    ]
    assert (answer["object"], answer["model"]) == ("list", MODEL) and answer["id"].startswith("generative-scoring-")
    prompts = [request.prompt_ids for request in router.dispatcher.requests]
    query = router.tokens(BODY["query"])
    assert prompts == [query + router.tokens(item) for item in BODY["items"]]
    num_prompt = sum(map(len, prompts))
    usage = {name: answer["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    assert usage == {"prompt_tokens": num_prompt, "completion_tokens": 2, "total_tokens": num_prompt + 2}
    for request in router.dispatcher.requests:
        assert request.sampling.max_tokens == 1 and request.sampling.logprob_token_ids == (300, 5)


async def test_without_softmax_it_is_the_models_probability(router: Router) -> None:
    answer = await scored(router, apply_softmax=False)
    assert [each["score"] for each in answer["data"]] == pytest.approx([math.exp(-1)] * 2)


async def test_one_label_has_all_of_the_share(router: Router) -> None:
    assert (await scored(router, label_token_ids=[7, 7]))["data"][0]["score"] == 1


async def test_tokens_may_be_given_and_items_come_first(router: Router) -> None:
    await scored(router, query=[7, 8], items=[[9], "An otter."], item_first=True)
    prompts = [request.prompt_ids for request in router.dispatcher.requests]
    assert prompts == [[9, 7, 8], [*router.tokens("An otter."), 7, 8]]


async def test_the_model_may_be_left_out(router: Router) -> None:
    answer = await router.http.post(PATH, json=BODY)
    assert answer.json()["model"] == MODEL


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"items": []}, "items"),
        ({"items": "x"}, "items"),
        ({"items": [1]}, "items"),
        ({"items": ["x"] * 1025}, "items"),
        ({"items": [""], "query": ""}, "items"),
        ({"items": ["otter " * 600]}, "items"),
        ({"items": [[10**6]]}, "items"),
        ({"query": None}, "query"),
        ({"query": [1.5]}, "query"),
        ({"query": "otter " * 6000}, "query"),
        ({"label_token_ids": []}, "label_token_ids"),
        ({"label_token_ids": None}, "label_token_ids"),
        ({"label_token_ids": [-1]}, "label_token_ids[0]"),
        ({"label_token_ids": [10**6]}, "label_token_ids"),
        ({"label_token_ids": [*range(129)]}, "label_token_ids"),
        ({"model": "other"}, "model"),
        ({"cache_salt": ""}, "cache_salt"),
    ],
)
async def test_what_makes_no_sense_is_refused(router: Router, fields: dict[str, Any], param: str) -> None:
    answer = await router.post(PATH, **{**BODY, **fields})
    assert answer.status_code == (404 if param == "model" else 400), answer.text
    assert answer.json()["error"]["param"] == param and not router.dispatcher.requests
