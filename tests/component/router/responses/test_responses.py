"""OpenAI's Responses API over HTTP, as the stock client sees it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel

from kvrelay.protocol.sampling import FinishReason
from tests.component.router.rig import MODEL, Router

QUESTION = "What is an otter?"
FORMAT = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}
PROMPT = "<|im_start|>user\nWhat is an otter?<|im_end|>\n<|im_start|>assistant\n"


async def streamed(router: Router, **body: Any) -> list[dict[str, Any]]:
    events = await router.typed_events("/v1/responses", **{"input": QUESTION, **body})
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


async def test_a_plain_answer(router: Router) -> None:
    response = await router.openai.responses.create(
        model=MODEL, input=QUESTION, instructions="Be brief.", metadata={"a": "b"}, user="me"
    )
    (request,) = router.dispatcher.requests
    assert request.prompt_ids == router.tokens("<|im_start|>system\nBe brief.<|im_end|>\n" + PROMPT)
    assert request.session == "me"
    assert (response.object, response.status, response.model) == ("response", "completed", MODEL)
    assert response.id.startswith("resp_") and response.error is None and response.incomplete_details is None
    assert (response.instructions, response.metadata, response.max_output_tokens) == ("Be brief.", {"a": "b"}, None)
    assert response.output_text == "An otter is a mammal."
    (item,) = response.output
    assert item.type == "message" and (item.role, item.status) == ("assistant", "completed")
    assert response.usage is not None
    assert response.usage.input_tokens == len(request.prompt_ids)
    assert response.usage.input_tokens_details.cached_tokens == 16
    assert response.usage.output_tokens == len(router.tokens("An otter is a mammal.")) + 1
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens


async def test_a_stream_has_all_events_in_their_order(router: Router) -> None:
    router.answers("An otter 🦦 is a mammal.")
    events = await streamed(router)
    kinds = [event["type"] for event in events]
    num_deltas = kinds.count("response.output_text.delta")
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * num_deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    text = "".join([event["delta"] for event in events if event["type"] == "response.output_text.delta"])
    done, part, item, completed = events[-4:]
    assert text == done["text"] == part["part"]["text"] == "An otter 🦦 is a mammal."
    assert item["item"]["content"] == [part["part"]]
    assert completed["response"]["output"] == [item["item"]]
    assert {event["item_id"] for event in events if "item_id" in event} == {item["item"]["id"]}
    plain = (await router.post("/v1/responses", input=QUESTION)).json()
    for response in (plain, completed["response"]):
        for name in ("id", "created_at"):
            del response[name]
        del response["output"][0]["id"]
    assert plain == completed["response"]


class Animal(BaseModel):
    name: str
    legs: int


async def test_structured_output_is_parsed_by_the_client(router: Router) -> None:
    router.answers('{"name": "otter", "legs": 4}')
    response = await router.openai.responses.parse(model=MODEL, input=QUESTION, text_format=Animal)
    assert response.output_parsed == Animal(name="otter", legs=4)
    grammar = router.dispatcher.requests[0].sampling.grammar
    assert grammar is not None and json.loads(grammar.text)["required"] == ["name", "legs"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_text_that_is_cut_is_incomplete(router: Router, stream: bool) -> None:
    router.answers("An otter", finish=FinishReason.LENGTH)
    if stream:
        last = (await streamed(router, max_output_tokens=5))[-1]
        assert last["type"] == "response.incomplete"
        response = last["response"]
    else:
        response = (await router.post("/v1/responses", input=QUESTION, max_output_tokens=5)).json()
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert response["output"][0]["status"] == "incomplete"
    assert router.dispatcher.requests[0].sampling.max_tokens == 5


async def test_an_empty_answer_is_an_empty_text(router: Router) -> None:
    router.answers("")
    plain = (await router.post("/v1/responses", input=QUESTION)).json()
    last = (await streamed(router))[-1]["response"]
    assert [item["content"][0]["text"] for item in (*plain["output"], *last["output"])] == ["", ""]


async def test_logprobs(router: Router) -> None:
    body: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    plain = (await router.post("/v1/responses", input=QUESTION, **body)).json()
    scores = plain["output"][0]["content"][0]["logprobs"]
    assert b"".join([bytes(each["bytes"]) for each in scores[:-1]]).decode() == "An otter is a mammal."
    assert [len(each["top_logprobs"]) for each in scores] == [2] * len(scores)
    events = await streamed(router, **body)
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == scores
    of_deltas = [each for event in events if event["type"].endswith("text.delta") for each in event["logprobs"]]
    assert of_deltas == scores[: len(of_deltas)] and len(of_deltas) >= len(scores) - 1


@pytest.mark.parametrize("is_kept", [False, True])
async def test_stop_strings_and_sampling_that_openai_lacks(router: Router, is_kept: bool) -> None:
    body: dict[str, Any] = {"stop": [" is"], "include_stop_str_in_output": is_kept, "top_k": 5, "min_p": 0.25}
    plain = await router.openai.responses.create(model=MODEL, input=QUESTION, extra_body=body)
    last = (await streamed(router, **body))[-1]["response"]
    text = "An otter is" if is_kept else "An otter"
    assert plain.output_text == last["output"][0]["content"][0]["text"] == text
    assert plain.status == last["status"] == "completed"
    assert [(each.sampling.top_k, each.sampling.min_p) for each in router.dispatcher.requests] == [(5, 0.25)] * 2


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"input": None}, "input", "invalid_value"),
        ({"input": []}, "input", "invalid_value"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]", "invalid_value"),
        ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
        ({"max_output_tokens": 100_000}, "max_output_tokens", "context_length_exceeded"),
        ({"temperature": 3}, "temperature", "invalid_value"),
        ({"top_logprobs": 21}, "top_logprobs", "invalid_value"),
        ({"top_k": 1.5}, "top_k", "invalid_type"),
        ({"stop": ""}, "stop", "invalid_value"),
        ({"background": True}, "background", "unsupported_parameter"),
        ({"conversation": "conv_1"}, "conversation", "unsupported_parameter"),
        ({"previous_response": {"id": "resp_1"}}, "previous_response", "unsupported_parameter"),
        ({"previous_input_messages": [{"role": "user"}]}, "previous_input_messages", "unsupported_parameter"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "previous_response_not_found"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "invalid_value"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "invalid_value"),
        ({"metadata": {"a": 7}}, "metadata.a", "invalid_type"),
        ({"metadata": {"a": "x" * 513}}, "metadata.a", "invalid_value"),
        ({"metadata": {"x" * 65: "a"}}, f"metadata.{'x' * 65}.[key]", "invalid_value"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "invalid_value"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "invalid_value"),
        ({"tools": [{"type": "function", "name": "f"}] * 2}, "tools", "invalid_value"),
        (
            {"tools": [{"type": "function", "name": "f", "parameters": {"type": "array"}}]},
            "tools",
            "invalid_value",
        ),
        (
            {"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]},
            "input[0].call_id",
            "invalid_value",
        ),
        ({"input": [{"type": "otter"}]}, "input[0].type", "invalid_value"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"tools": [], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "invalid_value"),
        ({"tool_choice": "always"}, "tool_choice", "invalid_value"),
        ({"text": {"format": {**FORMAT, "schema": {"type": "otter"}}}}, "text.format", None),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": 7}]},
            "input[0].arguments",
            "invalid_value",
        ),
        ({"input": "x" * 5000}, "input", "context_length_exceeded"),
    ],
)
async def test_bad_input(router: Router, body: dict[str, Any], param: str, code: str | None) -> None:
    answer = await router.post("/v1/responses", **{"input": QUESTION, **body})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code), error
    assert router.dispatcher.requests == []
