"""The body of POST /v1/messages, and of its count_tokens."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from kvrelay.text.request.api_error import wrong
from kvrelay.text.request.generation_fields import Flag, Stop
from kvrelay.text.request.parsing import COMMON, RequestModel, extension_fields, refuse_unsupported

FIELD_NAMES = dict.fromkeys(("response_format", "response_format.json_schema"), "output_config.format")
"""The fields of a message, by those of the chat completion that it is converted to, if they differ."""

REFUSED = ("container", "mcp_servers")
"""Fields that ask for what runs on Anthropic's servers."""


class PromptFields(RequestModel):
    """The fields that determine the prompt. `messages` and `system` are checked when they are converted."""

    model: str
    messages: list[Any] = Field(min_length=1)
    system: Any = None
    tools: Any = None
    tool_choice: Any = None
    thinking: Any = None
    output_config: Any = None
    output_format: Any = None
    metadata: Any = None


class MessagesRequest(PromptFields):
    max_tokens: Annotated[int, Field(ge=1)]
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    stop_sequences: Stop = Field(default_factory=list)
    stream: Flag = False


class CountTokensRequest(PromptFields):
    """The body of POST /v1/messages/count_tokens: the fields of a message that determine its prompt."""


def generation_fields(request: MessagesRequest, content: dict[str, Any]) -> dict[str, Any]:
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


def template_fields(request: PromptFields, content: dict[str, Any]) -> dict[str, Any]:
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


def thinking_budget(request: PromptFields) -> int | None:
    """The tokens that the model may think, if it is to think. Raises ApiError."""
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


def tool_fields(request: PromptFields) -> dict[str, Any]:
    """The fields of a chat completion about tools. Raises ApiError."""
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
            f"{where}.type", f"tools of the type {tool['type']!r} are Anthropic's own; only custom ones are taken"
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
