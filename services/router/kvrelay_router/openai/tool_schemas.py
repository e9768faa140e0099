"""Checks that the parameters of tools are JSON schemas all through, also of tools that no grammar is made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
import orjson
from msgspec import Meta

from kvrelay.text.output_parsing.events import Tool
from kvrelay_router.http.api_error import wrong
from kvrelay_router.loop_share import LoopShare

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


async def check_tool_schemas(tools: Sequence[Tool]) -> None:
    """Other callbacks run between the parts of large schemas. Raises 400."""
    share = LoopShare()
    for tool in tools:
        for where, part in _parts(tool.parameters):
            if reason := _wrong_part(part):
                what = f"the parameters of tool {tool.name!r}{where} are no JSON schema: {reason}"
                raise wrong("tools", what)
            await share.pause()


def _parts(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas of the arguments, and all that is not about a single one."""
    for keyword in _MAPS:
        named = schema.get(keyword)
        if isinstance(named, dict):
            for name, part in named.items():
                yield f", {keyword} {name[:100]!r},", part
    yield "", {name: value for name, value in schema.items() if name not in _MAPS or not isinstance(value, dict)}


def _wrong_part(part: Any) -> str | None:
    try:
        if (num_bytes := len(orjson.dumps(part))) > MAX_PART_BYTES:
            return f"a part has {num_bytes} bytes as JSON; at most {MAX_PART_BYTES} are allowed"
        msgspec.convert(part, _Schema | bool)
    except msgspec.ValidationError as error:
        return str(error)
    except (TypeError, RecursionError):
        return "it is nested too deeply"
    return None
