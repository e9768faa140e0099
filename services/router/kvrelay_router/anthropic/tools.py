"""Converts the tools of a Messages request to those of a chat completion."""

from __future__ import annotations

from typing import Any

from kvrelay_router.anthropic.messages_request import PromptFields
from kvrelay_router.http.api_error import wrong
from kvrelay_router.openai.schema.tool_fields import MAX_TOOLS


def tool_fields(request: PromptFields) -> dict[str, Any]:
    """The fields of a chat completion about tools. Raises ApiError."""
    tools = [] if request.tools is None else request.tools
    if not isinstance(tools, list):
        raise wrong("tools", "it must be a list")
    if len(tools) > MAX_TOOLS:
        raise wrong("tools", f"at most {MAX_TOOLS} tools are allowed")
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
