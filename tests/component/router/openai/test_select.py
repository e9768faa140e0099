"""Selections: one request with a text and its choices, each of which is a scored sequence behind what all share."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvrelay.text.request.validation import ModelLimits
from kvrelay.text.service import TextService
from kvrelay_router.dispatch.interface import GenerateRequest
from tests.component.router.rig import Router, running_router
from tests.fakes.scripted_dispatcher import Script, prompt_logprob
from tests.fakes.waiting import until

SELECT = "/v1/select"
TEXT = "An otter is an animal that lives in rivers. " * 3 + "It eats"
CHOICES = [" fish.", " stones and sand.", " the sun", "n apple"]


def tokens_of(request: GenerateRequest) -> list[list[int]]:
    return [[*request.prompt_ids, *ending.token_ids] for ending in request.endings]


def first_difference(alone: Sequence[int], rows: Sequence[Sequence[int]]) -> int:
    """Position of the first token by which one of the rows differs from the text alone, 1 at least."""
    equal = [list(takewhile(lambda pair: pair[0] == pair[1], zip(alone, row, strict=False))) for row in rows]
    return max(1, min(map(len, equal)))


def expected_totals(router: Router, text: str, choices: Sequence[str]) -> list[tuple[float, int]]:
    rows = [router.tokens(text + choice) for choice in choices]
    first = first_difference(router.tokens(text), rows)
    return [(math.fsum(map(prompt_logprob, row[first:])), len(row) - first) for row in rows]


@pytest.mark.parametrize("normalization", ["tokens", "none", "unconditional"])
async def test_scores_are_those_of_the_tokens_behind_the_text(router: Router, normalization: str) -> None:
    answer = await router.post(
        SELECT, prompt=TEXT, choices=CHOICES, normalization=normalization, unconditional_prompt="Answer:"
    )
    assert answer.status_code == 200, answer.text
    body = answer.json()
    totals = expected_totals(router, TEXT, CHOICES)
    assert [(each["index"], each["logprob"], each["num_tokens"]) for each in body["scores"]] == [
        (index, pytest.approx(total), num_tokens) for index, (total, num_tokens) in enumerate(totals)
    ]
    scores = [total / num_tokens if normalization == "tokens" else total for total, num_tokens in totals]
    if normalization == "unconditional":
        others = [total for total, _ in expected_totals(router, "Answer:", CHOICES)]
        assert [each["unconditional_logprob"] for each in body["scores"]] == pytest.approx(others)
        scores = [score - other for score, other in zip(scores, others, strict=True)]
    assert [each["score"] for each in body["scores"]] == pytest.approx(scores)
    assert body["selected"] == scores.index(max(scores))
    assert body["object"] == "select" and body["model"] == "test-model"


async def test_the_text_is_sent_and_counted_once(router: Router) -> None:
    body = (await router.post(SELECT, prompt=TEXT, choices=CHOICES)).json()
    (request,) = router.dispatcher.requests
    assert tokens_of(request) == [router.tokens(TEXT + choice) for choice in CHOICES]
    assert request.num_sequences == len(CHOICES)
    first, *others = [ending.sampling for ending in request.endings]
    assert all(each.max_tokens == 0 and each.prompt_logprobs == 0 for each in (first, *others))
    assert {each.logprob_start_len for each in others} == {max(len(request.prompt_ids), first.logprob_start_len)}
    assert first.num_shared == others[0].num_shared == len(request.prompt_ids) - 1
    usage = body["usage"]
    assert usage["prompt_tokens"] == len(request.prompt_ids) + sum(len(each.token_ids) for each in request.endings)
    assert usage["prompt_tokens"] == usage["total_tokens"] and usage["completion_tokens"] == 0
    assert usage["prompt_tokens_details"] == {"cached_tokens": 16}


async def test_many_choices_run_in_parts(router: Router) -> None:
    choices = [f" number {number}." for number in range(300)]
    body = (await router.post(SELECT, prompt="It has", choices=choices, normalization="unconditional")).json()
    totals = expected_totals(router, "It has", choices)
    others = expected_totals(router, "Answer:", choices)
    assert [each["logprob"] for each in body["scores"]] == pytest.approx([total for total, _ in totals])
    assert [each["unconditional_logprob"] for each in body["scores"]] == pytest.approx([total for total, _ in others])
    requests = router.dispatcher.requests
    assert [len(request.endings) for request in requests] == [128, 128, 44] * 2
    prompts = requests[0].prompt_ids, requests[3].prompt_ids
    num_endings = sum(len(ending.token_ids) for request in requests for ending in request.endings)
    assert body["usage"]["prompt_tokens"] == sum(map(len, prompts)) + num_endings


@pytest.mark.parametrize("is_begun", [False, True])
async def test_choices_behind_messages(router: Router, is_begun: bool) -> None:
    messages = [{"role": "user", "content": "What does it eat?"}]
    before = "<|im_start|>user\nWhat does it eat?<|im_end|>\n<|im_start|>assistant\n"
    fields: dict[str, Any] = {}
    if is_begun:
        messages.append({"role": "assistant", "content": "It eats"})
        before += "It eats"
        fields = {"continue_final_message": True}
    body = (await router.post(SELECT, messages=messages, choices=CHOICES, **fields)).json()
    (request,) = router.dispatcher.requests
    assert tokens_of(request) == [router.tokens(before + choice) for choice in CHOICES]
    totals = expected_totals(router, before, CHOICES)
    assert [each["logprob"] for each in body["scores"]] == pytest.approx([total for total, _ in totals])


WORDS = st.lists(st.sampled_from([*" abcAB1.,'\n\té東🦦", "otter", " the", "<|im_end|>", "  "]), max_size=12).map(
    "".join
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=WORDS.filter(bool), choices=st.lists(WORDS.filter(bool), min_size=1, max_size=5))
async def test_tokens_are_those_of_the_text_with_the_choice(router: Router, text: str, choices: list[str]) -> None:
    router.dispatcher.handles.clear()
    answer = await router.post(SELECT, prompt=text, choices=choices, normalization="none")
    rows = [router.tokens(text + choice) for choice in choices]
    first = first_difference(router.tokens(text), rows)
    if any(len(row) <= first for row in rows):
        assert answer.status_code == 400 and not router.dispatcher.requests
        return
    assert answer.status_code == 200, answer.text
    (request,) = router.dispatcher.requests
    assert tokens_of(request) == rows
    assert [each["score"] for each in answer.json()["scores"]] == pytest.approx(
        [total for total, _ in expected_totals(router, text, choices)]
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"choices": []}, "choices"),
        ({"choices": "x"}, "choices"),
        ({"choices": ["x", 7]}, "choices"),
        ({"choices": [" x", ""]}, "choices"),
        ({"choices": [" x"] * 1025}, "choices"),
        ({"choices": [" x" * 600]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [1, 2]}, "prompt"),
        ({"prompt": "x " * 600}, "prompt"),
        ({"messages": [{"role": "user", "content": "x"}]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"normalization": "length"}, "normalization"),
        ({"unconditional_prompt": "", "normalization": "unconditional"}, "unconditional_prompt"),
        ({"stream": True}, "stream"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"model": "other"}, "model"),
        ({"priority": "high"}, "priority"),
    ],
)
async def test_bad_input_is_refused_before_anything_is_queued(
    router: Router, fields: dict[str, Any], param: str
) -> None:
    answer = await router.post(SELECT, **({"prompt": TEXT, "choices": CHOICES} | fields))
    assert answer.status_code == (404 if param == "model" else 400), answer.text
    assert answer.json()["error"]["param"] == param
    assert not router.dispatcher.requests


async def test_bad_headers_and_missing_fields(router: Router) -> None:
    headers = {"x-kvrelay-session": "a b"}
    body = {"model": "test-model", "prompt": TEXT, "choices": CHOICES}
    assert (await router.http.post(SELECT, json=body, headers=headers)).status_code == 400
    for name in body:
        answer = await router.http.post(SELECT, json={key: value for key, value in body.items() if key != name})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == name
    assert not router.dispatcher.requests


async def test_texts_that_are_too_long_with_all_choices(text: TextService) -> None:
    async with running_router(text, max_body_bytes=4096) as router:
        router.dispatcher.model_limits = ModelLimits(1 << 20, 1 << 20)
        assert (await router.post(SELECT, prompt="x " * 100, choices=[" a"] * 20)).status_code == 200
        answer = await router.post(SELECT, prompt="x " * 100, choices=[" a"] * 21)
        assert answer.status_code == 400 and "compare fewer" in answer.json()["error"]["message"]


async def test_fields_of_the_request_reach_dispatch(router: Router) -> None:
    body = {
        "prompt": TEXT,
        "choices": CHOICES,
        "cache_salt": "salt",
        "priority": 3,
        "user": "me",
        "model": "test-model",
    }
    headers = {"x-kvrelay-session": "program-1", "x-request-timeout": "7", "x-request-id": "mine"}
    answer = await router.http.post(SELECT, json=body, headers=headers)
    assert answer.json()["id"].startswith("select-mine-")
    (request,) = router.dispatcher.requests
    assert (request.cache_salt, request.priority) == ("salt", 3)
    assert (request.session, request.timeout_s) == ("program-1", 7.0)


async def test_a_client_that_leaves_ends_all_choices(router: Router) -> None:
    router.dispatcher.script = lambda request, sequence: Script([], hang_after=0)
    request = asyncio.create_task(router.post(SELECT, prompt=TEXT, choices=CHOICES))
    await until(lambda: bool(router.dispatcher.handles))
    request.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await request
    await until(lambda: router.dispatcher.handles[0].cancelled_at is not None)
