"""The body of POST /v1/responses, and its conversion to a chat completion."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import orjson
from pydantic import Field, WithJsonSchema

from kvrelay.excerpts import quoted
from kvrelay.text.request.api_error import ApiError, wrong
from kvrelay.text.request.parsing import (
    COMMON,
    Flag,
    FlagOn,
    OrDefault,
    RequestModel,
    extension_fields,
    object_schema,
    or_null,
    parse,
    refuse_unsupported,
)
from kvrelay.text.request.sampling_fields import MAX_LOGPROBS
from kvrelay_router.openai.chat_request import MAX_ARGUMENTS_CHARS, MAX_PARTS, arguments_of, joined_parts, string_field
from kvrelay_router.openai.tool_fields import MAX_TOOLS, MAX_TOOLS_BYTES, NAME

FIELD_NAMES = {"response_format": "text.format", "response_format.json_schema": "text.format", "messages": "input"}
"""The fields of a response, by those of the chat completion that it is converted to."""

REFUSED = (
    "background",
    "conversation",
    "prompt",
    "max_tool_calls",
    # vLLM's fields for the conversation so far, in other forms than items.
    "previous_input_messages",
    "previous_response",
)
"""Fields that would change the answer, and are not supported."""

FURTHER_EXTENSIONS = ("include_stop_str_in_output", "no_stop_trim", "stop", "top_k")

LOGPROBS = "message.output_text.logprobs"
MAX_METADATA = 16
MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]


ROLES = ("user", "assistant", "system", "developer")
TEXT_TYPES = ("input_text", "output_text", "text")
THOUGHT_TYPES = ("reasoning_text", "summary_text")

ChatMessage = dict[str, Any]


_TEXT: dict[str, Any] = {"type": "string"}
_PART = {
    "anyOf": [
        object_schema({"type": {"enum": [*TEXT_TYPES, *THOUGHT_TYPES]}, "text": _TEXT}, "type", "text"),
        object_schema({"type": {"const": "refusal"}, "refusal": _TEXT}, "type", "refusal"),
    ]
}
_PARTS: dict[str, Any] = {"type": "array", "items": _PART}
_CONTENT = {"anyOf": [_TEXT, _PARTS]}
_CALL = {"type": {"const": "function_call"}, "call_id": _TEXT, "name": _TEXT, "arguments": _TEXT}
_OUTPUT = {"type": {"const": "function_call_output"}, "call_id": _TEXT, "output": _CONTENT}
_ITEM = {
    "anyOf": [
        object_schema(
            {"type": {"const": "message"}, "role": {"enum": list(ROLES)}, "content": _CONTENT}, "role", "content"
        ),
        object_schema(_CALL, *_CALL),
        object_schema(_OUTPUT, *_OUTPUT),
        object_schema({"type": {"const": "reasoning"}, "content": or_null(_PARTS), "summary": or_null(_PARTS)}, "type"),
        object_schema({"type": {"const": "item_reference"}, "id": _TEXT}, "id"),
    ]
}
_FUNCTION = object_schema(
    {
        "type": {"const": "function"},
        "name": {"type": "string", "pattern": f"^{NAME.pattern}$"},
        "description": or_null(_TEXT),
        "parameters": or_null({"type": "object"}),
        "strict": or_null({"type": "boolean"}),
    },
    "type",
    "name",
)
_FUNCTIONS: dict[str, Any] = {"type": "array", "items": _FUNCTION}
_NAMESPACE = {"type": {"const": "namespace"}, "name": _TEXT, "tools": _FUNCTIONS}
_TOOLS: dict[str, Any] = {
    "type": "array",
    "maxItems": MAX_TOOLS,
    "items": {"anyOf": [_FUNCTION, object_schema(_NAMESPACE, *_NAMESPACE)]},
}
_NAMED = object_schema({"type": {"const": "function"}, "name": _TEXT}, "type", "name")
_ALLOWED = {
    "type": {"const": "allowed_tools"},
    "mode": {"enum": ["auto", "required"]},
    "tools": {"type": "array", "minItems": 1, "maxItems": MAX_TOOLS, "items": _NAMED},
}
_CHOICE = {
    "anyOf": [
        {"enum": ["none", "auto", "required"]},
        _NAMED,
        object_schema(_ALLOWED, *_ALLOWED),
        {"type": "null"},
    ]
}
_INPUT = {"anyOf": [_TEXT, {"type": "array", "items": _ITEM}]}


class ResponsesRequest(RequestModel):
    """`input`, `text`, `reasoning` and the tools are checked when they are converted."""

    model: str
    input: Annotated[Any, WithJsonSchema(_INPUT)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), OrDefault(0)] = 0
    include: Annotated[list[str], OrDefault([])] = Field(default_factory=list)
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    tools: Annotated[list[Any], OrDefault([]), WithJsonSchema(or_null(_TOOLS))] = Field(default_factory=list)
    tool_choice: Annotated[Any, WithJsonSchema(_CHOICE)] = None
    parallel_tool_calls: FlagOn = True
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=MAX_METADATA)] | None = None
    stream: Flag = False
    store: FlagOn = True
    previous_response_id: str | None = None
    user: str | None = None

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in self.include or self.top_logprobs > 0

    @property
    def text_format(self) -> dict[str, Any]:
        """The form of the output as OpenAI describes it."""
        given = (self.text or {}).get("format")
        if given is None:
            return {"type": "text"}
        if not isinstance(given, dict):
            raise wrong("text.format", "it must be an object with a type")
        return given


def parse_response(content: dict[str, Any]) -> ResponsesRequest:
    """Validates a request body. Raises ApiError."""
    for name in REFUSED:
        if content.get(name):
            raise ApiError(f"The parameter '{name}' is not supported", param=name, code="unsupported_parameter")
    refuse_unsupported(content, COMMON)
    request = parse(ResponsesRequest, content)
    _check_repeated(request)
    return request


def _check_repeated(request: ResponsesRequest) -> None:
    """Checks the fields that the answer, and several events of a stream, repeat as they are."""
    if len(request.tools) > MAX_TOOLS:
        raise wrong("tools", f"at most {MAX_TOOLS} tools are allowed")
    for name in ("tools", "tool_choice", "text"):
        try:
            # As deep as in an event: what can be read may be nested too deeply to be written.
            num_bytes = len(orjson.dumps({"response": {name: getattr(request, name)}}))
        except TypeError:
            raise wrong(name, "it is nested too deeply") from None
        if num_bytes > MAX_TOOLS_BYTES:
            raise wrong(name, f"it has {num_bytes} bytes as JSON; at most {MAX_TOOLS_BYTES} are allowed")


def chat_body(request: ResponsesRequest, messages: list[ChatMessage], content: dict[str, Any]) -> dict[str, Any]:
    """The body of a chat completion with this prompt. The instructions come first. `content`: the request's body."""
    if request.instructions:
        messages = [{"role": "system", "content": request.instructions}, *messages]
    if not messages:
        raise wrong("input", "it must not be empty")
    chat = {"model": request.model, "messages": messages}
    return {**chat, **_tool_fields(request), **_generation_fields(request, content)}


