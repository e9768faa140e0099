"""Budgets of reasoning, and grammars behind it: what a worker gets, and what is refused."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import tokenizers

from kvrelay.protocol.sampling import ReasoningSpan
from kvrelay.text.service import TextService
from tests.component.router.rig import Router, running_router
from tests.component.router.tools import HELLO, TEMPLATE, TOOL, sampling_of
from tests.fakes.text_model import write_text_model

CHAT = "/v1/chat/completions"
SCHEMA: dict[str, Any] = {"guided_json": {"type": "object"}}
OPENED = TEMPLATE.replace("assistant\\n' -}}{%- endif -%}", "assistant\\n' + (opening or '') -}}{%- endif -%}")


@pytest.fixture(scope="module")
def marked_text(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TextService]:
    """Of a model with tokens for the markers of its reasoning, which the variable `opening` may write."""
    folder = write_text_model(tmp_path_factory.mktemp("marked-model"), OPENED)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<think>", "</think>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    service = TextService.load(str(folder), max_grammar_cpu_s=60.0)
    yield service
    service.close()


@pytest.fixture
async def router(marked_text: TextService) -> AsyncIterator[Router]:
    async with running_router(marked_text) as running:
        yield running


def span_of(router: Router, **fields: Any) -> ReasoningSpan:
    begin_id, end_id = router.tokens("<think></think>")
    return ReasoningSpan(begin_id=begin_id, end_id=end_id, **fields)


def opening(text: str) -> dict[str, Any]:
    return {"chat_template_kwargs": {"opening": text}}


async def test_the_worker_gets_the_budget_and_whether_the_prompt_opens_the_reasoning(router: Router) -> None:
    budget: dict[str, Any] = {"thinking_token_budget": 7}
    assert (await sampling_of(router, **budget)).reasoning == span_of(router, token_budget=7)
    opened = await sampling_of(router, **budget, **opening("<think>\n"))
    assert opened.reasoning == span_of(router, token_budget=7, is_open=True)
    assert (await sampling_of(router, **budget, **opening("<think>\n\n</think>\n\n"))).reasoning is None
    assert (await sampling_of(router)).reasoning is None
    assert (await sampling_of(router, thinking_token_budget=0)).reasoning == span_of(router, token_budget=0)


async def test_a_grammar_begins_behind_the_reasoning(router: Router) -> None:
    free = await sampling_of(router, **SCHEMA)
    assert free.grammar is not None and free.reasoning == span_of(router)
    closed = await sampling_of(router, **SCHEMA, **opening("<think>\n\n</think>\n\n"))
    assert closed.grammar == free.grammar and closed.reasoning is None
    opened = await sampling_of(router, **SCHEMA, **opening("<think>\n"), thinking_token_budget=3)
    assert opened.grammar == free.grammar and opened.reasoning == span_of(router, is_open=True, token_budget=3)


async def test_usage_has_the_tokens_of_reasoning_that_is_a_part_of_the_content(router: Router) -> None:
    router.answers("<think>Hm 🦦</think>It rains.")
    joined = (await router.post(CHAT, messages=HELLO, separate_reasoning=False)).json()
    separate = (await router.post(CHAT, messages=HELLO)).json()
    assert joined["choices"][0]["message"]["content"] == "<think>Hm 🦦</think>It rains."
    assert separate["choices"][0]["message"]["content"] == "It rains."
    assert joined["usage"] == separate["usage"]
    assert joined["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


async def test_a_continued_message_has_reasoning_only_if_it_is_open_there(router: Router) -> None:
    more: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False, **SCHEMA}
    for content, reasoning in (("<think>Hm", span_of(router, is_open=True)), ("<think>Hm</think>A", None), ("A", None)):
        messages = [*HELLO, {"role": "assistant", "content": content}]
        assert (await sampling_of(router, messages=messages, **more)).reasoning == reasoning


async def test_required_calls_follow_the_reasoning(router: Router) -> None:
    required = await sampling_of(router, tools=[TOOL], tool_choice="required", thinking_token_budget=5)
    assert required.reasoning == span_of(router, token_budget=5)
    assert required.grammar is not None and "think" not in required.grammar.text
    await router.text.grammars.check(required.grammar)


async def test_the_other_apis_take_it(router: Router) -> None:
    thinking: dict[str, Any] = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    message = await sampling_of(router, "/v1/messages", max_tokens=9, **thinking)
    assert message.reasoning == span_of(router, token_budget=1024)
    own = await sampling_of(router, "/v1/messages", max_tokens=9, thinking_token_budget=3, **thinking)
    assert own.reasoning == span_of(router, token_budget=3)
    adaptive = await sampling_of(router, "/v1/messages", max_tokens=9, thinking={"type": "adaptive"})
    assert adaptive.reasoning is None
    assert (await router.post("/v1/responses", input="hi", thinking_token_budget=4)).status_code == 200
    assert router.dispatcher.requests[-1].sampling.reasoning == span_of(router, token_budget=4)


async def test_budgets_that_are_wrong_are_refused(router: Router) -> None:
    for value in (-2, 2**31, 1.5, "many", True):
        answer = await router.post(CHAT, messages=HELLO, thinking_token_budget=value)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "thinking_token_budget"), value
    beams = await router.post(CHAT, messages=HELLO, thinking_token_budget=3, use_beam_search=True)
    assert beams.status_code == 400 and "beam search" in beams.json()["error"]["message"]
    for value in ("many", 0, 1.5):
        thinking = {"type": "enabled", "budget_tokens": value}
        answer = await router.post("/v1/messages", messages=HELLO, max_tokens=9, thinking=thinking)
        assert answer.status_code == 400 and "thinking.budget_tokens" in answer.json()["error"]["message"]
    assert not router.dispatcher.requests


@pytest.mark.parametrize("name", ["text", "tools_text"])
async def test_models_without_reasoning_between_tokens_refuse_it(name: str, request: pytest.FixtureRequest) -> None:
    """`tools_text` reasons, but spells the markers in several tokens."""
    async with running_router(request.getfixturevalue(name)) as router:
        answer = await router.post(CHAT, messages=HELLO, thinking_token_budget=3)
        error = answer.json()["error"]
        assert answer.status_code == 400 and "--reasoning-parser" in error["message"]
        assert (error["param"], error["code"]) == ("thinking_token_budget", "unsupported_parameter")
        thinking = {"type": "enabled", "budget_tokens": 1024}
        message = await router.post("/v1/messages", messages=HELLO, max_tokens=9, thinking=thinking)
        assert message.status_code == 200 and router.dispatcher.requests[-1].sampling.reasoning is None
