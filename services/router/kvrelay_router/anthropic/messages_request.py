"""The body of POST /v1/messages and of its count_tokens, and its conversion to a chat completion.

Consecutive turns of one role become one turn, as in Anthropic's API. Chat templates often refuse them otherwise.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from kvrelay.excerpts import quoted
from kvrelay.text.request.api_error import wrong
from kvrelay.text.request.parsing import (
    COMMON,
    Flag,
    RequestModel,
    extension_fields,
    object_schema,
    or_null,
    refuse_unsupported,
)
from kvrelay.text.request.sampling_fields import Stop
from kvrelay.text.service import TextService
from kvrelay_router.openai.chat_request import MAX_PARTS, joined_parts, string_field
from kvrelay_router.openai.tool_fields import NAME

FIELD_NAMES = dict.fromkeys(("response_format", "response_format.json_schema"), "output_config.format")
"""The fields of a message, by those of the chat completion that it is converted to, if they differ."""

REFUSED = ("container", "mcp_servers")
"""Fields that ask for what runs on Anthropic's servers."""

MODELS_PREFIX = "toolu_own_"
"""Before the ids of calls that the model itself wrote, which templates get back as it did."""

BILLING_LINES = re.compile(r"\A(?:x-anthropic-billing-header:[^\n]*(?:\n|\Z))+")
"""Claude Code begins its system text with a line that has a hash of the request, so no two requests would share a
cached prefix. The line says nothing to the model."""

ChatMessage = dict[str, Any]
TextPart = dict[str, str]


_TEXT: dict[str, Any] = {"type": "string"}
_TEXT_BLOCK = object_schema({"type": {"const": "text"}, "text": _TEXT}, "type", "text")


def _content(*blocks: dict[str, Any]) -> dict[str, Any]:
    """The JSON schema of a content of text and these blocks."""
    return {"anyOf": [_TEXT, {"type": "array", "items": {"anyOf": [_TEXT_BLOCK, *blocks]}}]}


_RESULT = {"type": {"const": "tool_result"}, "tool_use_id": _TEXT, "content": or_null(_content())}
_CALL = {"type": {"const": "tool_use"}, "id": _TEXT, "name": _TEXT, "input": {"type": "object"}}
_THOUGHT = object_schema({"type": {"const": "thinking"}, "thinking": _TEXT}, "type", "thinking")
_HIDDEN = object_schema({"type": {"const": "redacted_thinking"}}, "type")
_CONTENTS = {
    "user": _content(object_schema(_RESULT, "type", "tool_use_id")),
    "assistant": _content(object_schema(_CALL, *_CALL), _THOUGHT, _HIDDEN),
    "system": _content(),
}
_MESSAGE = {
    "anyOf": [
        object_schema({"role": {"const": role}, "content": content}, "role", "content")
        for role, content in _CONTENTS.items()
    ]
}
_TOOL = {
    "name": {"type": "string", "pattern": f"^{NAME.pattern}$"},
    "input_schema": {"type": "object"},
    "description": or_null(_TEXT),
    "strict": or_null({"type": "boolean"}),
    "type": {"enum": [None, "custom"]},
}
_TOOLS: dict[str, Any] = {"type": "array", "items": object_schema(_TOOL, "name", "input_schema")}
_CHOICE = {
    "anyOf": [
        object_schema({"type": {"enum": ["auto", "any", "none"]}}, "type"),
        object_schema({"type": {"const": "tool"}, "name": _TEXT}, "type", "name"),
        {"type": "null"},
    ]
}
_BUDGET = {"type": "integer", "minimum": 1, "exclusiveMaximum": 2**31}
_THINKING = {"type": {"enum": ["enabled", "disabled", "adaptive", None]}, "budget_tokens": or_null(_BUDGET)}
_FORMAT = object_schema({"type": {"const": "json_schema"}, "schema": {"type": "object"}}, "type", "schema")
_CONFIG = {"format": or_null(_FORMAT), "effort": or_null({"type": "string", "maxLength": 64})}
_METADATA = {"user_id": or_null({"type": "string", "maxLength": 1024})}


