"""Anthropic's Messages API over HTTP."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvrelay.protocol.sampling import FinishReason
from tests.component.router.rig import MODEL, Router

HELLO: list[Any] = [{"role": "user", "content": "What is an otter?"}]
PROMPT = "<|im_start|>user\nWhat is an otter?<|im_end|>\n<|im_start|>assistant\n"


async def created(router: Router, **body: Any) -> dict[str, Any]:
    answer = await router.post("/v1/messages", **{"messages": HELLO, "max_tokens": 64, **body})
    assert answer.status_code == 200, answer.text
    message: dict[str, Any] = answer.json()
    return message


async def streamed(router: Router, **body: Any) -> list[dict[str, Any]]:
    return await router.typed_events("/v1/messages", **{"messages": HELLO, "max_tokens": 64, **body})


async def test_a_plain_answer(router: Router) -> None:
    message = await created(router, system="Be brief.", metadata={"user_id": "me"})
    (request,) = router.dispatcher.requests
    prompt = "<|im_start|>system\nBe brief.<|im_end|>\n" + PROMPT
    assert request.prompt_ids == router.tokens(prompt)
    assert (request.sampling.max_tokens, request.session) == (64, "me")
    assert message.pop("id").startswith("msg_")
    num_output = len(router.tokens("An otter is a mammal.")) + 1
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [{"type": "text", "text": "An otter is a mammal."}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": len(request.prompt_ids) - 16,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 16,
            "output_tokens": num_output,
        },
    }


async def test_a_stream_has_all_events_in_their_order(router: Router) -> None:
    events = await streamed(router)
    plain = await created(router)
    kinds = [event["type"] for event in events]
    num_deltas = kinds.count("content_block_delta")
    assert kinds == [
        "message_start",
        "content_block_start",
        "ping",
        *["content_block_delta"] * num_deltas,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    start = events[0]["message"]
    assert (start["content"], start["stop_reason"], start["role"]) == ([], None, "assistant")
    assert start["usage"] == {**plain["usage"], "output_tokens": 0}
    text = "".join([event["delta"]["text"] for event in events if event["type"] == "content_block_delta"])
    assert [{"type": "text", "text": text}] == plain["content"]
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2]["usage"] == plain["usage"]


async def test_an_empty_answer_has_no_block(router: Router) -> None:
    router.answers("")
    assert (await created(router))["content"] == []
    assert [event["type"] for event in await streamed(router)] == ["message_start", "message_delta", "message_stop"]


@pytest.mark.parametrize(
    ("output", "body", "finish", "expected"),
    [
        ("the END of it", {"stop_sequences": ["END"]}, None, ("stop_sequence", "END")),
        ("An otter", {"max_tokens": 3}, FinishReason.LENGTH, ("max_tokens", None)),
        ("An otter", {"max_tokens": 100_000}, FinishReason.LENGTH, ("model_context_window_exceeded", None)),
        ("An otter", {}, None, ("end_turn", None)),
    ],
)
async def test_why_an_output_ends(
    router: Router, output: str, body: dict[str, Any], finish: FinishReason | None, expected: tuple[str, str | None]
) -> None:
    router.answers(output, **({"finish": finish} if finish is not None else {}))
    if finish is FinishReason.LENGTH and body["max_tokens"] == 3:
        body = {"max_tokens": len(router.tokens(output))}
    plain, events = await created(router, **body), await streamed(router, **body)
    assert (plain["stop_reason"], plain["stop_sequence"]) == expected
    assert events[-2]["delta"] == {"stop_reason": expected[0], "stop_sequence": expected[1]}


async def test_a_last_message_of_the_assistant_is_continued(router: Router) -> None:
    await created(router, messages=[*HELLO, {"role": "assistant", "content": "An otter"}])
    assert router.dispatcher.requests[0].prompt_ids == router.tokens(PROMPT + "An otter")


async def test_tokens_are_counted(router: Router) -> None:
    answer = await router.post("/v1/messages/count_tokens", messages=HELLO, system="Be brief.")
    prompt = "<|im_start|>system\nBe brief.<|im_end|>\n" + PROMPT
    assert answer.json() == {"input_tokens": len(router.tokens(prompt))}
    assert router.dispatcher.requests == []


async def test_a_hash_in_the_system_text_does_not_change_the_prompt(router: Router) -> None:
    for cch in ("8ae40", "4e20a"):
        header = f"x-anthropic-billing-header: cc_version=2.1; cch={cch};"
        await created(router, system=[{"type": "text", "text": header}, {"type": "text", "text": "Be brief."}])
    first, second = router.dispatcher.requests
    assert first.prompt_ids == second.prompt_ids


async def test_output_formats_and_extensions(router: Router) -> None:
    router.answers("{}")
    schema = {"type": "object", "properties": {}}
    output = {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
    await created(router, **output, seed=7, min_p=0.5, top_k=5, thinking={"type": "disabled"})
    sampling = router.dispatcher.requests[0].sampling
    assert sampling.grammar is not None and json.loads(sampling.grammar.text) == schema
    assert (sampling.seed, sampling.min_p, sampling.top_k) == (7, 0.5, 5)


@pytest.mark.parametrize(
    ("body", "status", "kind", "says"),
    [
        ({"model": "other"}, 404, "not_found_error", "does not exist"),
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
        ({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens"),
        ({"messages": []}, 400, "invalid_request_error", "messages"),
        ({"messages": [{"role": "user", "content": []}]}, 400, "invalid_request_error", "empty"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            400,
            "invalid_request_error",
            "'image'",
        ),
        ({"system": 7}, 400, "invalid_request_error", "system"),
        ({"stop_sequences": [""]}, 400, "invalid_request_error", "stop_sequences"),
        ({"temperature": "1"}, 400, "invalid_request_error", "temperature"),
        ({"thinking": {"type": "deep"}}, 400, "invalid_request_error", "thinking.type"),
        ({"thinking": True}, 400, "invalid_request_error", "thinking"),
        ({"metadata": {"user_id": 7}}, 400, "invalid_request_error", "user"),
        ({"mcp_servers": [{"url": "x"}]}, 400, "invalid_request_error", "mcp_servers"),
        ({"tools": [{"name": "f"}]}, 400, "invalid_request_error", "input_schema"),
        ({"tools": [{"input_schema": {}}]}, 400, "invalid_request_error", "tools.0"),
        ({"output_config": {"format": {"type": "xml"}}}, 400, "invalid_request_error", "output_config.format"),
        ({"chat_template_kwargs": 7}, 400, "invalid_request_error", "chat_template_kwargs"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, 400, "invalid_request_error", "context"),
    ],
)
async def test_errors_have_the_form_of_the_api(
    router: Router, body: dict[str, Any], status: int, kind: str, says: str
) -> None:
    answer = await router.post("/v1/messages", **{"messages": HELLO, "max_tokens": 64, **body})
    error = answer.json()
    assert (answer.status_code, error["type"], error["error"]["type"]) == (status, "error", kind), error
    assert says in error["error"]["message"]
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    assert router.dispatcher.requests == []


async def test_keys_come_in_either_header(make_router: Any) -> None:
    async with make_router(api_keys=("k3y",)) as router:
        body = {"model": MODEL, "messages": HELLO, "max_tokens": 8}

        async def status(**headers: str) -> int:
            answer = await router.http.post("/v1/messages", json=body, headers=headers)
            if answer.status_code != 200:
                assert answer.json()["error"]["type"] == "authentication_error"
            code: int = answer.status_code
            return code

        assert await status(**{"x-api-key": "k3y"}) == 200
        assert await status(authorization="Bearer k3y") == 200
        assert await status(**{"x-api-key": "k3y", "authorization": "Bearer another"}) == 200
        assert await status(**{"x-api-key": "wrong"}) == 401
        assert await status() == 401
        models = await router.http.get("/v1/models", headers={"x-api-key": "k3y"})
        assert models.status_code == 200
