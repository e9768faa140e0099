"""What suites of other servers and stock clients stumble over."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.component.router.rig import MODEL, Router
from tests.component.router.tools import HELLO

OTTERS = "An otter 🦦👩‍👩‍👧 東京"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
NAMES = re.compile(r"\w+").findall
NOT_SET = {
    CHAT: NAMES(
        "tools tool_choice parallel_tool_calls response_format stream stream_options stop logit_bias seed user "
        "metadata n temperature top_p max_tokens max_completion_tokens logprobs top_logprobs presence_penalty "
        "frequency_penalty store service_tier modalities audio prediction reasoning_effort verbosity functions "
        "web_search_options function_call safety_identifier prompt_cache_key"
    ),
    "/v1/responses": NAMES(
        "instructions tools tool_choice text reasoning metadata include max_output_tokens parallel_tool_calls "
        "previous_response_id store stream stream_options temperature top_p truncation user service_tier background "
        "conversation prompt max_tool_calls prompt_cache_key safety_identifier top_logprobs"
    ),
    "/v1/messages": NAMES(
        "system tools tool_choice thinking stop_sequences temperature top_p top_k stream metadata service_tier "
        "container context_management mcp_servers output_config output_format"
    ),
}


@pytest.mark.parametrize(("path", "body"), [(CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "🦦"})])
async def test_token_ids_of_cut_characters_come_with_some_chunk(router: Router, path: str, body: Any) -> None:
    """Each token ends within a character, so some chunks have ids and others text."""
    router.answers(OTTERS)
    expected = [*router.tokens(OTTERS), *router.tokens("<|im_end|>")]
    chunks = await router.events(path, **body, return_token_ids=True)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert [token_id for choice in choices for token_id in choice.get("token_ids") or []] == expected
    text = "".join(choice["delta"].get("content", "") if path == CHAT else choice["text"] for choice in choices)
    assert text == OTTERS
    prompts = [each["prompt_token_ids"] for each in (*chunks, *choices) if each.get("prompt_token_ids")]
    assert prompts == [router.dispatcher.requests[-1].prompt_ids]
    whole = (await router.post(path, **body, return_token_ids=True)).json()
    assert whole["choices"][0]["token_ids"] == expected
    told = whole if path == CHAT else whole["choices"][0]
    assert told["prompt_token_ids"] == router.dispatcher.requests[-1].prompt_ids


@pytest.mark.parametrize("seed", [0, -1, 2**32, 2**53 + 1, 2**63 - 1, -(2**63)])
async def test_long_seeds_arrive_whole(router: Router, seed: int) -> None:
    for path, body in ((CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "a"}), ("/v1/responses", {"input": "a"})):
        assert (await router.post(path, **body, seed=seed)).status_code == 200
        assert router.dispatcher.requests[-1].sampling.seed == seed


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("logit_bias", {"400": 1}, "Token id 400 is"),
        ("logit_bias", {"7": 1, "401": 1, "400": 1}, "Token ids 401, 400 are"),
        ("logit_bias", {str(400 + number): 1 for number in range(10)}, "407 and 2 more are"),
        ("logit_bias", {"otter": 1, "7": 1, "x": 1}, "'otter', 'x'"),
        ("stop_token_ids", [401, 7, 400], "Token ids 401, 400 are"),
        ("allowed_token_ids", [401, 7, 400], "Token ids 401, 400 are"),
    ],
)
async def test_all_wrong_tokens_are_named(router: Router, field: str, value: Any, says: str) -> None:
    answer = await router.post(COMPLETIONS, prompt="x", **{field: value})
    assert answer.status_code == 400 and says in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", NOT_SET)
async def test_every_field_may_be_null(router: Router, path: str) -> None:
    """Clients that serialize all fields of a request send `null` for those that are not set."""
    body: dict[str, Any] = {"input": "hi"} if path == "/v1/responses" else {"messages": HELLO}
    more = {"max_tokens": 9} if path == "/v1/messages" else {}
    answer = await router.post(path, **dict.fromkeys(NOT_SET[path]), **body, **more)
    assert answer.status_code == 200, answer.text


async def test_the_body_decides(router: Router) -> None:
    router.answers("Hm.")
    chat = await router.post("/invocations", model=MODEL, messages=[{"role": "user", "content": "x"}], max_tokens=9)
    assert chat.json()["object"] == "chat.completion" and chat.json()["choices"][0]["message"]["content"] == "Hm."
    text = await router.post("/invocations", model=MODEL, prompt="x", max_tokens=9)
    assert text.json()["object"] == "text_completion" and text.json()["choices"][0]["text"] == "Hm."
    unnamed = await router.http.post("/invocations", json={"prompt": "x"})
    assert (unnamed.status_code, unnamed.json()["model"]) == (200, MODEL)
    neither = await router.post("/invocations", model=MODEL)
    assert (neither.status_code, neither.json()["error"]["code"]) == (400, "missing_required_parameter")


@pytest.mark.parametrize(
    ("path", "body", "choices"),
    [
        ("/v1/chat/completions", {"messages": HELLO}, [None, "auto", "none"]),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 8}, [None, {"type": "auto"}, {"type": "none"}]),
        ("/v1/responses", {"input": "Hello"}, [None, "auto", "none"]),
        ("/v1/chat/completions/batch", {"messages": [HELLO]}, [None, "auto", "none"]),
    ],
)
async def test_an_empty_list_of_tools_is_none(router: Router, path: str, body: dict[str, Any], choices: Any) -> None:
    """Also of a model that calls none."""
    await router.post(path, **body)
    for choice in choices:
        answer = await router.post(path, **body, tools=[], tool_choice=choice, parallel_tool_calls=False)
        assert answer.status_code == 200, answer.text
    first, *others = router.dispatcher.requests
    assert {tuple(each.prompt_ids) for each in others} == {tuple(first.prompt_ids)}
    assert all(each.sampling.grammar is None for each in others)
