"""No request holds the event loop for long, whatever its largest allowed input or answer."""

from __future__ import annotations

import asyncio
import http.client
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import orjson
import pytest

from kvrelay.text.service import TextService
from kvrelay_router.http.body import MAX_PARTS
from kvrelay_router.openai.chat_request import MAX_MESSAGES
from kvrelay_router.openai.chat_request import MAX_PARTS as MAX_TEXT_PARTS
from tests.component.router.bulk_workers import MODEL, bulk_router
from tests.component.router.loop_holds import LoopHolds, slowness
from tests.fakes.hostile_grammars import ENDLESS
from tests.fakes.waiting import PATIENCE_S

LONGEST_HOLD_S = 0.05
"""On a machine as fast as the reference. Slices are meant to take 5 ms; this is what no single step may exceed."""
LONGEST_PARSE_S = 0.35
"""What parsing and checking a body may take, which is done at once. Four million ids of one digit take longest."""
LONGEST_ANSWER_S = 1.5
"""What writing the log-probabilities of an answer may take: 20 alternatives for each of 16,000 tokens at once."""
ATTEMPTS = 3
"""What an input costs, it costs each time; what the machine does meanwhile (page faults, other guests) it does once."""
BODY_BYTES = 8 << 20
NUM_OBJECTS = MAX_PARTS // 8
"""As many as a body may have if each has up to three strings."""

IDS = [5 + number % 300 for number in range(4096)]


def body_of(**fields: Any) -> bytes:
    return orjson.dumps({"model": MODEL, **fields})


def repeated(before: bytes, item: bytes, after: bytes, most: int = BODY_BYTES) -> bytes:
    """A body with as many items as fit, `most` at most."""
    model = b'{"model":"' + MODEL.encode() + b'",'
    num_items = (BODY_BYTES - len(model) - len(before) - len(after)) // (len(item) + 1)
    return model + before + b",".join([item] * min(num_items, most)) + after


