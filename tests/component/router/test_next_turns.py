"""What a model wrote is the same in one piece and streamed, and the same API takes it back in the next turn."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from kvrelay.protocol.sampling import FinishReason
from kvrelay.text.request.validation import ModelLimits
from kvrelay.text.service import TextService
from tests.component.router.rig import Router, running_router
from tests.component.router.tools import HELLO
from tests.fakes.call_families import FAMILIES, TOOLS
from tests.fakes.random_outputs import random_output
from tests.fakes.scripted_dispatcher import Script
from tests.fakes.text_model import write_text_model
from tests.thoroughness import examples

TEMPLATE = (
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.reasoning_content or '' }}{{ m.content }}"
    "{%- for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{%- for k, v in c.function.arguments.items() %}{{ k }}={{ v | string }}{% endfor %}{% endfor %}<|im_end|>\n"
    "{%- endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{# </think> tool #}"
)
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
CHAT_TOOLS = [{"type": "function", "function": {"name": each.name, "parameters": each.parameters}} for each in TOOLS]
RESPONSE_TOOLS = [{"type": "function", **tool["function"]} for tool in CHAT_TOOLS]  # type: ignore[dict-item]
MESSAGE_TOOLS = [{"name": each.name, "input_schema": {"type": "object", **each.parameters}} for each in TOOLS]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_text_model(tmp_path_factory.mktemp("model"), TEMPLATE))


@pytest.fixture(params=sorted({family.parser for family in FAMILIES.values()}))
def service(model: str, request: pytest.FixtureRequest) -> Iterator[TextService]:
    harmony = request.param == "harmony"
    loaded = TextService.load(
        model, tool_parser=request.param, reasoning_parser="harmony" if harmony else "think", max_grammar_cpu_s=60.0
    )
    yield loaded
    loaded.close()


async def taken(router: Router, path: str, body: dict[str, Any], output: Any) -> None:
    answer = await router.post(path, **body)
    assert answer.status_code == 200, (output, answer.text)


def is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


async def chat(router: Router, output: Any) -> Any:
    body: dict[str, Any] = {"messages": HELLO, "tools": CHAT_TOOLS}
    (choice,) = (await router.post(CHAT, **body)).json()["choices"]
    message = choice["message"]
    calls = message.get("tool_calls", [])
    text: dict[str, str] = {"content": "", "reasoning": ""}
    arguments, names = [""] * len(calls), [""] * len(calls)
    for chunk in await router.events(CHAT, **body):
        delta = chunk["choices"][0]["delta"]
        for name in text:
            text[name] += delta.get(name) or ""
        for part in delta.get("tool_calls", ()):
            names[part["index"]] += part["function"].get("name") or ""
            arguments[part["index"]] += part["function"]["arguments"]
    assert text == {name: message.get(name) or "" for name in text}, output
    assert list(zip(names, arguments, strict=True)) == [tuple(call["function"].values()) for call in calls], output
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "7"} for call in calls]
    await taken(router, CHAT, {**body, "messages": [*HELLO, message, *results, *HELLO]}, output)
    return text["content"], list(zip(names, arguments, strict=True)), choice["finish_reason"]


def bare(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]


async def response(router: Router, output: Any) -> Any:
    body: dict[str, Any] = {"input": HELLO, "tools": RESPONSE_TOOLS}
    whole = (await router.post(RESPONSES, **body)).json()
    events = await router.typed_events(RESPONSES, **body)
    assert bare(events[-1]["response"]["output"]) == bare(whole["output"]), output
    texts = [""] * len(whole["output"])
    for event in events:
        if event["type"].endswith(".delta"):
            texts[event["output_index"]] += event["delta"]
    calls = [(item["name"], item["arguments"]) for item in whole["output"] if item["type"] == "function_call"]
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "7"}
        for item in whole["output"]
        if item["type"] == "function_call"
    ]
    await taken(router, RESPONSES, {**body, "input": [*HELLO, *whole["output"], *results, *HELLO]}, output)
    await taken(router, RESPONSES, {**body, "input": [*results, *HELLO], "previous_response_id": whole["id"]}, output)
    content = [text for text, item in zip(texts, whole["output"], strict=True) if item["type"] == "message"]
    assert content == [item["content"][0]["text"] for item in whole["output"] if item["type"] == "message"]
    return "".join(content), calls, whole["status"]


async def message(router: Router, output: Any) -> Any:
    body: dict[str, Any] = {"messages": HELLO, "tools": MESSAGE_TOOLS, "max_tokens": 4000}
    raw = await router.post(MESSAGES, **body)
    whole = raw.json()
    texts: list[str] = []
    for event in await router.typed_events(MESSAGES, **body):
        if event["type"] == "content_block_start":
            texts.append("")
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            texts[event["index"]] += delta.get("partial_json", delta.get("text", ""))
    calls = []
    for text, block in zip(texts, whole["content"], strict=True):
        if block["type"] == "tool_use":
            assert block["input"] == (json.loads(text or "{}") if is_object(text or "{}") else {"arguments": text})
            calls.append((block["name"], text))
        else:
            assert block["text"] == text, output
    uses = [block["id"] for block in whole["content"] if block["type"] == "tool_use"]
    results: list[Any] = [{"type": "tool_result", "tool_use_id": each, "content": "7"} for each in uses]
    turn = {"role": "user", "content": [*results, {"type": "text", "text": "And?"}]}
    turns = [*HELLO, {"role": "assistant", "content": whole["content"]}, turn]
    await taken(router, MESSAGES, {**body, "messages": turns}, output)
    content = "".join(block["text"] for block in whole["content"] if block["type"] == "text")
    return content, calls, whole["stop_reason"]


async def test_random_outputs(service: TextService) -> None:
    families = [family for family in FAMILIES.values() if family.parser in service_names(service)]
    async with running_router(service) as router:
        router.dispatcher.model_limits = ModelLimits(10**6, 400)
        for seed in range(examples(60)):
            rng = random.Random(seed)
            output = random_output(rng, rng.choice(families))
            tokens = router.tokens(output)
            if rng.random() < 0.2 and tokens:
                tokens.insert(rng.randrange(len(tokens)), router.tokens("🦦")[0])  # a part of a character
            is_cut = rng.random() < 0.3
            if is_cut:
                tokens = tokens[: rng.randint(0, len(tokens))]
            finish = FinishReason.LENGTH if is_cut else FinishReason.STOP_TOKEN
            end = [] if is_cut else router.tokens("<|im_end|>")
            script = Script([*tokens, *end], finish, per_delta=rng.choice([1, 5, 1000]))
            router.dispatcher.script = lambda request, sequence, script=script: script  # type: ignore[misc]
            content, calls, finish_reason = await chat(router, output)
            for other in (await response(router, output), await message(router, output)):
                assert other[0].replace("\n", "") == content.replace("\n", "") and other[1] == calls, output
            assert all(is_object(arguments) for _, arguments in calls[:-1]), (output, calls)
            assert finish_reason == ("length" if is_cut else "tool_calls" if calls else "stop")


def service_names(service: TextService) -> set[str]:
    tools = getattr(service.dialect, "tools", None)
    return {"harmony" if tools is None else tools.name}
