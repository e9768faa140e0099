"""What of a client's messages reaches the chat template."""

from __future__ import annotations

from typing import Any

import pytest

from kvrelay.text.chat_template import ChatTemplate
from kvrelay.text.request.api_error import ApiError
from kvrelay_router.openai.chat_request import parse_chat

BOTH = {"reasoning_content": "because", "thinking": "because"}


def messages(assistant: dict[str, Any]) -> list[dict[str, Any]]:
    answer = {"role": "assistant", "content": "yes", **assistant}
    return parse_chat({"model": "m", "messages": [{"role": "user", "content": "hi"}, answer]}).messages


@pytest.mark.parametrize(
    ("sent", "passed_on"),
    [
        ({"reasoning_content": "because"}, BOTH),
        ({"reasoning": "because"}, BOTH),
        ({"thinking": "because"}, BOTH),
        ({"reasoning": "because", "reasoning_content": None}, BOTH),
        ({"reasoning_content": "because", "reasoning": "other"}, BOTH),
        ({"reasoning": "other", "thinking": "because"}, BOTH),
        ({"reasoning": ""}, {"reasoning_content": "", "thinking": ""}),
        ({"reasoning": None}, {}),
        ({"refusal": None, "audio": None, "annotations": [], "function_call": None, "tool_calls": None}, {}),
    ],
)
def test_reasoning_reaches_the_template_by_the_names_that_templates_read(
    sent: dict[str, Any], passed_on: dict[str, Any]
) -> None:
    assert messages(sent)[1] == {"role": "assistant", "content": "yes", **passed_on}


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking", "name", "tool_call_id"])
def test_what_is_no_text_is_named(name: str) -> None:
    with pytest.raises(ApiError, match=f"'{name}' of message 1 must be a string"):
        messages({name: ["because"]})


@pytest.mark.parametrize(
    ("sent", "content"),
    [
        ({"content": None, "refusal": "I won't"}, "I won't"),
        ({"content": "yes", "refusal": "I won't"}, "yes"),
        ({"content": None, "reasoning": "because"}, ""),
        ({"content": None}, ""),
        ({"content": None, "refusal": None, "tool_calls": []}, ""),
        ({"content": []}, ""),
        ({"content": [{"type": "output_text", "text": "yes"}]}, [{"type": "text", "text": "yes"}]),
        ({"content": [{"type": "refusal", "refusal": "no"}]}, [{"type": "text", "text": "no"}]),
    ],
)
def test_answers_come_back_as_they_were(sent: dict[str, Any], content: object) -> None:
    """What another server answered is part of a conversation that goes on here."""
    assert messages(sent)[1]["content"] == content


@pytest.mark.parametrize(
    "sent",
    [
        {"content": 7},
        {"content": {}},
        {"role": "user", "content": None},
        {"role": "user", "content": []},
        {"role": "system", "content": None},
        {"content": [{"type": "refusal", "text": "no"}]},
        {"role": "user", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "user", "content": None, "refusal": "no"},
    ],
)
def test_a_message_without_text_is_refused(sent: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match="message 1"):
        messages(sent)


@pytest.mark.parametrize("content", [None, [], ""])
def test_a_tool_may_have_no_result(content: object) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "c", "content": content}
    body = [{"role": "assistant", "content": None, "tool_calls": [call]}, result]
    assert parse_chat({"model": "m", "messages": body}).messages[1]["content"] == ""


@pytest.mark.parametrize(
    ("sent", "passed_on"),
    [
        ('{"a": 1}', {"a": 1}),
        ("", {}),
        (" null", {}),
        (None, {}),
        ({"a": 1}, {"a": 1}),
        ('{"a": ', {"arguments": '{"a": '}),
        ("[1]", {"arguments": "[1]"}),
        ('"x"', {"arguments": '"x"'}),
    ],
)
def test_templates_get_an_object_as_arguments_whatever_the_model_has_written(sent: object, passed_on: object) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": sent}}
    (passed,) = messages({"tool_calls": [call]})[1]["tool_calls"]
    assert passed == {**call, "function": {"name": "f", "arguments": passed_on}}


@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({}, {}),
        ({"reasoning_effort": None}, {}),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
            {"reasoning_effort": "high"},
        ),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": True}},
            {"reasoning_effort": "low", "enable_thinking": True},
        ),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False, "thinking": False}),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"thinking": True}},
            {"reasoning_effort": "none", "enable_thinking": False, "thinking": True},
        ),
    ],
)
def test_the_effort_of_reasoning_is_the_templates_variable(fields: dict[str, Any], variables: dict[str, Any]) -> None:
    request = parse_chat({"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields})
    assert request.options.template_kwargs == variables


@pytest.mark.parametrize("value", [7, "x" * 65, {"effort": "low"}])
def test_an_effort_that_is_no_short_text_is_refused(value: object) -> None:
    with pytest.raises(ApiError, match="reasoning_effort"):
        parse_chat({"model": "m", "messages": [{"role": "user", "content": "hi"}], "reasoning_effort": value})


def test_a_template_reads_it() -> None:
    source = "{% for m in messages %}{% if m.thinking %}<{{ m.thinking }}>{% endif %}{{ m.content }}{% endfor %}"
    assert ChatTemplate(source, {}).render(messages({"reasoning": "because"})) == "hi<because>yes"