class PromptFields(RequestModel):
    """The fields that determine the prompt, which are the body of POST /v1/messages/count_tokens. `messages` and
    `system` are checked when they are converted."""

    model: str
    messages: Annotated[
        list[Any], Field(min_length=1), WithJsonSchema({"type": "array", "minItems": 1, "items": _MESSAGE})
    ]
    system: Annotated[Any, WithJsonSchema(or_null(_content()))] = None
    tools: Annotated[Any, WithJsonSchema(or_null(_TOOLS))] = None
    tool_choice: Annotated[Any, WithJsonSchema(_CHOICE)] = None
    thinking: Annotated[Any, WithJsonSchema(or_null(object_schema(_THINKING)))] = None
    output_config: Annotated[Any, WithJsonSchema(or_null(object_schema(_CONFIG)))] = None
    output_format: Annotated[Any, WithJsonSchema(or_null(_FORMAT))] = None
    metadata: Annotated[Any, WithJsonSchema(or_null(object_schema(_METADATA)))] = None


class MessagesRequest(PromptFields):
    max_tokens: Annotated[int, Field(ge=1)]
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    stop_sequences: Stop = Field(default_factory=list)
    stream: Flag = False


def chat_body(request: PromptFields, content: dict[str, Any], text: TextService) -> dict[str, Any]:
    """The body of a chat completion with this prompt, and with the output that a MessagesRequest asks for. `content`:
    the body of the request. Raises ApiError."""
    messages = chat_messages(request)
    chat: dict[str, Any] = {"model": request.model, "messages": messages}
    chat |= _template_fields(request, content) | _tool_fields(request)
    last = messages[-1] if messages else {}
    # A last message of the assistant is the beginning of the answer.
    chat["continue_final_message"] = last.get("role") == "assistant" and not last.get("tool_calls")
    if isinstance(request, MessagesRequest):
        budget = _thinking_budget(request)
        if text.can_limit_reasoning:
            chat["thinking_token_budget"] = budget
        chat |= _generation_fields(request, content)
    return chat


def _generation_fields(request: MessagesRequest, content: dict[str, Any]) -> dict[str, Any]:
    """The fields of a chat completion that determine the output. `content`: the body of the request."""
    for name in REFUSED:
        if content.get(name):
            raise wrong(name, "it is not supported")
    refuse_unsupported(content, COMMON)
    fields = extension_fields(content)
    fields |= {"temperature": request.temperature, "top_p": request.top_p, "top_k": request.top_k}
    fields |= {"stop": request.stop_sequences, "stream": request.stream, "max_tokens": request.max_tokens}
    if (user := _part(request.metadata, "user_id", "metadata")) is not None:
        fields["user"] = user
    output_format = _part(request.output_config, "format", "output_config") or request.output_format
    if output_format is not None:
        fields["response_format"] = _response_format(output_format)
    return {name: value for name, value in fields.items() if value is not None}


def _template_fields(request: PromptFields, content: dict[str, Any]) -> dict[str, Any]:
    """The fields of a chat completion that the chat template reads, apart from the messages."""
    kwargs = content.get("chat_template_kwargs") or {}
    if not isinstance(kwargs, dict):
        raise wrong("chat_template_kwargs", "it must be an object")
    thinks = _thinks(request.thinking)
    fields: dict[str, Any] = {
        "chat_template_kwargs": kwargs if thinks is None else {"enable_thinking": thinks, **kwargs}
    }
    fields["include_reasoning"] = bool(thinks)
    if (effort := _part(request.output_config, "effort", "output_config")) is not None:
        fields["reasoning_effort"] = effort
    return fields


def _thinking_budget(request: PromptFields) -> int | None:
    """The tokens that the model may think, if it is to think."""
    if not _thinks(request.thinking) or (budget := _part(request.thinking, "budget_tokens", "thinking")) is None:
        return None
    if type(budget) is not int or not 0 < budget < 2**31:
        raise wrong("thinking.budget_tokens", "it must be a positive number of tokens")
    return budget


def _thinks(thinking: Any) -> bool | None:
    """Whether the model is to think before it answers; None: as the template has it."""
    kind = _part(thinking, "type", "thinking")
    if kind not in (None, "enabled", "disabled", "adaptive"):
        raise wrong("thinking.type", "it must be 'enabled', 'adaptive' or 'disabled'")
    return None if kind is None else kind != "disabled"


