"""Conversations of Anthropic's API become messages of a chat."""

from __future__ import annotations

from typing import Any

import pytest

from kvrelay.text.request.api_error import ApiError
from kvrelay_router.anthropic.messages_request import PromptFields, chat_messages

HEADER = "x-anthropic-billing-header: cc_version=2.1.100.7b4; cc_entrypoint=cli; cch=eb6c6;"


def text(content: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": content, **more}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def converted(*messages: Any, system: Any = None) -> list[dict[str, Any]]:
    return chat_messages(PromptFields(model="m", messages=list(messages), system=system))


def test_strings_and_blocks_are_the_same() -> None:
    plain = converted({"role": "user", "content": "hi"}, system="Be brief.")
    assert plain == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    cached = {"cache_control": {"type": "ephemeral"}}
    assert converted(user(text("hi", **cached)), system=[text("Be brief.", **cached)]) == plain


@pytest.mark.parametrize(
    ("system", "kept"),
    [
        ([text(HEADER), text("You are Claude Code.")], ["You are Claude Code."]),
        ([text(f"{HEADER}\nYou are Claude Code.")], ["You are Claude Code."]),
        (f"{HEADER}\n{HEADER}\n  You are Claude Code.\n", ["  You are Claude Code.\n"]),
        (HEADER, []),
        (f"Never repeat a line like this:\n{HEADER}", [f"Never repeat a line like this:\n{HEADER}"]),
        (f"{HEADER}\r\nBe brief.", ["Be brief."]),
    ],
)
def test_lines_with_a_hash_of_the_request_are_no_part_of_the_prompt(system: Any, kept: list[str]) -> None:
    expected = [{"role": "system", "content": each} for each in kept]
    assert converted({"role": "user", "content": "hi"}, system=system) == [
        *expected,
        {"role": "user", "content": "hi"},
    ]


def test_consecutive_turns_of_one_role_become_one() -> None:
    messages = converted(
        {"role": "user", "content": "one"},
        user(text("two"), text("three")),
        {"role": "assistant", "content": "four"},
        {"role": "assistant", "content": [text("five")]},
    )
    assert messages == [
        {"role": "user", "content": [text("one"), text("two"), text("three")]},
        {"role": "assistant", "content": [text("four"), text("five")]},
    ]


def test_calls_thoughts_and_results() -> None:
    call = {"type": "tool_use", "id": "toolu_1", "name": "define", "input": {"word": "otter"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [text("a mammal")]}
    thinking = [{"type": "thinking", "thinking": "Look it up.", "signature": "x"}, {"type": "redacted_thinking"}]
    messages = converted(
        {"role": "user", "content": "What is an otter?"},
        {"role": "assistant", "content": [*thinking, text("One moment."), call]},
        user(result, text("Go on.")),
    )
    function = {"name": "define", "arguments": {"word": "otter"}}
    assert messages[1:] == [
        {
            "role": "assistant",
            "content": "One moment.",
            "reasoning_content": "Look it up.",
            "tool_calls": [{"id": "toolu_1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "name": "define", "content": "a mammal"},
        {"role": "user", "content": "Go on."},
    ]


@pytest.mark.parametrize(
    ("message", "where"),
    [
        (7, "messages.0"),
        ({"role": "tool", "content": "x"}, "messages.0.role"),
        ({"role": "user"}, "messages.0.content"),
        ({"role": "user", "content": [7]}, "messages.0.content.0"),
        ({"role": "user", "content": [text("a"), {"text": "b"}]}, "messages.0.content.1"),
        (user({"type": "text"}), "messages.0.content.0.text"),
        (user(text("a"), {"type": "image", "source": {}}), "messages.0.content.1"),
        (user({"type": "document", "source": {}}), "messages.0.content.0"),
        (user({"type": "tool_result", "tool_use_id": "t"}), "messages.0.content.0.tool_use_id"),
        ({"role": "assistant", "content": [{"type": "tool_use", "name": "f", "input": {}}]}, "messages.0.content.0.id"),
        (
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": "{}"}]},
            "messages.0.content.0.input",
        ),
        ({"role": "assistant", "content": [{"type": "thinking"}]}, "messages.0.content.0.thinking"),
    ],
)
def test_errors_name_the_block(message: Any, where: str) -> None:
    with pytest.raises(ApiError) as caught:
        converted(message)
    assert (caught.value.status, caught.value.param) == (400, where)
    assert f"'{where}'" in caught.value.message


def test_many_turns_of_one_role_become_one() -> None:
    (message,) = converted(*[user(text(str(number))) for number in range(100_000)])
    assert message["role"] == "user"
    assert [part["text"] for part in message["content"]] == [str(number) for number in range(100_000)]


def test_too_many_blocks_are_refused() -> None:
    with pytest.raises(ApiError, match=r"messages\.0\.content.*20000 content blocks"):
        converted(user(*[text("")] * 20_000))
