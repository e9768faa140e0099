"""Finds the properties and items that a schema evaluates, for `unevaluatedProperties` and `unevaluatedItems`.

They depend on which of the schemas beside these keywords hold for a value. A `Case` is one combination of
them; a value may be in several. More schemas that hold evaluate more, so a value's unevaluated parts are right if they
are right in one of its cases, and the keyword can be replaced by a choice among the cases.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import Any

from kvrelay.grammar.schema_negation import negation
from kvrelay.grammar.schema_walk import Schema

UNEVALUATED = ("unevaluatedProperties", "unevaluatedItems")
MAX_CASES = 16
MAX_DEPTH = 8


class UnknownEvaluation(Exception):
    """It depends on what these rules do not follow."""


@dataclass(frozen=True, slots=True)
class Case:
    """If all of `conditions` hold: the properties with these names or of these patterns, and so many first items, are
    evaluated. `has_all_properties`, `has_all_items`: every one is."""

    conditions: tuple[Any, ...] = ()
    names: frozenset[str] = frozenset()
    patterns: frozenset[str] = frozenset()
    num_items: int = 0
    has_all_properties: bool = False
    has_all_items: bool = False

    def and_also(self, other: Case) -> Case:
        return Case(
            self.conditions + other.conditions,
            self.names | other.names,
            self.patterns | other.patterns,
            max(self.num_items, other.num_items),
            self.has_all_properties or other.has_all_properties,
            self.has_all_items or other.has_all_items,
        )

    def closed(self, schema: Schema) -> Any:
        """What `unevaluatedProperties` and `unevaluatedItems` of `schema` ask for in this case."""
        closed: Schema = {}
        if "unevaluatedProperties" in schema and not self.has_all_properties:
            closed["properties"] = dict.fromkeys(sorted(self.names), True)
            closed["patternProperties"] = dict.fromkeys(sorted(self.patterns), True)
            closed["additionalProperties"] = schema["unevaluatedProperties"]
        if "unevaluatedItems" in schema and not self.has_all_items:
            closed |= {"prefixItems": [True] * self.num_items} if self.num_items else {}
            closed["items"] = schema["unevaluatedItems"]
        closed = {name: value for name, value in closed.items() if value != {}}
        return {"allOf": [*self.conditions, closed]} if self.conditions else closed


def without_unevaluated(schema: Schema, root: Any) -> list[Any]:
    """Schemas that together ask for what `unevaluatedProperties` and `unevaluatedItems` of `schema` do. `root` is the
    document that references point into.

    Raises UnknownEvaluation.
    """
    others = {name: value for name, value in schema.items() if name not in UNEVALUATED}
    cases = _Cases(root, follows_items="unevaluatedItems" in schema).of(others, 0)
    closed = [case.closed(schema) for case in cases]
    if {} in closed:
        return []
    return closed if len(closed) == 1 else [{"anyOf": closed}]


class _Cases:
    def __init__(self, root: Any, *, follows_items: bool) -> None:
        self._root = root
        self._follows_items = follows_items
        self._has_one_base = not (isinstance(root, dict) and any(map(_names_resources, root.values())))

    def of(self, schema: Any, depth: int) -> list[Case]:
        """The cases of a schema that holds."""
        if depth > MAX_DEPTH:
            raise UnknownEvaluation
        if isinstance(schema, bool):
            return [Case()]
        if not isinstance(schema, dict) or "$dynamicRef" in schema:
            raise UnknownEvaluation
        # `contains` evaluates the items that it finds. Lists and `additionalItems` are of older drafts.
        if self._follows_items and (
            "contains" in schema or "additionalItems" in schema or isinstance(schema.get("items"), list)
        ):
            raise UnknownEvaluation
        cases = [_own(schema)]
        if "$ref" in schema:
            cases = _each_with_each(cases, self.of(self._referred(schema["$ref"]), depth + 1))
        for part in _list(schema, "allOf"):
            cases = _each_with_each(cases, self.of(part, depth + 1))
        if "anyOf" in schema:
            cases = _each_with_each(cases, self._of_any(_list(schema, "anyOf"), depth))
        if "oneOf" in schema:
            cases = _each_with_each(cases, self._of_one(_list(schema, "oneOf"), depth))
        if "if" in schema:
            cases = _each_with_each(cases, self._of_conditional(schema, depth))
        dependent = schema.get("dependentSchemas", {})
        if not isinstance(dependent, dict):
            raise UnknownEvaluation
        for name, part in dependent.items():
            missing = Case(({"properties": {name: False}},))
            cases = _each_with_each(cases, [missing, *self._if_held({"required": [name]}, part, depth)])
        return cases

    def _if_held(self, condition: Any, schema: Any, depth: int) -> list[Case]:
        """The cases in which both hold. The condition evaluates nothing."""
        held = Case(tuple(each for each in (condition, schema) if each is not True))
        return [held.and_also(case) for case in self.of(schema, depth + 1)]

    def _of_any(self, parts: list[Any], depth: int) -> list[Case]:
        """Several may hold, and all that do evaluate."""
        found: list[Case] = []
        if 2 ** len(parts) > 2 * MAX_CASES:
            raise UnknownEvaluation
        for count in range(1, len(parts) + 1):
            for held in combinations(parts, count):
                cases = [Case()]
                for part in held:
                    cases = _each_with_each(cases, self._if_held(True, part, depth))
                found += cases
        return found

    def _of_one(self, parts: list[Any], depth: int) -> list[Case]:
        """That no other holds is what `oneOf` itself asks for."""
        return [case for part in parts for case in self._if_held(True, part, depth)]

    def _of_conditional(self, schema: Schema, depth: int) -> list[Case]:
        condition = schema["if"]
        otherwise = negation(condition)
        if otherwise is None:
            raise UnknownEvaluation
        holds = _each_with_each(
            self._if_held(True, condition, depth), self._if_held(True, schema.get("then", True), depth)
        )
        return [*holds, *self._if_held(otherwise, schema.get("else", True), depth)]

    def _referred(self, reference: Any) -> Any:
        """Raises UnknownEvaluation for what is no pointer into the document."""
        if (
            not self._has_one_base
            or not isinstance(reference, str)
            or not reference.startswith("#/")
            or "%" in reference
        ):
            raise UnknownEvaluation
        found = self._root
        for part in reference[2:].split("/"):
            name = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, dict) or name not in found:
                raise UnknownEvaluation
            found = found[name]
        return found


def _names_resources(value: Any) -> bool:
    """Returns whether parts of it may have other base URIs."""
    if isinstance(value, dict):
        return "$id" in value or any(map(_names_resources, value.values()))
    return isinstance(value, list) and any(map(_names_resources, value))


def _own(schema: Schema) -> Case:
    """Returns the case of the schema's own keywords."""
    for name in ("properties", "patternProperties"):
        if not isinstance(schema.get(name, {}), dict):
            raise UnknownEvaluation
    items = schema.get("prefixItems", [])
    if not isinstance(items, list):
        raise UnknownEvaluation
    return Case(
        names=frozenset(schema.get("properties", {})),
        patterns=frozenset(schema.get("patternProperties", {})),
        num_items=len(items),
        has_all_properties=not schema.keys().isdisjoint(("additionalProperties", "unevaluatedProperties")),
        has_all_items=not schema.keys().isdisjoint(("items", "unevaluatedItems")),
    )


def _each_with_each(some: list[Case], others: list[Case]) -> list[Case]:
    if len(some) * len(others) > MAX_CASES:
        raise UnknownEvaluation
    return [case.and_also(other) for case in some for other in others]


def _list(schema: Schema, name: str) -> list[Any]:
    found = schema.get(name, [])
    if not isinstance(found, list):
        raise UnknownEvaluation
    return found