def _response_format(output_format: Any) -> dict[str, Any]:
    if not isinstance(output_format, dict) or output_format.get("type") != "json_schema":
        raise wrong("output_config.format", "it must be an object with the type 'json_schema'")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": output_format.get("schema")}}


def _part(value: Any, name: str, param: str) -> Any:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise wrong(param, "it must be an object")
    return value.get(name)


def _tool_fields(request: PromptFields) -> dict[str, Any]:
    tools = [] if request.tools is None else request.tools
    if not isinstance(tools, list):
        raise wrong("tools", "it must be a list")
    return {"tools": [_tool(tool, index) for index, tool in enumerate(tools)], **_choice(request.tool_choice)}


def _tool(tool: Any, index: int) -> dict[str, Any]:
    where = f"tools.{index}"
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str) or not tool["name"]:
        raise wrong(where, "it must be an object with a name")
    if tool.get("type") not in (None, "custom"):
        raise wrong(
            f"{where}.type", f"tools of the type {quoted(tool['type'])} are Anthropic's own; only custom ones are taken"
        )
    if not isinstance(tool.get("input_schema"), dict):
        raise wrong(f"{where}.input_schema", "it must be a JSON schema")
    function = {"name": tool["name"], "parameters": tool["input_schema"]}
    function |= {name: tool[name] for name in ("description", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _choice(choice: Any) -> dict[str, Any]:
    if choice is None:
        return {"tool_choice": "auto"}
    kind = choice.get("type") if isinstance(choice, dict) else None
    chosen: Any
    match kind:
        case "auto" | "none":
            chosen = kind
        case "any":
            chosen = "required"
        case "tool" if isinstance(choice.get("name"), str):
            chosen = {"type": "function", "function": {"name": choice["name"]}}
        case _:
            raise wrong("tool_choice", "it must be an object with the type 'auto', 'any', 'none', or 'tool' and a name")
    alone = {"parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") else {}
    return {"tool_choice": chosen, **alone}


def chat_messages(request: PromptFields) -> list[ChatMessage]:
    """The messages of a chat completion. Raises ApiError about the first block that is wrong."""
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
            self.messages.append({"role": "system", "content": joined_parts(parts)})

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
                raise wrong(f"{where}.role", f"{quoted(role)} is unknown; known are 'user', 'assistant' and 'system'")

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
            raise wrong(
                f"{where}.tool_use_id", f"no earlier message has a tool_use block with the id {quoted(call_id)}"
            )
        if call_id not in self._waiting:
            raise wrong(
                f"{where}.tool_use_id", f"the tool_use block with the id {quoted(call_id)} has a result already"
            )
        self._waiting.remove(call_id)
        parts = _text_parts(block.get("content") or "", f"{where}.content")
        message = {
            "role": "tool",
            "tool_call_id": call_id.removeprefix(MODELS_PREFIX),
            "name": self._tools[call_id],
            "content": joined_parts(parts),
        }
        self.messages.append(message)

    def _add_assistant(self, content: Any, where: str) -> None:
        parts: list[TextPart] = []
        thoughts: list[str] = []
        calls: list[dict[str, Any]] = []
        for block, place in _blocks(content, f"{where}.content"):
            match block["type"]:
                case "thinking":
                    thoughts.append(string_field(block, "thinking", place))
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
        name, call_id = string_field(block, "name", where), string_field(block, "id", where)
        arguments = block.get("input")
        if not isinstance(arguments, dict):
            raise wrong(f"{where}.input", "it must be an object")
        if call_id in self._waiting:
            raise wrong(f"{where}.id", f"another tool_use block without a result has the id {quoted(call_id)}")
        self._waiting.add(call_id)
        self._tools[call_id] = name
        return {
            "id": call_id.removeprefix(MODELS_PREFIX),
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }

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
            self.messages.append({"role": role, "content": joined_parts(parts), **(extra or {})})


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
        raise wrong(where, f"content blocks of the type {quoted(block['type'])} are not supported in {whose} message")
    return {"type": "text", "text": string_field(block, "text", where)}


def _without_billing(part: TextPart) -> TextPart:
    return {"type": "text", "text": BILLING_LINES.sub("", part["text"])}