def _generation_fields(request: ResponsesRequest, content: dict[str, Any]) -> dict[str, Any]:
    """The fields of a chat completion that determine the output. `content`: the body of the request."""
    fields = extension_fields(content, FURTHER_EXTENSIONS)
    fields |= {"temperature": request.temperature, "top_p": request.top_p, "user": request.user}
    fields["reasoning_effort"] = (request.reasoning or {}).get("effort")
    fields["response_format"] = _response_format(request.text_format)
    if request.wants_logprobs:
        fields |= {"logprobs": True, "top_logprobs": request.top_logprobs}
    fields["stream"] = request.stream
    return {name: value for name, value in fields.items() if value is not None}


def _response_format(text_format: dict[str, Any]) -> dict[str, Any]:
    match text_format.get("type"):
        case "text":
            return {"type": "text"}
        case "json_object":  # other servers' clients write a schema beside it
            return {name: text_format[name] for name in ("type", "schema", "value") if name in text_format}
        case "json_schema" if not isinstance(text_format.get("name"), str):
            raise wrong("text.format.name", "it must be a string")
        case "json_schema" if isinstance(text_format.get("schema"), dict):
            described = {name: text_format[name] for name in ("name", "schema", "strict") if name in text_format}
            return {"type": "json_schema", "json_schema": described}
        case "json_schema":
            raise wrong("text.format.schema", "it must be a JSON schema")
        case kind:
            known = "'text', 'json_object' and 'json_schema'"
            raise wrong("text.format.type", f"{quoted(kind)} is unknown; known are {known}")


