"""A model whose tokenizer says by a `response_template` how its outputs are read."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from kvrelay.text.service import TextService
from tests.component.router.rig import MODEL, Router, running_router
from tests.component.router.tools import ARGUMENTS, HELLO, TOOL
from tests.fakes.text_model import CHATML, write_text_model
from tests.unit.text.output_parsing.test_response_template import JSON_CALLS

OUTPUT = f'<think>\nHm 🦦\n</think>\n\nI look.\n<call>{{"name": "weather", "arguments": {ARGUMENTS}}}</call>'


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TextService]:
    folder = write_text_model(tmp_path_factory.mktemp("template-model"), CHATML)
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"response_template": JSON_CALLS}))
    service = TextService.load(str(folder), max_grammar_cpu_s=60.0)
    yield service
    service.close()


@pytest.fixture
async def router(text: TextService) -> AsyncIterator[Router]:
    async with running_router(text) as running:
        running.answers(OUTPUT)
        yield running


@pytest.mark.parametrize("split", [1, 3, 100])
async def test_calls_and_reasoning_whole_and_streamed(router: Router, split: int) -> None:
    router.answers(OUTPUT, per_delta=split)
    body: dict[str, Any] = {"model": MODEL, "messages": HELLO, "tools": [TOOL]}
    whole = (await router.openai.chat.completions.create(**body)).choices[0]
    async with router.openai.chat.completions.stream(**body) as stream:
        async for _ in stream:
            pass
        streamed = (await stream.get_final_completion()).choices[0]
    for choice in (whole, streamed):
        (call,) = choice.message.tool_calls or []
        assert call.type == "function" and json.loads(call.function.arguments) == json.loads(ARGUMENTS)
        assert (choice.message.content, choice.finish_reason) == ("I look.", "tool_calls")
    assert whole.message.model_dump()["reasoning_content"] == "Hm 🦦"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tool_choice", "required"),
        ("thinking_token_budget", 4),
        ("response_format", {"type": "json_object"}),  # no grammar could write a call beside it
    ],
)
async def test_what_it_cannot_do_is_refused(router: Router, field: str, value: Any) -> None:
    answer = await router.post("/v1/chat/completions", messages=HELLO, tools=[TOOL], **{field: value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
