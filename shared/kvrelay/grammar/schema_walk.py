"""The schemas within a JSON schema, and how the modules that rewrite schemas replace them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

MAX_DEPTH = 64
MAPS = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
"""Keywords whose value is an object of schemas."""

Schema = dict[str, Any]


class NotRewritten(Exception):
    """The schema is too large, too deep or malformed, or has a keyword that forbids the rewriting."""


def replace_subschemas(
    schema: Schema, replace: Callable[[Any], Any], *, single: Collection[str], lists: Collection[str]
) -> None:
    """Replaces the schemas of the keywords `single`, those in the lists of `lists`, and those of `MAPS`."""
    for name in single:
        if name in schema:
            schema[name] = replace(schema[name])
    for name in lists:
        if isinstance(schema.get(name), list):
            schema[name] = [replace(each) for each in schema[name]]
    for name in MAPS:
        if isinstance(schema.get(name), dict):
            schema[name] = {key: replace(each) for key, each in schema[name].items()}


def require_all(schema: Schema, schemas: Sequence[Any]) -> None:
    """Adds schemas to `allOf`. Raises NotRewritten if it is not a list."""
    if not schemas:
        return
    present = schema.get("allOf", [])
    if not isinstance(present, list):
        raise NotRewritten
    schema["allOf"] = [*present, *schemas]
