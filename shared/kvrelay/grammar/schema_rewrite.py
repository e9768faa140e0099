"""Rewrites JSON schemas without keywords that the library of grammars does not know.

Each rule replaces a schema by an equivalent one: exactly the same values are valid. If a keyword has no equivalent, it
stays, and the library refuses it.
"""

from __future__ import annotations

import json
import re
from typing import Any

from kvrelay.grammar.schema_evaluation import UNEVALUATED, UnknownEvaluation, without_unevaluated
from kvrelay.grammar.schema_negation import TYPES, negation
from kvrelay.grammar.schema_walk import MAX_DEPTH, NotRewritten, Schema, replace_subschemas, require_all

MAX_NODES = 4000
MAX_DEPENDENCIES = 5
_COUNTS = (
    *("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"),
    *("minContains", "maxContains"),
)
_SCHEMAS = (
    *("additionalProperties", "items", "propertyNames", "contains", "unevaluatedProperties", "unevaluatedItems"),
    *("not", "if", "then", "else"),
)
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_APPLICATORS = ("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "dependentSchemas")
"""Keywords whose schemas evaluate properties and items of the same value."""

_WITHOUT_MIN_CONTAINS = re.compile(r"json-schema\.org/draft-0[1-7]/")
"""Drafts in which `contains` asks for one item or more, whatever `minContains` says."""


def rewritten(text: str, *, splits_one_of: bool = False) -> str | None:
    """The schema, given as JSON, rewritten. None if no rule changes it, or if it is too large or too deep.

    `splits_one_of` also replaces `oneOf` by alternatives that exclude each other.
    """
    try:
        schema = json.loads(text)
        result = _Rewriter(schema, splits_one_of).rewrite(schema, 0)
    except (NotRewritten, ValueError, RecursionError):
        return None
    changed = json.dumps(result)
    return changed if changed != json.dumps(schema) else None  # 2.0 equals 2


class _Rewriter:
    def __init__(self, root: Any, splits_one_of: bool) -> None:
        self._root = root
        self._num_nodes = 0
        self._splits_one_of = splits_one_of
        self._dynamic_names = _dynamic_names(root)
        draft = root.get("$schema") if isinstance(root, dict) else None
        self._has_min_contains = not (isinstance(draft, str) and _WITHOUT_MIN_CONTAINS.search(draft))

    def rewrite(self, schema: Any, depth: int) -> Any:
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES or depth > MAX_DEPTH:
            raise NotRewritten
        if not isinstance(schema, dict):
            return schema
        result = dict(schema)
        if not self._has_min_contains:
            result.pop("minContains", None)
            result.pop("maxContains", None)
        for rule in (_round_counts, self._dynamic, _unevaluated):
            rule(result)
        extra = self._evaluated(result)  # schemas that have to hold too
        _drop_unused(result)
        for exchange in (_conditional, _dependent, _negated, _contained, _names, self._one_of):
            extra += exchange(result)

        def replace(each: Any) -> Any:
            return self.rewrite(each, depth + 1)

        replace_subschemas(result, replace, single=_SCHEMAS, lists=_LISTS)
        require_all(result, [replace(each) for each in extra])
        return result

    def _dynamic(self, schema: Schema) -> None:
        """If no two anchors have its name, a dynamic reference is an ordinary one."""
        anchor, reference = schema.get("$dynamicAnchor"), schema.get("$dynamicRef")
        if isinstance(anchor, str) and self._dynamic_names.get(anchor, 0) == 1 and "$anchor" not in schema:
            schema["$anchor"] = schema.pop("$dynamicAnchor")
        if not isinstance(reference, str) or "$ref" in schema:
            return
        is_pointer = reference == "#" or reference.startswith("#/")
        if is_pointer or (reference.startswith("#") and self._dynamic_names.get(reference[1:], 0) <= 1):
            schema["$ref"] = schema.pop("$dynamicRef")

    def _evaluated(self, schema: Schema) -> list[Any]:
        """Exchanged before all others: what is evaluated depends on which keywords there are, not only on what is
        valid."""
        if schema.keys().isdisjoint(UNEVALUATED):
            return []
        try:
            extra = without_unevaluated(schema, self._root)
        except UnknownEvaluation:
            raise NotRewritten from None
        for name in UNEVALUATED:
            schema.pop(name, None)
        return extra

    def _one_of(self, schema: Schema) -> list[Any]:
        alternatives = schema.get("oneOf")
        if not self._splits_one_of or not isinstance(alternatives, list) or len(alternatives) > 16:
            return []
        negated = [negation(each) for each in alternatives]
        if any(each is None for each in negated):
            return []
        del schema["oneOf"]
        exclusive = [
            {"allOf": [each, *(other for at, other in enumerate(negated) if at != index)]}
            for index, each in enumerate(alternatives)
        ]
        return [{"anyOf": exclusive}]


def _dynamic_names(root: Any) -> dict[str, int]:
    found: dict[str, int] = {}
    waiting = [root]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            anchors = (item.get("$dynamicAnchor"), item.get("$anchor"))  # a property may have such a name too
            for name in {each for each in anchors if isinstance(each, str)}:
                found[name] = found.get(name, 0) + 1
            waiting.extend(item.values())
        elif isinstance(item, list):
            waiting.extend(item)
    return found


def _round_counts(schema: Schema) -> None:
    for name in _COUNTS:
        value = schema.get(name)
        if isinstance(value, float) and value.is_integer():
            schema[name] = int(value)


def _drop_unused(schema: Schema) -> None:
    """Keywords without effect. What is dropped with an `if` cannot be referred to any more, which is then refused."""
    if "if" not in schema:
        schema.pop("then", None)
        schema.pop("else", None)
    elif "then" not in schema and "else" not in schema:
        del schema["if"]
    if "contains" not in schema:
        schema.pop("minContains", None)
        schema.pop("maxContains", None)
    elif schema.get("minContains") == 0 and "maxContains" not in schema:
        del schema["contains"], schema["minContains"]
    if schema.get("uniqueItems") is False or schema.get("maxItems") in (0, 1):
        schema.pop("uniqueItems", None)
    if schema.get("propertyNames") is True:
        del schema["propertyNames"]


def _unevaluated(schema: Schema) -> None:
    """Without schemas beside it that evaluate properties too, the keyword means the same as `additionalProperties`."""
    for name, plain, unless in (
        ("unevaluatedProperties", "additionalProperties", ()),
        ("unevaluatedItems", "items", ("contains",)),
    ):
        if schema.get(name) is True or (name in schema and plain in schema):
            del schema[name]
        elif name in schema and not any(each in schema for each in (*_APPLICATORS, *unless)):
            schema[plain] = schema.pop(name)


def _conditional(schema: Schema) -> list[Any]:
    if "if" not in schema:
        return []
    condition = schema["if"]
    otherwise = negation(condition)
    if otherwise is None:
        return []
    del schema["if"]
    holds, fails = schema.pop("then", True), schema.pop("else", True)
    return [{"anyOf": [{"allOf": [condition, holds]}, {"allOf": [otherwise, fails]}]}]


def _dependent(schema: Schema) -> list[Any]:
    """`dependentRequired` and `dependentSchemas`: the property is missing, or what depends on it holds."""
    extra: list[Any] = []
    required, schemas = schema.get("dependentRequired"), schema.get("dependentSchemas")
    if isinstance(required, dict) and len(required) <= MAX_DEPENDENCIES:
        del schema["dependentRequired"]
        extra += [_missing_or(name, {"required": names}) for name, names in required.items() if names]
    if isinstance(schemas, dict) and len(schemas) <= MAX_DEPENDENCIES:
        del schema["dependentSchemas"]
        extra += [_missing_or(name, each) for name, each in schemas.items()]
    return extra


def _missing_or(name: str, schema: Any) -> Schema:
    return {"anyOf": [{"properties": {name: False}}, {"allOf": [{"required": [name]}, schema]}]}


def _negated(schema: Schema) -> list[Any]:
    if "not" not in schema:
        return []
    opposite = negation(schema["not"])
    if opposite is None:
        return []
    del schema["not"]
    return [opposite]


def _contained(schema: Schema) -> list[Any]:
    """`contains` that every item satisfies, or none."""
    if schema.get("contains") not in (True, {}, False):
        return []
    least, most = schema.get("minContains", 1), schema.get("maxContains")
    if schema["contains"] is False:
        extra = [] if least == 0 else [{"type": [each for each in TYPES if each != "array"]}]
    else:
        extra = [{"minItems": least} | ({} if most is None else {"maxItems": most})]
    for name in ("contains", "minContains", "maxContains"):
        schema.pop(name, None)
    return extra


def _names(schema: Schema) -> list[Any]:
    """`propertyNames`, if nothing else in the schema names properties."""
    names = schema.get("propertyNames")
    if names is False:
        del schema["propertyNames"]
        return [{"maxProperties": 0}]
    if not isinstance(names, dict) or schema.keys() & {"properties", "patternProperties", *_APPLICATORS}:
        return []
    values = schema.get("additionalProperties", True)
    described = {key: value for key, value in names.items() if key != "type" or value != "string"}
    match described:
        case {"const": str() as name, **rest} if not rest:
            schema["properties"] = {name: values}
        case {"enum": list() as listed, **rest} if not rest:
            schema["properties"] = {name: values for name in listed if isinstance(name, str)}
        case {"pattern": str() as pattern, **rest} if not rest:
            schema["patternProperties"] = {pattern: values}
        case {"maxLength": int() as most, **rest} if not rest and type(most) is int:
            schema["patternProperties"] = {f"^[\\s\\S]{{0,{most}}}$": values}
        case _:
            return []
    schema["additionalProperties"] = False
    del schema["propertyNames"]
    return []