def send(port: int, path: str, body: bytes = b"", request_id: str = "", method: str | None = None) -> int:
    """The status, once the whole answer was read. Blocks."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        headers = {"content-type": "application/json"} | ({"x-request-id": request_id} if request_id else {})
        connection.request(method or ("POST" if body else "GET"), path, body or None, headers)
        answer = connection.getresponse()
        while answer.read(1 << 16):
            pass
        return answer.status
    finally:
        connection.close()


def fetch(port: int, path: str) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        connection.request("GET", path)
        return connection.getresponse().read()
    finally:
        connection.close()


COMPLETION, CHAT, BATCH = "/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch"
SELECT = "/v1/select"
MESSAGES, COUNT, RESPONSES = "/v1/messages", "/v1/messages/count_tokens", "/v1/responses"
TEXT = "An otter is a playful animal. "
USER = b'"max_tokens":1,"messages":[{"role":"user","content":'
MESSAGE = b'{"role":"user","content":"x"}'
TOOL = b'{"type":"function","function":{"name":"f","parameters":{}}}'
CALLS = b'"max_tokens":1,"messages":[{"role":"assistant","tool_calls":['
SCHEMA = b'"response_format":{"type":"json_schema","json_schema":{"name":"x","schema":{"enum":['

Case = tuple[str, Callable[[], bytes], int]
"""Path, body and status."""

INPUTS: dict[str, Case] = {
    "a long text": (COMPLETION, lambda: body_of(prompt=TEXT * 30_000, max_tokens=1), 200),
    "a list of ids": (COMPLETION, lambda: body_of(prompt=IDS * 200, max_tokens=1), 200),
    "too many ids": (COMPLETION, lambda: repeated(b'"prompt":[', b"7", b"]}"), 400),
    "a text and many long lists of ids": (
        COMPLETION,
        lambda: repeated(b'"max_tokens":1,"prompt":["x",', b"[" + b",".join([b"7"] * (1 << 16)) + b"]", b"]}"),
        200,
    ),
    "too many lists": (COMPLETION, lambda: repeated(b'"prompt":[', b"[]", b"]}"), 400),
    "a thousand prompts": (COMPLETION, lambda: body_of(prompt=["An otter"] * 1024, max_tokens=1), 200),
    "a thousand streams": (COMPLETION, lambda: body_of(prompt=["An otter"] * 1024, max_tokens=1, stream=True), 200),
    "too many prompts": (COMPLETION, lambda: repeated(b'"prompt":[', b'"x"', b"]}", MAX_PARTS - 8), 400),
    "a thousand items to score": (
        "/generative_scoring",
        lambda: body_of(query=TEXT, items=["An otter"] * 1024, label_token_ids=[7, 8]),
        200,
    ),
    "items of long texts": (
        "/generative_scoring",
        lambda: body_of(query=TEXT * 1000, items=[TEXT * 200] * 1000, label_token_ids=[7]),
        200,
    ),
    "stop strings": (COMPLETION, lambda: repeated(b'"prompt":"x","stop":[', b'"x"', b"]}", NUM_OBJECTS), 400),
    "stop tokens": (COMPLETION, lambda: repeated(b'"prompt":"x","stop_token_ids":[', b"1", b"]}"), 400),
    "biases": (COMPLETION, lambda: body_of(prompt="x", logit_bias={str(n): 1 for n in range(400_000)}), 400),
    "biases of many prompts": (
        COMPLETION,
        lambda: body_of(prompt=["x"] * 1024, max_tokens=1, logit_bias={str(n): 1 for n in range(1024)}),
        200,
    ),
    "allowed tokens": (COMPLETION, lambda: repeated(b'"prompt":"x","allowed_token_ids":[', b"1", b"]}"), 400),
    "allowed tokens of many prompts": (
        COMPLETION,
        lambda: body_of(prompt=["x"] * 256, max_tokens=1, allowed_token_ids=[n % 2000 for n in range(16_384)]),
        200,
    ),
    "bad words": (COMPLETION, lambda: repeated(b'"prompt":"x","bad_words":[', b'"x"', b"]}", NUM_OBJECTS), 400),
    "bad words of many prompts": (
        COMPLETION,
        lambda: body_of(prompt=["x"] * 1024, max_tokens=1, bad_words=[f"otter {n}" * 20 for n in range(1024)]),
        200,
    ),
    "values to choose from": (
        COMPLETION,
        lambda: body_of(prompt="x", max_tokens=1, guided_json={"enum": [*range(15_000)]}),
        200,
    ),
    "a long constant": (
        COMPLETION,
        lambda: body_of(prompt="x", max_tokens=1, guided_json={"const": "words and more " * 8000}),
        200,
    ),
    "a schema that is deep": (
        COMPLETION,
        lambda: body_of(prompt="x", guided_json='{"items":' * 10_000 + "{}" + "}" * 10_000),
        400,
    ),
    "combinations": (
        COMPLETION,
        lambda: body_of(
            prompt="x",
            guided_json={"allOf": [{"anyOf": [{"required": [f"{n} {k}"]} for k in range(9)]} for n in range(9)]},
        ),
        400,
    ),
    "an expression with many states": (
        COMPLETION,
        lambda: body_of(prompt="x", max_tokens=1, guided_regex="(a+)+(a|aa)*(.*.*)*b{1000}(.*a.{15}){3}"),
        200,
    ),
    "repetitions": (COMPLETION, lambda: body_of(prompt="x", guided_regex="((((a{99}){99}){99}){99}){99}"), 400),
    "brackets": (COMPLETION, lambda: b'{"model":' + b"[" * (BODY_BYTES - 20), 400),
    "a list": (COMPLETION, lambda: b"[" + b"{}," * (MAX_PARTS - 8) + b"{}]", 400),
    "a schema": (CHAT, lambda: repeated(USER + b'"x"}],' + SCHEMA, b'"x"', b"]}}}}", NUM_OBJECTS), 400),
    "a long message": (CHAT, lambda: body_of(messages=[{"role": "user", "content": TEXT * 30_000}], max_tokens=1), 200),
    "messages": (CHAT, lambda: repeated(b'"max_tokens":1,"messages":[', MESSAGE, b"]}", MAX_MESSAGES), 200),
    "many conversations": (
        BATCH,
        lambda: repeated(
            b'"max_tokens":1,"messages":[', b"[" + b",".join([MESSAGE] * (NUM_OBJECTS // 1024)) + b"]", b"]}", 1024
        ),
        200,
    ),
    "too many messages": (CHAT, lambda: repeated(b'"max_tokens":1,"messages":[', MESSAGE, b"]}"), 400),
    "text parts": (CHAT, lambda: repeated(USER + b"[", b'{"type":"text","text":"x"}', b"]}]}", MAX_TEXT_PARTS), 200),
    "too many tools": (
        CHAT,
        lambda: repeated(USER + b'"x"}],"tool_choice":"none","tools":[', TOOL, b"]}", NUM_OBJECTS // 4),
        400,
    ),
    "tool calls": (CHAT, lambda: repeated(CALLS, b'{"function":{"name":"f"}}', b"]}]}", NUM_OBJECTS), 400),
    "arguments as text": (
        CHAT,
        lambda: repeated(CALLS + b'{"function":{"name":"f","arguments":"[', b"{}", b']"}}]}]}'),
        400,
    ),
    "template variables": (
        CHAT,
        lambda: repeated(USER + b'"x"}],"chat_template_kwargs":{"a":[', b"{}", b"]}}", NUM_OBJECTS),
        200,
    ),
    "choices behind a text": (SELECT, lambda: body_of(prompt=TEXT * 250, choices=[f" {n}." for n in range(1024)]), 200),
    "long choices": (SELECT, lambda: body_of(prompt="x", choices=[f"{n}{TEXT * 250}" for n in range(1024)]), 200),
    "choices that begin alike": (
        SELECT,
        lambda: body_of(prompt="x", choices=[f"{TEXT * 250}{n}" for n in range(1024)]),
        200,
    ),
    "choices behind messages": (
        SELECT,
        lambda: body_of(messages=[{"role": "user", "content": TEXT * 250}], choices=[f" {n}." for n in range(1024)]),
        200,
    ),
    "choices behind a text that is too long": (
        SELECT,
        lambda: body_of(prompt=TEXT * 30_000, choices=["a"] * 1024),
        400,
    ),
    "tokenize": ("/tokenize", lambda: body_of(prompt=TEXT * 30_000), 200),
    "tokenize messages": ("/tokenize", lambda: repeated(b'"messages":[', MESSAGE, b"]}", MAX_MESSAGES), 200),
    "detokenize": ("/detokenize", lambda: repeated(b'"tokens":[', b"260", b"]}"), 200),
    "turns of one role": (MESSAGES, lambda: repeated(b'"max_tokens":1,"messages":[', MESSAGE, b"]}", NUM_OBJECTS), 400),
    "content blocks": (
        MESSAGES,
        lambda: repeated(USER + b"[", b'{"type":"text","text":"x"}', b"]}]}", NUM_OBJECTS),
        400,
    ),
    "tools of a message": (
        MESSAGES,
        lambda: repeated(USER + b'"x"}],"tools":[', b'{"name":"f","input_schema":{}}', b"]}", NUM_OBJECTS // 2),
        400,
    ),
    "counted content blocks": (
        COUNT,
        lambda: repeated(USER + b"[", b'{"type":"text","text":"x"}', b"]}]}", MAX_TEXT_PARTS),
        200,
    ),
    "input items to count": (
        f"{RESPONSES}/input_tokens",
        lambda: repeated(b'"input":[', MESSAGE, b"]}", MAX_MESSAGES),
        200,
    ),
    "tokens of a chat": (CHAT, lambda: repeated(b'"prompt_token_ids":[', b"7", b"]}"), 400),
    "input items": (RESPONSES, lambda: repeated(b'"max_output_tokens":1,"input":[', MESSAGE, b"]}", MAX_MESSAGES), 200),
    "content parts of an item": (
        RESPONSES,
        lambda: repeated(
            b'"input":[{"role":"user","content":[', b'{"type":"input_text","text":"x"}', b"]}]}", NUM_OBJECTS
        ),
        400,
    ),
    "tools of a response": (
        RESPONSES,
        lambda: repeated(b'"input":"x","tools":[', b'{"type":"function","name":"f"}', b"]}", NUM_OBJECTS),
        400,
    ),
    "an invocation": ("/invocations", lambda: body_of(prompt=TEXT * 30_000, max_tokens=1), 200),
}


def response_with_scores(*, stream: bool) -> bytes:
    return body_of(input="x", max_output_tokens=16_000, top_logprobs=20, stream=stream)


def chat_with_scores(*, stream: bool) -> bytes:
    messages = [{"role": "user", "content": "x"}]
    return body_of(messages=messages, max_tokens=16_000, logprobs=True, top_logprobs=20, stream=stream)


def text_with_scores(*, stream: bool) -> bytes:
    return body_of(prompt="x", max_tokens=16_000, logprobs=20, stream=stream)


def choices_with_scores(*, stream: bool) -> bytes:
    return body_of(prompt="x", n=128, max_tokens=250, logprobs=20, stream=stream)


def long_message(*, stream: bool) -> bytes:
    return body_of(messages=[{"role": "user", "content": "x"}], max_tokens=16_000, stream=stream)


OUTPUTS: dict[str, Case] = {
    "choices": (COMPLETION, lambda: body_of(prompt=IDS[:64], n=128, max_tokens=16_000), 200),
    "choices of many prompts": (COMPLETION, lambda: body_of(prompt=[IDS[:64]] * 8, n=128, max_tokens=1000), 200),
    "streamed choices": (
        COMPLETION,
        lambda: body_of(prompt=IDS[:64], n=128, max_tokens=5000, stream=True, return_token_ids=True),
        200,
    ),
    "streamed choices with the ids of a long prompt": (
        CHAT,
        lambda: body_of(
            messages=[{"role": "user", "content": TEXT * 2500}],
            n=128,
            max_tokens=10,
            stream=True,
            return_token_ids=True,
        ),
        200,
    ),
    "streamed choices with the text of a long prompt": (
        COMPLETION,
        lambda: body_of(prompt=IDS * 25, n=128, max_tokens=10, stream=True, echo=True),
        200,
    ),
    "streamed choices with the ids of a long prompt, as texts": (
        COMPLETION,
        lambda: body_of(prompt=IDS * 14, n=128, max_tokens=10, stream=True, return_token_ids=True),
        200,
    ),
    "scores of a response": (RESPONSES, lambda: response_with_scores(stream=False), 200),
    "streamed scores of a response": (RESPONSES, lambda: response_with_scores(stream=True), 200),
    "scores of a chat": (CHAT, lambda: chat_with_scores(stream=False), 200),
    "streamed scores of a chat": (CHAT, lambda: chat_with_scores(stream=True), 200),
    "scores of a text": (COMPLETION, lambda: text_with_scores(stream=False), 200),
    "streamed scores of a text": (COMPLETION, lambda: text_with_scores(stream=True), 200),
    "scores of many choices": (COMPLETION, lambda: choices_with_scores(stream=False), 200),
    "streamed scores of many choices": (COMPLETION, lambda: choices_with_scores(stream=True), 200),
    "a long message of an assistant": (MESSAGES, lambda: long_message(stream=False), 200),
    "a long streamed message of an assistant": (MESSAGES, lambda: long_message(stream=True), 200),
    "beams": (COMPLETION, lambda: body_of(prompt="x", max_tokens=8000, n=128, use_beam_search=True), 200),
    "scores of a long prompt": (COMPLETION, lambda: body_of(prompt=IDS * 11, max_tokens=1, prompt_logprobs=0), 200),
    "echoed scores with alternatives": (
        COMPLETION,
        lambda: body_of(prompt=IDS * 11, max_tokens=1, echo=True, logprobs=5),
        200,
    ),
    "streamed scores with alternatives": (
        COMPLETION,
        lambda: body_of(prompt=IDS * 11, max_tokens=1, echo=True, logprobs=20, stream=True),
        200,
    ),
}

REQUEST_ID = "many"
LONG_NAME = "x" * 30_000
OPERATIONS: dict[str, tuple[str, int]] = {
    "a request": (f"/requests/{REQUEST_ID}", 200),
    "a request by the id of its answer": (f"/requests/cmpl-{REQUEST_ID}", 200),
    "an unknown request": (f"/requests/{LONG_NAME}", 404),
    "a timeline": (f"/requests/{REQUEST_ID}/timeline", 200),
    "an unknown timeline": (f"/requests/{LONG_NAME}/timeline", 404),
    "requests": ("/requests", 200),
    "fleet": ("/fleet", 200),
    "models": ("/v1/models", 200),
    "a model": (f"/v1/models/{MODEL}", 200),
    "the items of an unknown response": (f"/v1/responses/{LONG_NAME}/input_items", 404),
    "an unknown response": (f"/v1/responses/{LONG_NAME}", 404),
    "an unknown model": (f"/v1/models/{LONG_NAME}", 404),
    "health": ("/health", 200),
    "ping": ("/ping", 200),
    "ready": ("/ready", 200),
    "version": ("/version", 200),
    "the page of the fleet": ("/dashboard", 200),
    "the API's schema": ("/openapi.json", 200),
    "the API's page": ("/docs", 200),
}
DELETIONS: dict[str, tuple[str, int]] = {
    "a session": ("/sessions/one", 204),
    "many sessions": ("/sessions?" + "&".join(f"session={number:0128}" for number in range(256)), 204),
    "a session of an invalid name": (f"/sessions/{LONG_NAME}", 400),
}
MANY: dict[str, bytes] = {
    "prompts": body_of(prompt=["An otter"] * 1024, max_tokens=1),
    "choices": body_of(prompt=["An otter"] * 8, n=128, max_tokens=1),
}
"""The most sequences that one request may have."""


async def check_holds(port: int, case: Case, most_s: float = LONGEST_HOLD_S) -> None:
    path, make_body, status = case
    body = make_body()
    assert len(body) <= BODY_BYTES
    await check_held(lambda: send(port, path, body), status, most_s)


async def check_held(ask: Callable[[], int], status: int, most_s: float = LONGEST_HOLD_S) -> None:
    longest_s = []
    for _ in range(ATTEMPTS):
        with LoopHolds() as holds:
            found = await asyncio.to_thread(ask)
        assert found == status
        longest_s.append(holds.longest_s)
        if holds.longest_s < most_s * slowness():
            return
    raise AssertionError(f"the loop was held for {longest_s} s")


@pytest.mark.everyday(3)
@pytest.mark.parametrize("name", list(INPUTS))
async def test_no_input_holds_the_loop(name: str, text: TextService) -> None:
    async with bulk_router(text) as port:
        await check_holds(port, INPUTS[name], LONGEST_PARSE_S)


@pytest.mark.everyday(2)
@pytest.mark.parametrize("name", list(ENDLESS))
async def test_no_grammar_holds_the_loop(name: str, text: TextService) -> None:
    strict = TextService(text.tokenizer, text.template, max_grammar_cpu_s=0.2)
    try:
        async with bulk_router(strict) as port:
            await check_holds(port, (COMPLETION, lambda: body_of(prompt="x", **ENDLESS[name]), 400))
    finally:
        strict.close()


@pytest.mark.everyday(2)
@pytest.mark.parametrize("name", list(OUTPUTS))
async def test_no_answer_holds_the_loop(name: str, text: TextService) -> None:
    async with bulk_router(text) as port:
        await check_holds(port, OUTPUTS[name], LONGEST_ANSWER_S)


@pytest.mark.everyday(1)
@pytest.mark.parametrize("many", list(MANY))
async def test_no_operation_holds_the_loop(many: str, text: TextService) -> None:
    async with bulk_router(text) as port:
        assert await asyncio.to_thread(send, port, COMPLETION, MANY[many], REQUEST_ID) == 200
        asked = [("GET", *case) for case in OPERATIONS.values()]
        asked += [("DELETE", *case) for case in DELETIONS.values()]
        for method, path, status in asked:
            await check_held(partial(send, port, path, method=method), status)


async def test_every_path_is_asked(text: TextService) -> None:
    """A new endpoint needs a case above."""
    posted = {path for path, _, _ in [*INPUTS.values(), *OUTPUTS.values()]}
    asked = [path.partition("?")[0] for path, _ in [*OPERATIONS.values(), *DELETIONS.values()]] + list(posted)
    async with bulk_router(text) as port:
        schema = orjson.loads(await asyncio.to_thread(fetch, port, "/openapi.json"))
    for path in schema["paths"]:
        pattern = re.compile(re.sub(r"\{[^}]*\}", ".+", path))
        assert any(pattern.fullmatch(each) for each in asked), path
