"""The request fields of tool calls."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
import orjson
from msgspec import Meta
from pydantic import BeforeValidator, Field, SkipValidation, WithJsonSchema

from kvrelay.excerpts import quoted, shortened
from kvrelay.grammar.schema_rewrite import closed
from kvrelay.text.output_parsing.events import Tool
from kvrelay.text.request.api_error import wrong
from kvrelay.text.request.parsing import FlagOn, RequestModel, invalid, object_schema, or_null, wrong_type

MAX_TOOLS = 1024
MAX_TOOLS_BYTES = 1 << 20
NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")

TOOL_SHOWN_FIELDS = ("name", "description", "parameters")


class DefinedTools(list[dict[str, Any]]):
    """Checked tools in the form for templates. `of_request`: what the output may call."""

    of_request: tuple[Tool, ...] = ()


class ToolChoice(msgspec.Struct, frozen=True):
    """`names`: the tools that may be called; None: all."""

    mode: Literal["none", "auto", "required"]
    names: tuple[str, ...] | None = None

    @property
    def names_one(self) -> bool:
        return self.names is not None and len(self.names) == 1


AUTO_CHOICE = ToolChoice("auto")


def _tools(value: Any) -> DefinedTools:
    if value is None:
        return DefinedTools()
    if not isinstance(value, list):
        raise wrong_type("it must be a list of tools")
    if len(value) > MAX_TOOLS:
        raise invalid(f"at most {MAX_TOOLS} tools are allowed")
    try:
        num_bytes = len(orjson.dumps(value))
    except TypeError:
        raise invalid("the tools are nested too deeply") from None
    if num_bytes > MAX_TOOLS_BYTES:
        raise invalid(f"the tools have {num_bytes} bytes as JSON; at most {MAX_TOOLS_BYTES} are allowed")
    shown = DefinedTools()
    found: dict[str, Tool] = {}
    for index, each in enumerate(value):
        tool = _tool(each, index)
        if tool.name in found:
            raise invalid(f"two tools have the name {quoted(tool.name)}")
        found[tool.name] = tool
        function = {name: each["function"][name] for name in each["function"] if name in TOOL_SHOWN_FIELDS}
        shown.append({"type": "function", "function": function})
    shown.of_request = tuple(found.values())
    return shown


def _tool(value: Any, index: int) -> Tool:
    if not isinstance(value, dict):
        raise wrong_type(f"tool {index} must be an object")
    if value.get("type", "function") != "function":
        raise invalid(f"tool {index} has the unknown type {quoted(value['type'])}; only 'function' is supported")
    function = value.get("function")
    if not isinstance(function, dict):
        raise wrong_type(f"tool {index} must have an object 'function'")
    name = function.get("name")
    if not isinstance(name, str):
        raise wrong_type(f"tool {index} has no name")
    if not NAME.fullmatch(name):
        raise invalid(f"the name of tool {index} must have 1 to 128 letters, digits and characters of '_.-'")
    if not isinstance(function.get("description"), str | None):
        raise wrong_type(f"the description of tool {quoted(name)} must be a string")
    if not isinstance(function.get("strict"), bool | None):
        raise wrong_type(f"'strict' of tool {quoted(name)} must be true or false")
    parameters = function.get("parameters")
    if isinstance(parameters, dict):  # Go's clients write `null` for what is empty
        parameters = {name: each for name, each in parameters.items() if each is not None}
    if parameters is not None and not (isinstance(parameters, dict) and parameters.get("type", "object") == "object"):
        raise invalid(f"the parameters of tool {quoted(name)} are no JSON schema of an object")
    is_strict, parameters = bool(function.get("strict")), parameters or {}
    return Tool(name=name, parameters=closed(parameters) if is_strict else parameters, is_strict=is_strict)


def _tool_choice(value: Any) -> ToolChoice | None:
    match value:
        case None | ToolChoice():
            return value
        case "none" | "auto" | "required":
            return ToolChoice(value)
        case {"type": "function", "function": {"name": str() as name}}:
            return ToolChoice("required", (name,))
        case {"type": "allowed_tools"}:
            return _allowed_tools(value.get("allowed_tools"))
        case str():
            known = "'none', 'auto', 'required' and an object that names tools"
            raise invalid(f"{quoted(value)} is unknown; known are {known}")
    raise wrong_type(
        "it must be 'none', 'auto', 'required', {'type': 'function', 'function': {'name': ...}} or "
        "{'type': 'allowed_tools', 'allowed_tools': {'mode': ..., 'tools': [...]}}"
    )


def _allowed_tools(value: Any) -> ToolChoice:
    if not isinstance(value, dict) or value.get("mode") not in ("auto", "required"):
        raise invalid("'allowed_tools' must be an object with the mode 'auto' or 'required'")
    tools = value.get("tools")
    if not isinstance(tools, list) or not 1 <= len(tools) <= MAX_TOOLS:
        raise invalid(f"'allowed_tools.tools' must be a list of 1 to {MAX_TOOLS} tools")
    names: dict[str, None] = {}
    for index, tool in enumerate(tools):
        match tool:
            case {"type": "function", "function": {"name": str() as name}}:
                names[name] = None
            case _:
                form = "{'type': 'function', 'function': {'name': ...}}"
                raise invalid(f"'allowed_tools.tools[{index}]' must be {form}")
    return ToolChoice(value["mode"], tuple(names))


_NAME: dict[str, Any] = {"type": "string", "pattern": f"^{NAME.pattern}$"}
_FUNCTION = object_schema(
    {
        "name": _NAME,
        "description": or_null({"type": "string"}),
        "parameters": or_null({"type": "object"}),
        "strict": or_null({"type": "boolean"}),
    },
    "name",
)
_TOOL = object_schema({"type": {"const": "function"}, "function": _FUNCTION}, "function")
_TOOLS: dict[str, Any] = {"type": "array", "maxItems": MAX_TOOLS, "items": _TOOL}
_NAMED = object_schema(
    {"type": {"const": "function"}, "function": object_schema({"name": {"type": "string"}}, "name")}, "type", "function"
)
_SOME = {"type": "array", "minItems": 1, "maxItems": MAX_TOOLS, "items": _NAMED}
_ALLOWED = object_schema(
    {
        "type": {"const": "allowed_tools"},
        "allowed_tools": object_schema({"mode": {"enum": ["auto", "required"]}, "tools": _SOME}, "mode", "tools"),
    },
    "type",
    "allowed_tools",
)
_CHOICES: list[dict[str, Any]] = [{"enum": ["none", "auto", "required"]}, _NAMED, _ALLOWED, {"type": "null"}]


class ToolFields(RequestModel):
    # Checked by the validators: pydantic would copy each tool.
    tools: Annotated[SkipValidation[list[dict[str, Any]]], BeforeValidator(_tools), WithJsonSchema(or_null(_TOOLS))] = (
        Field(default_factory=DefinedTools)
    )
    tool_choice: Annotated[Any, BeforeValidator(_tool_choice), WithJsonSchema({"anyOf": _CHOICES})] = None
    parallel_tool_calls: FlagOn = True

    @property
    def choice(self) -> ToolChoice:
        given: ToolChoice | None = self.tool_choice
        return AUTO_CHOICE if given is None else given

    @property
    def shown_tools(self) -> Sequence[dict[str, Any]]:
        """The tools that the template gets: none if none may be called."""
        return () if self.choice.mode == "none" else self.tools

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        if self.choice.mode == "none":
            return ()
        if self.choice.names is None:
            return self.defined_tools
        names = frozenset(self.choice.names)
        return tuple(tool for tool in self.defined_tools if tool.name in names)

    @property
    def constrains_calls(self) -> bool:
        """A call is required, only some tools are allowed, or a tool is strict."""
        is_limited = self.choice.mode == "required" or self.choice.names is not None
        return is_limited or any(tool.is_strict for tool in self.callable_tools)

    @property
    def defined_tools(self) -> tuple[Tool, ...]:
        """All tools of the request, whether they may be called or not."""
        return self.tools.of_request if isinstance(self.tools, DefinedTools) else ()

    def check_tools(self) -> None:
        """Raises ApiError for a choice that does not fit the tools."""
        choice = self.choice
        if choice.mode == "required" and not self.tools:
            raise wrong("tool_choice", "there are no 'tools'")
        defined = {tool.name for tool in self.defined_tools}
        for name in choice.names or ():
            if name not in defined:
                raise wrong("tool_choice", f"there is no tool {quoted(name)}")


def check_tool_results(messages: Sequence[dict[str, Any]]) -> None:
    """Raises ApiError for a message with the role `tool` that belongs to no earlier call, and for two calls of one
    message with the same id. Calls of different messages may have it: some models number them in each turn."""
    has_calls, called = False, set[str]()
    for index, message in enumerate(messages):
        if message["role"] == "tool":
            call_id = message.get("tool_call_id")
            if not has_calls or (called and call_id is not None and call_id not in called):
                raise wrong(
                    "messages",
                    f"message {index} is the result of a tool call that no assistant's message before it has",
                )
        elif calls := message.get("tool_calls"):
            has_calls = True
            ids = [call["id"] for call in calls if isinstance(call.get("id"), str)]
            named = [call_id for call_id in ids if call_id]  # some servers leave all ids empty
            if len(set(named)) < len(named):
                raise wrong("messages", f"two tool calls of message {index} have the same id")
            called.update(ids)


# Schemas of parameters, which are checked for tools too that no grammar is made of

MAX_PART_BYTES = 128 * 1024
"""Of one property as JSON: a part is checked at once, in 10 ms at most."""

_MAPS = ("properties", "$defs", "definitions")

TypeName = Literal["string", "number", "integer", "boolean", "null", "array", "object"]
Size = Annotated[int, Meta(ge=0)] | float  # 5.0 is an integer in JSON
Schemas = Annotated[list["_Schema | bool"], Meta(min_length=1)]


class _Schema(msgspec.Struct, gc=False):
    """What the keywords must be. Other keywords may have any value, and `null` is as if a keyword was not there."""

    type: TypeName | list[TypeName] | None = None
    properties: dict[str, _Schema | bool] | None = None
    required: list[str] | None = None
    additional_properties: _Schema | bool | None = msgspec.field(default=None, name="additionalProperties")
    pattern_properties: dict[str, _Schema | bool] | None = msgspec.field(default=None, name="patternProperties")
    property_names: _Schema | bool | None = msgspec.field(default=None, name="propertyNames")
    items: _Schema | bool | list[_Schema | bool] | None = None
    prefix_items: list[_Schema | bool] | None = msgspec.field(default=None, name="prefixItems")
    any_of: Schemas | None = msgspec.field(default=None, name="anyOf")
    one_of: Schemas | None = msgspec.field(default=None, name="oneOf")
    all_of: Schemas | None = msgspec.field(default=None, name="allOf")
    none_of: _Schema | bool | None = msgspec.field(default=None, name="not")
    enum: list[Any] | None = None
    ref: str | None = msgspec.field(default=None, name="$ref")
    defs: dict[str, _Schema | bool] | None = msgspec.field(default=None, name="$defs")
    definitions: dict[str, _Schema | bool] | None = None
    pattern: str | None = None
    min_length: Size | None = msgspec.field(default=None, name="minLength")
    max_length: Size | None = msgspec.field(default=None, name="maxLength")
    min_items: Size | None = msgspec.field(default=None, name="minItems")
    max_items: Size | None = msgspec.field(default=None, name="maxItems")
    minimum: float | None = None
    maximum: float | None = None


def check_tool_schemas(tools: Sequence[Tool]) -> None:
    """Raises 400 for parameters that are no JSON schema, with the tool and the part of them that is wrong."""
    for tool in tools:
        for where, part in _parts(tool.parameters):
            if reason := _wrong_part(part):
                what = f"the parameters of tool {quoted(tool.name)}{where} are no JSON schema: {reason}"
                raise wrong("tools", what)


def _parts(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas of the arguments, and all that is not about a single one."""
    for keyword in _MAPS:
        named = schema.get(keyword)
        if isinstance(named, dict):
            for name, part in named.items():
                yield f", {keyword} {quoted(name)},", part
    yield "", {name: value for name, value in schema.items() if name not in _MAPS or not isinstance(value, dict)}


def _wrong_part(part: Any) -> str | None:
    try:
        if (num_bytes := len(orjson.dumps(part))) > MAX_PART_BYTES:
            return f"a part has {num_bytes} bytes as JSON; at most {MAX_PART_BYTES} are allowed"
        msgspec.convert(part, _Schema | bool)
    except msgspec.ValidationError as error:
        return shortened(str(error))
    except (TypeError, RecursionError):
        return "it is nested too deeply"
    return None