def _tool_fields(request: ResponsesRequest) -> dict[str, Any]:
    tools = [_tool(tool, where) for tool, where, _ in _functions(request.tools)]
    choice = request.tool_choice
    match choice:
        case {"type": "function", "name": str()}:
            choice = _named(choice)
        case {"type": "allowed_tools"}:
            tools_allowed = choice.get("tools")
            if isinstance(tools_allowed, list):
                tools_allowed = [_named(tool) for tool in tools_allowed]
            choice = {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": tools_allowed}}
        case dict():
            reason = "it must be 'auto', 'none', 'required', a function with its name, or allowed tools"
            raise wrong("tool_choice", reason)
    fields: dict[str, Any] = {"tools": tools, "parallel_tool_calls": request.parallel_tool_calls}
    return fields if choice is None else {**fields, "tool_choice": choice}


def _named(tool: Any) -> Any:
    """A function that is named, as chat completions write it. Anything else as it is."""
    match tool:
        case {"type": "function", "name": str() as name}:
            return {"type": "function", "function": {"name": name}}
    return tool


def namespaces(request: ResponsesRequest) -> dict[str, str]:
    """The namespaces of functions that are in one, by the functions' names. The tools must have been checked."""
    return {tool["name"]: namespace for tool, _, namespace in _functions(request.tools) if namespace is not None}


def _functions(tools: list[Any]) -> Iterator[tuple[Any, str, str | None]]:
    """Each tool, how errors call it, and its namespace. The model sees a namespace's functions by their own names."""
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if not isinstance(tool, dict) or tool.get("type") != "namespace":
            yield tool, where, None
            continue
        if not isinstance(tool.get("name"), str):
            raise wrong(f"{where}.name", "it must be a string")
        if not isinstance(tool.get("tools"), list):
            raise wrong(f"{where}.tools", "it must be a list of functions")
        for number, function in enumerate(tool["tools"]):
            yield function, f"{where}.tools[{number}]", tool["name"]


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise wrong(where, "it must be an object")
    if tool.get("type") != "function":
        raise wrong(f"{where}.type", f"tools of the type {quoted(tool.get('type'))} are not supported, only functions")
    if not isinstance(tool.get("name"), str) or not tool["name"]:
        raise wrong(f"{where}.name", "it must be a string that is not empty")
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}


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
                raise wrong(f"{where}.type", f"items of the type {quoted(kind)} are not supported")

    def _add_message(self, item: dict[str, Any], where: str) -> None:
        role = item.get("role")
        if role not in ROLES:
            raise wrong(f"{where}.role", f"{quoted(role)} is unknown; known are {', '.join(ROLES)}")
        message = {"role": role, "content": _content(item.get("content"), f"{where}.content")}
        if role == "assistant":
            self._add_assistant(message)
        else:
            self._waiting.clear()  # later calls may use these ids again
            self._messages.append(message)

    def _add_assistant(self, message: ChatMessage) -> None:
        if self._reasoning:
            message["reasoning_content"] = "\n".join(self._reasoning)
            self._reasoning = []
        self._messages.append(message)

    def _add_call(self, item: dict[str, Any], where: str) -> None:
        call_id, name = string_field(item, "call_id", where), string_field(item, "name", where)
        if call_id in self._waiting:
            raise wrong(
                f"{where}.call_id", f"another function_call without an output has the call_id {quoted(call_id)}"
            )
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
        call_id = string_field(item, "call_id", where)
        if call_id not in self._tools:
            raise wrong(f"{where}.call_id", f"no earlier item is a function_call with the call_id {quoted(call_id)}")
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
    return joined_parts(parts)


def _as_list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise wrong(where, "it must be a string or a list of content parts")
    if len(value) > MAX_PARTS:
        raise wrong(where, f"it has {len(value)} content parts; at most {MAX_PARTS} are allowed")
    return value


def _text(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "refusal":
        return string_field(part, "refusal", where)
    if kind not in (*TEXT_TYPES, *THOUGHT_TYPES):
        raise wrong(where, f"content parts of the type {quoted(kind)} are not supported")
    return string_field(part, "text", where)


def _arguments(item: dict[str, Any], where: str) -> dict[str, Any]:
    """Parses JSON arguments. An empty text means no arguments."""
    text = string_field(item, "arguments", where)
    if len(text) > MAX_ARGUMENTS_CHARS:
        raise wrong(f"{where}.arguments", f"it has {len(text)} characters; at most {MAX_ARGUMENTS_CHARS} are allowed")
    return arguments_of(text)
