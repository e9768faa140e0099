"""Reasoning in channels (gpt-oss): budgets, and constraints of the answer that stands in a channel of its own."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from kvrelay.grammar.grammar_compiler import GrammarError
from kvrelay.grammar.llguidance_compiler import LLGuidanceCompiler
from kvrelay.protocol.sampling import Grammar, ReasoningChannels
from kvrelay.text.service import TextService
from tests.component.router.rig import Router, running_router
from tests.component.router.tools import HELLO, TOOL, sampling_of
from tests.fakes.harmony_tokenizer import RETURN_ID, harmony_tokenizer, write_harmony_tokenizer

CHAT = "/v1/chat/completions"
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"
OPENED: dict[str, Any] = {"chat_template_kwargs": {"is_open": True}}
SCHEMA = {"type": "object", "properties": {"legs": {"type": "integer"}}, "required": ["legs"]}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA}}
LEGACY = {
    "type": "structural_tag",
    "structures": [{"begin": "<legs>", "schema": {"type": "integer"}, "end": "</legs>"}],
    "triggers": ["<legs"],
}
NEWER = {
    "type": "structural_tag",
    "format": {"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "b"},
}


@pytest.fixture(scope="module")
def harmony_text(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TextService]:
    folder = write_harmony_tokenizer(tmp_path_factory.mktemp("harmony-model"))
    service = TextService.load(str(folder), max_grammar_cpu_s=60.0)
    yield service
    service.close()


@pytest.fixture
async def router(harmony_text: TextService) -> AsyncIterator[Router]:
    async with running_router(harmony_text) as running:
        yield running


def allows(grammar: Grammar | None, text: str) -> bool:
    assert grammar is not None
    tokenizer = harmony_tokenizer()
    compiler = LLGuidanceCompiler(tokenizer.to_str(), tokenizer.get_vocab_size(), [RETURN_ID])
    try:
        compiler.compile(grammar).accept([*tokenizer.encode(text, add_special_tokens=False).ids, RETURN_ID])
    except GrammarError:
        return False
    return True


async def test_the_worker_gets_a_budget_over_all_messages_of_reasoning(router: Router) -> None:

    def ids(text: str) -> int:
        (token_id,) = router.tokens(text)
        return token_id

    sampling = await sampling_of(router, thinking_token_budget=7)
    assert sampling.grammar is None
    assert sampling.reasoning == ReasoningChannels(
        channel_id=ids("<|channel|>"),
        message_id=ids("<|message|>"),
        start_id=ids("<|start|>"),
        reasoning_id=ids("analysis"),
        answer_id=ids("final"),
        other_ids=(ids("commentary"),),
        closing_ids=tuple(map(ids, ("<|end|>", "<|start|>", "assistant", "<|channel|>"))),
        token_budget=7,
    )
    opened = await sampling_of(router, thinking_token_budget=0, **OPENED)
    assert (
        isinstance(opened.reasoning, ReasoningChannels)
        and opened.reasoning.is_open
        and opened.reasoning.token_budget == 0
    )
    assert (await sampling_of(router)).reasoning is None


async def test_the_other_apis_take_a_budget(router: Router) -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024}
    message = await sampling_of(router, "/v1/messages", max_tokens=9, thinking=thinking)
    assert isinstance(message.reasoning, ReasoningChannels) and message.reasoning.token_budget == 1024
    response = await sampling_of(router, "/v1/responses", input="hi", thinking_token_budget=4)
    assert isinstance(response.reasoning, ReasoningChannels) and response.reasoning.token_budget == 4


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"response_format": JSON_SCHEMA}, '{"legs": 4}', '{"legs": "four"}'),
        ({"response_format": {"type": "json_object"}}, '{"a": []}', "[]"),
        ({"guided_json": SCHEMA, "guided_whitespace_pattern": ""}, '{"legs":4}', '{"legs": 4}'),
        ({"guided_regex": "[0-9]+ legs"}, "4 legs", "four legs"),
        ({"guided_choice": ['"four"', "six\n"]}, '"four"', "four"),
        ({"guided_choice": ["four"]}, "four", "five"),
        ({"guided_grammar": 'start: "a" b\nb: "b"+'}, "abb", "ba"),
        ({"response_format": LEGACY}, "It has <legs>4</legs>.", "It has <legs>four</legs>."),
        ({"response_format": NEWER}, "<a>xyb", "xyb"),
    ],
)
async def test_a_constraint_is_of_the_answer_alone(router: Router, fields: Any, good: str, bad: str) -> None:
    sampling = await sampling_of(router, **fields)
    assert sampling.reasoning is None
    thought = f"{ANALYSIS}Four 🦦, {bad}{NEXT}"
    for text, is_allowed in (
        (f"{FINAL}{good}", True),
        (f"{thought}{FINAL}{good}", True),
        (f"{thought}{FINAL}{bad}", False),
        (f"{thought}<|channel|>commentary<|message|>{good}", False),
        (good, False),
        (thought, False),
    ):
        assert allows(sampling.grammar, text) is is_allowed, text
    opened = await sampling_of(router, **fields, **OPENED)
    assert allows(opened.grammar, f"Four.{NEXT}{FINAL}{good}") and not allows(opened.grammar, f"{FINAL}{good}")


async def test_a_message_that_is_continued_is_the_answer(router: Router) -> None:
    more: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False, "guided_regex": "b+"}
    sampling = await sampling_of(router, messages=[*HELLO, {"role": "assistant", "content": "a"}], **more)
    assert allows(sampling.grammar, "bb") and not allows(sampling.grammar, f"{FINAL}bb")


async def test_required_calls_have_a_budget_too(router: Router) -> None:
    sampling = await sampling_of(router, tools=[TOOL], tool_choice="required", thinking_token_budget=5)
    assert isinstance(sampling.reasoning, ReasoningChannels) and sampling.reasoning.token_budget == 5
    call = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>" + json.dumps({"city": "a"})
    assert allows(sampling.grammar, f"{ANALYSIS}Hm{NEXT}{call}") and not allows(sampling.grammar, f"{FINAL}No.")


async def test_tools_beside_a_format(router: Router) -> None:
    call = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>" + json.dumps({"city": "a"})
    fields: dict[str, Any] = {"tools": [TOOL], "response_format": JSON_SCHEMA}
    grammar = (await sampling_of(router, **fields)).grammar
    for text in (call, f'{FINAL}{{"legs": 4}}'):
        assert allows(grammar, text) and allows(grammar, f"{ANALYSIS}Hm{NEXT}{text}")
    assert not allows(grammar, f"{FINAL}It has four.") and not allows(grammar, f'{FINAL}{{"legs": 4}}{NEXT}{call}')
    more: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}
    continued = await sampling_of(router, messages=[*HELLO, {"role": "assistant", "content": "{"}], **fields, **more)
    assert continued.grammar is not None and continued.grammar.text == json.dumps(SCHEMA, separators=(",", ":"))


async def test_errors_name_the_field_of_the_constraint(router: Router) -> None:
    bad = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "string", "pattern": "("}}}
    answer = await router.post(CHAT, messages=HELLO, response_format=bad)
    assert answer.status_code == 400 and answer.json()["error"]["param"].startswith("response_format")


async def test_reasoning_in_channels_cannot_be_a_part_of_the_content(router: Router) -> None:
    answer = await router.post(CHAT, messages=HELLO, separate_reasoning=False)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, "separate_reasoning", "unsupported_parameter")
