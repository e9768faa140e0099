"""Converts the conversation of a Messages request to the messages of a chat completion.

Consecutive turns of one role become one turn, as in Anthropic's API. Chat templates often refuse them otherwise.
"""

from __future__ import annotations

import re
from typing import Any

from kvrelay.text.request.api_error import wrong
from kvrelay_router.anthropic.messages_request import PromptFields
from kvrelay_router.openai.chat_request import MAX_PARTS

BILLING_LINES = re.compile(r"\A(?:x-anthropic-billing-header:[^\n]*(?:\n|\Z))+")
"""Claude Code begins its system text with a line that has a hash of the request, so no two requests would share a
cached prefix. The line says nothing to the model."""

ChatMessage = dict[str, Any]
TextPart = dict[str, str]


def chat_messages(request: PromptFields) -> list[ChatMessage]:
    """Raises ApiError."""
    conversation = Conversation()
    if request.system is not None:
        conversation.add_system(request.system, "system")
    for index, message in enumerate(request.messages):
        conversation.add(message, f"messages.{index}")
    return conversation.messages


class Conversation:
    """The turns of a conversation so far."""

    def __init__(self) -> None:
        self.messages: list[ChatMessage] = []
        self._tools: dict[str, str] = {}  # the names of the tools of all calls so far, by id
        self._waiting: set[str] = set()  # the ids of calls without a result so far

    def add_system(self, system: Any, where: str) -> None:
        parts = [_without_billing(part) for part in _text_parts(system, where)]
        if parts := [part for part in parts if part["text"]]:
            self.messages.append({"role": "system", "content": _content(parts)})

    def add(self, message: Any, where: str) -> None:
        if not isinstance(message, dict):
            raise wrong(where, "it must be an object")
        content = message.get("content")
        match message.get("role"):
            case "user":
                self._add_user(content, where)
            case "assistant":
                self._add_assistant(content, where)
            case "system":
                self.add_system(content, f"{where}.content")
            case role:
                raise wrong(f"{where}.role", f"{role!r} is unknown; known are 'user', 'assistant' and 'system'")

    def _add_user(self, content: Any, where: str) -> None:
        parts: list[TextPart] = []
        for block, place in _blocks(content, f"{where}.content"):
            if block["type"] != "tool_result":
                parts.append(_text(block, place, "a user"))
                continue
            self._add_turn("user", parts)
            parts = []
            self._add_result(block, place)
        self._add_turn("user", parts)

    def _add_result(self, block: dict[str, Any], where: str) -> None:
        call_id = block.get("tool_use_id")
        if not isinstance(call_id, str) or call_id not in self._tools:
            raise wrong(f"{where}.tool_use_id", f"no earlier message has a tool_use block with the id {call_id!r}")
        if call_id not in self._waiting:
            raise wrong(f"{where}.tool_use_id", f"the tool_use block with the id {call_id!r} has a result already")
        self._waiting.remove(call_id)
        parts = _text_parts(block.get("content") or "", f"{where}.content")
        message = {"role": "tool", "tool_call_id": call_id, "name": self._tools[call_id], "content": _content(parts)}
        self.messages.append(message)

    def _add_assistant(self, content: Any, where: str) -> None:
        parts: list[TextPart] = []
        thoughts: list[str] = []
        calls: list[dict[str, Any]] = []
        for block, place in _blocks(content, f"{where}.content"):
            match block["type"]:
                case "thinking":
                    thoughts.append(_string(block, "thinking", place))
                case "redacted_thinking":
                    pass  # encrypted for Anthropic's servers
                case "tool_use":
                    calls.append(self._call(block, place))
                case _:
                    parts.append(_text(block, place, "an assistant"))
        extra: ChatMessage = {"reasoning_content": "\n".join(thoughts)} if thoughts else {}
        if calls:
            extra["tool_calls"] = calls
        self._add_turn("assistant", parts, extra)

    def _call(self, block: dict[str, Any], where: str) -> dict[str, Any]:
        name, call_id = _string(block, "name", where), _string(block, "id", where)
        arguments = block.get("input")
        if not isinstance(arguments, dict):
            raise wrong(f"{where}.input", "it must be an object")
        if call_id in self._waiting:
            raise wrong(f"{where}.id", f"another tool_use block without a result has the id {call_id!r}")
        self._waiting.add(call_id)
        self._tools[call_id] = name
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}

    def _add_turn(self, role: str, parts: list[TextPart], extra: ChatMessage | None = None) -> None:
        """Adds a message, or its text to the last one if that is of the same role and has nothing but text."""
        if not parts and not extra:
            return
        last = self.messages[-1] if self.messages else {}
        if not extra and last.keys() == {"role", "content"} and last["role"] == role:
            if isinstance(last["content"], str):
                last["content"] = [{"type": "text", "text": last["content"]}]
            last["content"] += parts  # in place: a copy for each of many turns would take quadratic time
        else:
            self.messages.append({"role": role, "content": _content(parts), **(extra or {})})


def _blocks(content: Any, where: str) -> list[tuple[dict[str, Any], str]]:
    """The blocks of a content, and how error messages name them. A string is one block of text."""
    if isinstance(content, str):
        return [({"type": "text", "text": content}, where)]
    if not isinstance(content, list):
        raise wrong(where, "it must be a string or a list of content blocks")
    if len(content) > MAX_PARTS:
        raise wrong(where, f"it has {len(content)} content blocks; at most {MAX_PARTS} are allowed")
    for index, block in enumerate(content):
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise wrong(f"{where}.{index}", "it must be an object with a type")
    return [(block, f"{where}.{index}") for index, block in enumerate(content)]


def _text_parts(content: Any, where: str) -> list[TextPart]:
    return [_text(block, place, "this") for block, place in _blocks(content, where)]


def _text(block: dict[str, Any], where: str, whose: str) -> TextPart:
    if block["type"] != "text":
        raise wrong(where, f"content blocks of the type {block['type']!r} are not supported in {whose} message")
    return {"type": "text", "text": _string(block, "text", where)}


def _string(block: dict[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise wrong(f"{where}.{name}", "it must be a string")
    return value


def _content(parts: list[TextPart]) -> str | list[TextPart]:
    if not parts:
        return ""
    return parts[0]["text"] if len(parts) == 1 else parts


def _without_billing(part: TextPart) -> TextPart:
    return {"type": "text", "text": BILLING_LINES.sub("", part["text"])}
