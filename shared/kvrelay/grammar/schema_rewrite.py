"""Rewrites JSON schemas without keywords that llguidance does not know, as far as usual producers of schemas (pydantic,
zod, OpenAPI) write them.

A rewritten schema is equivalent: exactly the same values are valid. Only some formats become stricter, which is sound
as no rule turns a format around. A keyword without an equivalent stays, and the library refuses it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any

Schema = dict[str, Any]

MAX_NODES = 4000
MAX_DEPTH = 64
MAX_NEGATED_DEPTH = 16
MAX_ALTERNATIVES = 32
MAX_DEPENDENCIES = 5
MAX_TEXT_CHARS = 64

TYPES = ("null", "boolean", "number", "string", "array", "object")
SINGLE = ("additionalProperties", "items", "propertyNames", "not", "if", "then", "else")
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
MAPS = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
APPLICATORS = ("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "dependentSchemas")
"""Keywords whose schemas name properties and items of the same value."""
ANNOTATIONS = {"$schema", "$comment", "title", "description", "default", "examples", "deprecated", "discriminator"}

ANY_TEXT_FORMATS = {"binary", "password", "path", "file-path", "directory-path"}
"""Formats of pydantic and OpenAPI that every text has."""
NARROWER_FORMATS = {"idn-email": "email", "iri": "uri", "iri-reference": "uri", "uri-reference": "uri"}
"""Each format with one all of whose texts have it too."""
_BASE64 = r"^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"
FORMAT_PATTERNS = {
    "json-pointer": r"^(/([^~/]|~[01])*)*$",
    "byte": _BASE64,
    "base64": _BASE64,
}


class NotRewritten(Exception):
    """The schema is too large, too deep or malformed."""


def rewritten(text: str) -> str | None:
    """The schema, given as JSON, rewritten. None if no rule changes it, or if it is malformed, too large or deep."""
    try:
        schema = json.loads(text)
        result = _Rewriter(schema).rewrite(schema, 0)
    except (NotRewritten, ValueError, RecursionError):
        return None
    return json.dumps(result) if result != schema else None


Rule = Callable[[Schema], list[Any]]
"""Removes keywords from a schema, and returns schemas that have to hold too instead of them."""


class _Rewriter:
    def __init__(self, root: Any) -> None:
        self._rules: list[Rule] = [_drop_unused, _conditional, _negated, _dependent, _names, _one_of(root), _formatted]
        self._num_nodes = 0

    def rewrite(self, schema: Any, depth: int) -> Any:
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES or depth > MAX_DEPTH:
            raise NotRewritten
        if not isinstance(schema, dict):
            return schema
        result = dict(schema)
        extra = [each for rule in self._rules for each in rule(result)]
        for name in SINGLE:
            if name in result:
                result[name] = self.rewrite(result[name], depth + 1)
        for name in LISTS:
            if isinstance(result.get(name), list):
                result[name] = [self.rewrite(each, depth + 1) for each in result[name]]
        for name in MAPS:
            if isinstance(result.get(name), dict):
                result[name] = {key: self.rewrite(each, depth + 1) for key, each in result[name].items()}
        if extra:
            present = result.get("allOf", [])
            if not isinstance(present, list):
                raise NotRewritten
            result["allOf"] = [*present, *(self.rewrite(each, depth + 1) for each in extra)]
        return result


def _drop_unused(schema: Schema) -> list[Any]:
    """Drops keywords without effect. A reference into a dropped `if`, `then` or `else` is refused later."""
    if "if" not in schema:
        schema.pop("then", None)
        schema.pop("else", None)
    elif "then" not in schema and "else" not in schema:
        del schema["if"]
    if schema.get("uniqueItems") is False or schema.get("maxItems") in (0, 1):
        schema.pop("uniqueItems", None)
    if schema.get("propertyNames") in (True, {}, {"type": "string"}):
        del schema["propertyNames"]
    if isinstance(schema.get("format"), str) and schema["format"] in ANY_TEXT_FORMATS:
        del schema["format"]
    for name, plain in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
        # Without schemas beside it that evaluate properties or items too, it means the same as the plain keyword.
        if schema.get(name) is True or (name in schema and plain in schema):
            del schema[name]
        elif name in schema and schema.keys().isdisjoint((*APPLICATORS, "contains")):
            schema[plain] = schema.pop(name)
    return []


def _conditional(schema: Schema) -> list[Any]:
    if "if" not in schema or (otherwise := negation(schema["if"])) is None:
        return []
    condition, holds, fails = schema.pop("if"), schema.pop("then", True), schema.pop("else", True)
    return [{"anyOf": [{"allOf": [condition, holds]}, {"allOf": [otherwise, fails]}]}]


def _negated(schema: Schema) -> list[Any]:
    if "not" not in schema or (opposite := negation(schema["not"])) is None:
        return []
    del schema["not"]
    return [opposite]


def _dependent(schema: Schema) -> list[Any]:
    """The property is missing, or what depends on it holds. `dependencies` is the name of older drafts for both."""
    extra: list[Any] = []
    for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
        dependent = schema.get(keyword)
        if not isinstance(dependent, dict) or len(dependent) > MAX_DEPENDENCIES:
            continue
        del schema[keyword]
        for name, needed in dependent.items():
            holds = {"required": needed} if isinstance(needed, list) else needed
            extra.append({"anyOf": [{"properties": {name: False}}, {"allOf": [{"required": [name]}, holds]}]})
    return extra


def _names(schema: Schema) -> list[Any]:
    """`propertyNames`, if nothing else in the schema names properties."""
    names = schema.get("propertyNames")
    if not isinstance(names, dict) or schema.keys() & {"properties", "patternProperties", *APPLICATORS}:
        return []
    values = schema.get("additionalProperties", True)
    match {key: value for key, value in names.items() if (key, value) != ("type", "string") and key != "title"}:
        case {"const": str() as name, **rest} if not rest:
            schema["properties"] = {name: values}
        case {"enum": list() as listed, **rest} if not rest:
            schema["properties"] = {name: values for name in listed if isinstance(name, str)}
        case {"pattern": str() as pattern, **rest} if not rest:
            schema["patternProperties"] = {pattern: values}
        case _:
            return []
    schema["additionalProperties"] = False
    del schema["propertyNames"]
    return []


def _one_of(root: Any) -> Rule:
    """The rule for alternatives of which no two can hold. `root`: what `$ref` points into."""

    def rule(schema: Schema) -> list[Any]:
        parts = schema.get("oneOf")
        if not isinstance(parts, list) or len(parts) > MAX_ALTERNATIVES:
            return []
        shapes = [list(_shapes(part, root, 0)) for part in parts]
        if not all(_are_disjoint(one, other) for one, other in combinations(shapes, 2)):
            return []
        del schema["oneOf"]
        return [{"anyOf": parts}]

    return rule


def _shapes(schema: Any, root: Any, depth: int) -> Iterator[Schema]:
    """Schemas that all have to hold for this one. Beside a `$ref`, older drafts ignore the others."""
    if not isinstance(schema, dict) or depth > MAX_NEGATED_DEPTH:
        return
    if "$ref" in schema:
        yield from _shapes(referred(schema["$ref"], root), root, depth + 1)
        return
    yield schema
    for part in _listed(schema, "allOf"):
        yield from _shapes(part, root, depth + 1)


def referred(reference: Any, root: Any) -> Any:
    """The schema that a JSON pointer into the document names; None if it is no such pointer, or has another base."""
    if reference == "#":
        return root
    if not isinstance(reference, str) or not reference.startswith("#/") or "%" in reference:
        return None
    found = root
    for part in reference[2:].split("/"):
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
        if isinstance(found, dict) and "$id" in found:
            return None
    return found


def _are_disjoint(some: list[Schema], others: list[Schema]) -> bool:
    """Whether no value satisfies both: by their types, or by a property that both require."""
    types = _types(some), _types(others)
    if not types[0] & types[1]:
        return True
    return {"object"} in types and any(
        not one & other
        for name in _required(some) & _required(others)
        if (one := _constants(some, name)) is not None and (other := _constants(others, name)) is not None
    )


def _types(shapes: list[Schema]) -> set[str]:
    found = set(TYPES)
    for shape in shapes:
        types = shape.get("type")
        if isinstance(types, str | list):
            listed = [types] if isinstance(types, str) else types
            found &= {"number" if each == "integer" else each for each in listed if isinstance(each, str)}
    return found


def _listed(schema: Schema, name: str) -> list[Any]:
    found = schema.get(name)
    return found if isinstance(found, list) else []


def _required(shapes: list[Schema]) -> set[str]:
    return {name for shape in shapes for name in _listed(shape, "required") if isinstance(name, str)}


def _constants(shapes: list[Schema], name: str) -> set[str] | None:
    """The texts to which a property is limited."""
    for shape in shapes:
        properties = shape.get("properties")
        value = properties.get(name) if isinstance(properties, dict) else None
        if isinstance(value, dict) and ("const" in value or isinstance(value.get("enum"), list)):
            listed = [value["const"]] if "const" in value else value["enum"]
            if all(isinstance(each, str) for each in listed):
                return set(listed)
    return None


def negation(schema: Any, depth: int = 0) -> Any:
    """A schema for which exactly the values are valid that are not valid for `schema`, if that has only the keywords of
    usual conditions. None: there is none."""
    if isinstance(schema, bool):
        return not schema
    if not isinstance(schema, dict) or depth > MAX_NEGATED_DEPTH:
        return None
    parts = [_of_keyword(name, value, depth + 1) for name, value in schema.items() if name not in ANNOTATIONS]
    return _all_known("anyOf", parts)


def _of_keyword(name: str, value: Any, depth: int) -> Any:
    match name, value:
        case "not", _:
            return value
        case ("allOf", list()):
            return _all_known("anyOf", [negation(each, depth) for each in value])
        case ("anyOf", list()):
            return _all_known("allOf", [negation(each, depth) for each in value])
        case "type", _:
            return _of_types([value] if isinstance(value, str) else value)
        case "const", _:
            return _not_equal(value)
        case ("enum", list()) if len(value) <= MAX_ALTERNATIVES:
            return _all_known("allOf", [_not_equal(each) for each in value])
        case ("required", list()) if all(isinstance(each, str) for each in value):
            return _any_of([{"type": "object", "properties": {each: False}} for each in value])
        case ("properties", dict()):
            others = {each: negation(schema, depth) for each, schema in value.items()}
            parts = [{"type": "object", "properties": {each: others[each]}, "required": [each]} for each in others]
            return None if None in others.values() else _any_of(parts)
    return None


def _of_types(types: Any) -> Any:
    """JSON schema has no keyword for numbers that are no integers."""
    if not isinstance(types, list) or ("integer" in types and "number" not in types):
        return None
    others = [each for each in TYPES if each not in types]
    return {"type": others} if others else False


def _not_equal(value: Any) -> Any:
    if value is None:
        return _of_types(["null"])
    if isinstance(value, bool):
        return {"anyOf": [_of_types(["boolean"]), {"const": not value}]}
    if isinstance(value, int | float):
        bounds = ({"type": "number", name: value} for name in ("exclusiveMinimum", "exclusiveMaximum"))
        return {"anyOf": [_of_types(["number"]), *bounds]}
    if isinstance(value, str) and len(value) <= MAX_TEXT_CHARS:
        return {"anyOf": [_of_types(["string"]), {"type": "string", "pattern": _other_texts(value)}]}
    return None


def _other_texts(text: str) -> str:
    """A regex for all texts but one: ones that end earlier, have another character somewhere, or go on."""
    pattern = r"[\s\S]+"
    for char in reversed(text):
        escaped = re.escape(char) if char not in "^]\\" else "\\" + char
        pattern = rf"(|[^{escaped}][\s\S]*|{re.escape(char)}{pattern})"
    return f"^{pattern}$"


def _all_known(name: str, parts: list[Any]) -> Any:
    """None if a part is."""
    return None if None in parts else _any_of(parts) if name == "anyOf" else {"allOf": parts} if parts else True


def _any_of(parts: list[Any]) -> Any:
    if any(part is True for part in parts):
        return True
    possible = [part for part in parts if part is not False]
    return {"anyOf": possible} if len(possible) > 1 else possible[0] if possible else False


def _formatted(schema: Schema) -> list[Any]:
    name = schema.get("format")
    if not isinstance(name, str):
        return []
    if name in NARROWER_FORMATS:
        schema["format"] = NARROWER_FORMATS[name]
    elif name in FORMAT_PATTERNS:
        del schema["format"]
        return [{"pattern": FORMAT_PATTERNS[name]}]
    return []


_IN_PLACE = ("allOf", "anyOf", "oneOf", "if", "then", "else", "not", "dependentSchemas", "dependencies")


def closed(schema: Any) -> Any:
    """The schema with no properties but those that it names, for each object that does not say whether it is open.
    Raises RecursionError for a deep one.

    Objects that several schemas describe together stay open: each of them would rule out what the others name.
    """
    joined = set[str]()
    _find_joined(schema, schema, joined, is_joined=False)
    return _closed(schema, joined, "#", is_joined=False)


def _find_joined(schema: Any, root: Any, joined: set[str], *, is_joined: bool) -> None:
    """Adds the references to schemas that describe an object together with others."""
    if not isinstance(schema, dict):
        return
    reference = schema.get("$ref")
    if (is_joined or _names_properties(schema)) and isinstance(reference, str) and reference not in joined:
        joined.add(reference)
        _find_joined(referred(reference, root), root, joined, is_joined=True)
    for part, _, part_is_joined in _parts(schema, "", is_joined=is_joined):
        _find_joined(part, root, joined, is_joined=part_is_joined)


def _names_properties(schema: Schema) -> bool:
    return not schema.keys().isdisjoint(("properties", "patternProperties", "required"))


def _parts(schema: Schema, where: str, *, is_joined: bool) -> Iterator[tuple[Any, str, bool]]:
    """The schemas in a schema, the pointer to each, and whether it describes an object together with others."""
    is_described = is_joined or _names_properties(schema) or "$ref" in schema
    for name, value in schema.items():
        if name in _IN_PLACE:
            num_parts = len(value) if name == "allOf" and isinstance(value, list) else 1
            inside = is_described or num_parts > 1 or name not in ("allOf", "anyOf", "oneOf")
            inside = inside or len(schema.keys() & {*_IN_PLACE}) > 1
        else:
            inside = False
        if isinstance(value, list) and name in (*LISTS, "items"):
            yield from ((part, f"{where}/{name}/{at}", inside) for at, part in enumerate(value))
        elif isinstance(value, dict) and name in (*MAPS, "dependencies"):
            yield from ((part, f"{where}/{name}/{_escaped(key)}", inside) for key, part in value.items())
        elif name in SINGLE:
            yield value, f"{where}/{name}", inside


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _closed(schema: Any, joined: set[str], where: str, *, is_joined: bool) -> Any:
    if not isinstance(schema, dict):
        return schema
    is_joined = is_joined or where in joined
    parts = {at: (part, inside) for part, at, inside in _parts(schema, where, is_joined=is_joined)}

    def part_of(at: str, value: Any) -> Any:
        if at not in parts:
            return value
        part, inside = parts[at]
        return _closed(part, joined, at, is_joined=inside)

    result: Schema = {}
    for name, value in schema.items():
        at = f"{where}/{name}"
        if at in parts:
            result[name] = part_of(at, value)
        elif isinstance(value, list):
            result[name] = [part_of(f"{at}/{index}", each) for index, each in enumerate(value)]
        elif isinstance(value, dict):
            result[name] = {key: part_of(f"{at}/{_escaped(key)}", each) for key, each in value.items()}
        else:
            result[name] = value
    describes = not schema.keys().isdisjoint(("properties", "patternProperties"))
    is_alone = not is_joined and schema.keys().isdisjoint((*APPLICATORS, *_IN_PLACE))
    if describes and is_alone and schema.keys().isdisjoint(("additionalProperties", "unevaluatedProperties")):
        result["additionalProperties"] = False
    return result
