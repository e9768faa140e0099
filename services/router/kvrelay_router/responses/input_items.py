"""Converts the input items of a response to the messages of a chat completion."""

from __future__ import annotations

from typing import Any

from kvrelay.text.request.api_error import wrong
from kvrelay_router.openai.chat_request import MAX_ARGUMENTS_CHARS, MAX_PARTS, arguments_of

ROLES = ("user", "assistant", "system", "developer")
TEXT_TYPES = ("input_text", "output_text", "text")

ChatMessage = dict[str, Any]


def as_items(value: Any) -> list[Any]:
    """The field `input` as a list of items. Raises ApiError."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list):
        raise wrong("input", "it must be a string or a list of items")
    return value


def is_reference(item: Any) -> bool:
    """Returns whether the item refers to a stored one. The type may be left out."""
    return isinstance(item, dict) and (item.get("type") == "item_reference" or item.keys() == {"id"})


def input_messages(items: list[Any], earlier: list[Any]) -> list[ChatMessage]:
    """The messages of a conversation: of its `earlier` items, which have been checked, and of new ones. Raises
    ApiError."""
    reader = _Reader()
    for item in earlier:
        reader.add(item, "previous_response_id")
    for index, item in enumerate(items):
        reader.add(item, f"input[{index}]")
    return reader.finished()


class _Reader:
    def __init__(self) -> None:
        self._tools: dict[str, str] = {}  # the names of the functions of all calls so far, by id
        self._waiting: set[str] = set()  # the ids of calls without an output so far
        self._messages: list[ChatMessage] = []
        self._reasoning: list[str] = []  # belongs to the next message of the assistant

    def finished(self) -> list[ChatMessage]:
        """All messages. Reasoning without an answer is a message of its own."""
        if self._reasoning:
            self._add_assistant({"role": "assistant", "content": ""})
        return self._messages

    def add(self, item: Any, where: str) -> None:
        if not isinstance(item, dict):
            raise wrong(where, "it must be an object")
        match item.get("type", "message"):
            case "message":
                self._add_message(item, where)
            case "function_call":
                self._add_call(item, where)
            case "function_call_output":
                self._add_output(item, where)
            case "reasoning":
                parts = item.get("content") or item.get("summary") or []
                self._reasoning += [_text(part, f"{where}.content") for part in _as_list(parts, f"{where}.content")]
            case kind:
                raise wrong(f"{where}.type", f"items of the type {kind!r} are not supported")

    def _add_message(self, item: dict[str, Any], where: str) -> None:
        role = item.get("role")
        if role not in ROLES:
            raise wrong(f"{where}.role", f"{role!r} is unknown; known are {', '.join(ROLES)}")
        message = {"role": role, "content": _content(item.get("content"), f"{where}.content")}
        if role == "assistant":
            self._add_assistant(message)
        else:
            self._waiting.clear()  # what was not answered by now will not be
            self._messages.append(message)

    def _add_assistant(self, message: ChatMessage) -> None:
        if self._reasoning:
            message["reasoning_content"] = "\n".join(self._reasoning)
            self._reasoning = []
        self._messages.append(message)

    def _add_call(self, item: dict[str, Any], where: str) -> None:
        call_id, name = _string(item, "call_id", where), _string(item, "name", where)
        if call_id in self._waiting:
            raise wrong(f"{where}.call_id", f"another function_call without an output has the call_id {call_id!r}")
        self._waiting.add(call_id)
        self._tools[call_id] = name
        function = {"name": name, "arguments": _arguments(item, where)}
        last = self._messages[-1] if self._messages else {}
        if self._reasoning or last.get("role") != "assistant":
            self._add_assistant({"role": "assistant", "content": ""})
        self._messages[-1].setdefault("tool_calls", []).append(
            {"id": call_id, "type": "function", "function": function}
        )

    def _add_output(self, item: dict[str, Any], where: str) -> None:
        call_id = _string(item, "call_id", where)
        if call_id not in self._tools:
            raise wrong(f"{where}.call_id", f"no earlier item is a function_call with the call_id {call_id!r}")
        self._waiting.discard(call_id)
        content = _content(item.get("output"), f"{where}.output")
        message = {"role": "tool", "tool_call_id": call_id, "name": self._tools[call_id], "content": content}
        self._messages.append(message)


def _content(content: Any, where: str) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    parts = [
        {"type": "text", "text": _text(part, f"{where}[{index}]")}
        for index, part in enumerate(_as_list(content, where))
    ]
    if not parts:
        return ""
    return parts[0]["text"] if len(parts) == 1 else parts


def _as_list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise wrong(where, "it must be a string or a list of content parts")
    if len(value) > MAX_PARTS:
        raise wrong(where, f"it has {len(value)} content parts; at most {MAX_PARTS} are allowed")
    return value


def _text(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "refusal":
        return _string(part, "refusal", where)
    if kind not in (*TEXT_TYPES, "reasoning_text", "summary_text"):
        raise wrong(where, f"content parts of the type {kind!r} are not supported")
    return _string(part, "text", where)


def _arguments(item: dict[str, Any], where: str) -> dict[str, Any]:
    """Parses JSON arguments. An empty text means no arguments."""
    text = _string(item, "arguments", where)
    if len(text) > MAX_ARGUMENTS_CHARS:
        raise wrong(f"{where}.arguments", f"it has {len(text)} characters; at most {MAX_ARGUMENTS_CHARS} are allowed")
    return arguments_of(text)


def _string(item: dict[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise wrong(f"{where}.{name}", "it must be a string")
    return value
