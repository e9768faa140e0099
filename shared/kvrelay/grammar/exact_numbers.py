"""Schemas with numbers that llguidance would round: it reads a schema's numbers as doubles, and long ones only nearly
so. What leads to such a number is written in Lark, with a regex for the number; all else stays `%json`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from kvrelay.excerpts import quoted
from kvrelay.grammar.grammar_compiler import GrammarError
from kvrelay.grammar.schema_rewrite import LISTS, MAPS, SINGLE, TYPES, referred

Schema = dict[str, Any]

EXACT_BELOW = 2**53
EXACT_DIGITS, EXACT_EXPONENT = 15, 22
"""The library's decoder of JSON reads floats exactly up to these: https://github.com/serde-rs/json/issues/536."""
MAX_DIGITS = 64
"""Of a number in the output, if its schema sets a larger maximum."""
MAX_DEPTH = 64

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_OF_NUMBERS = (*_BOUNDS, "multipleOf", "format")
_OF_OBJECTS = {"type", "properties", "required", "additionalProperties"}
_OF_ARRAYS = {"type", "items", "minItems", "maxItems"}
_DEFINITIONS = ("$defs", "definitions")
_SHARED = ("$schema", *_DEFINITIONS)
_KEYWORDS = frozenset(
    {
        *(*SINGLE, *LISTS, *MAPS, *_BOUNDS, "type", "const", "enum", "multipleOf", "format", "$ref", "$dynamicRef"),
        *("required", "minProperties", "maxProperties", "dependentRequired", "dependencies", "unevaluatedProperties"),
        *("minItems", "maxItems", "uniqueItems", "contains", "additionalItems", "unevaluatedItems"),
        *("minLength", "maxLength", "pattern"),
    }
) - {*_DEFINITIONS}
_MAY_BE_ROUNDED = re.compile(r"[\d.]{16}|\d[eE][+-]?\d")
_STRING = r'/"(\\(["\\\/bfnrt]|u[a-fA-F0-9]{4})|[^"\\\x00-\x1F\x7F])*"/'


class ExactSchema:
    """`rules`: in Lark, of which `start` is the schema's."""

    def __init__(self, schema: Schema, whitespace: str, prefix: str) -> None:
        """`whitespace`: a regex for what may stand between JSON's tokens. `prefix`: of the names of all rules. Raises
        GrammarError for a number beside keywords that cannot be written with it."""
        self._root, self._whitespace, self._prefix = schema, whitespace, prefix
        self.rules: list[str] = []
        self._of_references: dict[str, str] = {}
        self._space = ""
        if whitespace:
            self._space = self._terminal(f"/{in_slashes(whitespace)}/ & /(.|\\n)+/") + "?"
        self.start = self._value(schema, 0)

    def _rule(self, expression: str) -> str:
        name = f"{self._prefix}{len(self.rules)}"
        self.rules.append(f"{name}: {expression}")
        return name

    def _terminal(self, expression: str) -> str:
        name = f"{self._prefix}{len(self.rules)}".upper()
        self.rules.append(f"{name}: {expression}")
        return name

    def _value(self, schema: Any, depth: int) -> str:
        """The expression of a schema's values."""
        if depth > MAX_DEPTH:
            raise GrammarError("it is nested too deeply")
        if not isinstance(schema, dict) or not _is_rounded(schema, self._root):
            return self._by_library(schema)
        keys = schema.keys() & _KEYWORDS
        if keys == {"$ref"}:
            return self._reference(schema["$ref"], depth)
        if keys == {"anyOf"} or (keys == {"allOf"} and len(schema["allOf"]) == 1):
            (parts,) = (schema[name] for name in keys)
            return either([self._value(each, depth + 1) for each in parts])
        if "const" in keys or "enum" in keys:
            return self._listed(schema, keys)
        types = _types_of(schema)
        if types & {"number", "integer"} and any(_is_inexact(schema.get(name)) for name in _BOUNDS):
            return self._number_or_other(schema, types, depth)
        if types == {"object"} and keys <= _OF_OBJECTS:
            return self._object(schema, depth)
        if types == {"array"} and keys <= _OF_ARRAYS:
            return self._array(schema, depth)
        raise _unsupported(keys)

    def _by_library(self, schema: Any) -> str:
        if schema is False:
            raise GrammarError("no output satisfies it")
        schema = {} if schema is True else schema
        needed = _SHARED if '"$ref":' in json.dumps(schema) else ("$schema",)
        shared = {name: self._root[name] for name in needed if name in self._root}
        references = set(re.findall(r'"\$ref": "([^"]*)', json.dumps([schema, shared])))
        if any(not each.startswith(("#/$defs/", "#/definitions/")) for each in references):
            raise _unsupported({"$ref"})
        return f"%json {json.dumps({**shared, **schema, 'x-guidance': {'whitespace_pattern': self._whitespace}})}"

    def _reference(self, reference: str, depth: int) -> str:
        if reference not in self._of_references:
            if (target := referred(reference, self._root)) is None:
                raise _unsupported({"$ref"})
            name = self._of_references[reference] = f"{self._prefix}ref{len(self._of_references)}"
            self.rules.append(f"{name}: {self._value(target, depth + 1)}")
        return self._of_references[reference]

    def _listed(self, schema: Schema, keys: set[str]) -> str:
        if others := keys - {"const", "enum", "type", *_BOUNDS, "format"}:
            raise _unsupported(others)
        values = [schema["const"]] if "const" in keys else schema["enum"]
        if not isinstance(values, list) or {"const", "enum"} <= keys:
            raise _unsupported({"enum"})
        types, bounds = _types_of(schema), _bounds_of(schema)
        texts = [_written(each) for each in values if _has_type(each, types) and _is_within(each, bounds)]
        if not texts:
            raise GrammarError("no output satisfies it")
        return self._terminal(either([_quoted(each) for each in texts]))

    def _number_or_other(self, schema: Schema, types: set[str], depth: int) -> str:
        """Bounds are about numbers alone: values of other types need not follow them."""
        if "multipleOf" in schema:
            raise _unsupported({"multipleOf"})
        number = self._terminal(_number(*_bounds_of(schema), is_integer="number" not in types))
        rest = [each for each in TYPES if each in types - {"number", "integer"}]
        if not rest:
            return number
        others = {name: value for name, value in schema.items() if name not in _OF_NUMBERS}
        return either([number, self._value(others | {"type": rest}, depth + 1)])

    def _object(self, schema: Schema, depth: int) -> str:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        others = schema.get("additionalProperties", True)
        items: list[tuple[str, bool]] = []
        names = dict.fromkeys([*properties, *required])
        for name in names:
            value, is_required = properties.get(name, others), name in required
            if value is not False or is_required:
                items.append((self._property(_quoted(json.dumps(name)), value, depth), is_required))
        if others is not False:
            taken = either([_quoted(json.dumps(name)) for name in names])
            name = self._terminal(f"{_STRING} & ~{taken}" if names else _STRING)
            other = self._rule(self._property(name, others, depth))
            items.append((f'{other} ("," {self._space} {other})*', False))
        following, first = '""', '""'
        for item, is_required in reversed(items):
            separated = f'"," {self._space} {item}'
            alone = f"{item} {following}"
            first = self._rule(alone if is_required else f"{alone} | {first}")
            following = self._rule(f"{separated if is_required else f'({separated})?'} {following}")
        return f'("{{" {self._space} {first} "}}")'

    def _property(self, name: str, schema: Any, depth: int) -> str:
        return f'{name} {self._space} ":" {self._space} {self._value(schema, depth + 1)} {self._space}'

    def _array(self, schema: Schema, depth: int) -> str:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return f'("[" {self._space} "]")'
        item = self._rule(f"{self._value(schema.get('items', True), depth + 1)} {self._space}")
        more = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        items = f'({item} ("," {self._space} {item}){more})'
        return f'("[" {self._space} {items}{"" if least else "?"} "]")'


def may_be_rounded(text: str) -> bool:
    """Whether a schema, given as JSON, may have numbers that the library changes. False for nearly every schema, which
    need not be read then."""
    return _MAY_BE_ROUNDED.search(text) is not None


def exact_schema(schema: Any, whitespace: str, prefix: str) -> ExactSchema | None:
    """The schema in Lark. None if the library keeps all of its numbers. Raises GrammarError."""
    if not isinstance(schema, dict):
        return None
    try:
        return ExactSchema(schema, whitespace, prefix) if _is_rounded(schema, schema) else None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, GrammarError):
            raise
        raise GrammarError(f"malformed schema: {error}") from None


def _unsupported(keywords: set[str]) -> GrammarError:
    return GrammarError(
        f"numbers of more than {EXACT_DIGITS} digits cannot be kept exactly beside {sorted(keywords)[0]!r}"
    )


def _is_rounded(schema: Schema, root: Schema) -> bool:
    """Whether values of the schema depend on a number that the library would change."""
    seen, waiting = set[str](), [schema]
    while waiting:
        part = waiting.pop()
        if any(_is_inexact(part.get(name)) for name in ("const", "enum", *_BOUNDS)):
            return True
        if isinstance(step := part.get("multipleOf"), float) and _is_inexact(step):
            raise GrammarError(f"the multipleOf {quoted(step)} has too many digits")
        reference = part.get("$ref")
        found = [part.get(name) for name in SINGLE]
        found += [each for name in LISTS if isinstance(part.get(name), list) for each in part[name]]
        maps = [name for name in MAPS if name not in _DEFINITIONS]
        found += [each for name in maps if isinstance(part.get(name), dict) for each in part[name].values()]
        if isinstance(reference, str) and reference not in seen:
            seen.add(reference)
            target = referred(reference, root)
            # Any schema may have the name that the reference gives.
            found += [target] if target is not None else [root, *_defined(root)]
        waiting += [each for each in found if isinstance(each, dict)]
    return False


def _defined(root: Schema) -> list[Any]:
    return [each for name in _DEFINITIONS if isinstance(root.get(name), dict) for each in root[name].values()]


def _is_inexact(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_is_inexact, value))
    if isinstance(value, dict):
        return any(map(_is_inexact, value.values()))
    if isinstance(value, float) and math.isfinite(value):
        _, digits, exponent = Decimal(repr(value)).as_tuple()
        return len(digits) > EXACT_DIGITS or abs(int(exponent)) > EXACT_EXPONENT or abs(value) >= EXACT_BELOW
    return isinstance(value, int | float) and abs(value) >= EXACT_BELOW


def _types_of(schema: Schema) -> set[str]:
    given = schema.get("type", list(TYPES))
    return {given} if isinstance(given, str) else set(given)


def _has_type(value: Any, types: set[str]) -> bool:
    match value:
        case None:
            return "null" in types
        case bool():
            return "boolean" in types
        case int() | float():
            return "number" in types or ("integer" in types and value % 1 == 0)
        case str():
            return "string" in types
        case list():
            return "array" in types
    return "object" in types


Bound = tuple[Decimal, bool] | None
"""A number, and whether it is within the bound."""


def _bounds_of(schema: Schema) -> tuple[Bound, Bound]:
    lows = _given(schema, "minimum", "exclusiveMinimum")
    highs = _given(schema, "maximum", "exclusiveMaximum")
    low = max(lows, key=lambda each: (each[0], not each[1]), default=None)
    return low, min(highs, key=lambda each: (each[0], each[1]), default=None)


def _given(schema: Schema, inclusive: str, exclusive: str) -> list[tuple[Decimal, bool]]:
    """In draft 4 the exclusive keyword is a flag beside the other."""
    flag = schema.get(exclusive)
    found = [(schema.get(inclusive), flag is not True), (flag, False)]
    return [
        (_bound(value, is_upper="max" in inclusive), is_within)
        for value, is_within in found
        if isinstance(value, int | float) and not isinstance(value, bool)
    ]


def _bound(value: int | float, *, is_upper: bool) -> Decimal:
    """If an integer may have been rounded to this double, the next one, which is within the bound for sure."""
    if not _may_be_integer(value) or is_upper != (value > 0):
        return _decimal(value)
    return Decimal(repr(math.nextafter(value, 0)))


def _may_be_integer(value: Any) -> bool:
    """Request bodies are read with integers of more than 64 bits as doubles, so these have lost their value."""
    return isinstance(value, float) and (value >= 2**64 or value <= -(2**63))


def _is_within(value: Any, bounds: tuple[Bound, Bound]) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return True
    low, high, number = *bounds, _decimal(value)
    return (low is None or number > low[0] or (low[1] and number == low[0])) and (
        high is None or number < high[0] or (high[1] and number == high[0])
    )


def _decimal(value: int | float) -> Decimal:
    if _may_be_integer(value) or value != value:
        raise GrammarError(f"the number {quoted(value)} has more than 64 bits")
    return Decimal(repr(value) if isinstance(value, float) else value)


def _written(value: Any) -> str:
    if isinstance(value, float):
        return format(_decimal(value), "f").removesuffix(".0")
    if isinstance(value, list | dict):
        _check_parts(value)
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _check_parts(value: Any) -> None:
    """Raises GrammarError for a number that has lost its value."""
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        if isinstance(part, float):
            _decimal(part)
        _check_parts(part)


def _number(low: Bound, high: Bound, *, is_integer: bool) -> str:
    """The terminal of all numbers within the bounds, without exponents."""
    parts = []
    if high is None or high[0] >= 0:
        nearest = low if low is not None and low[0] >= 0 else (Decimal(0), True)
        parts.append(_magnitude("", nearest, high, is_integer))
    if low is None or low[0] < 0:
        nearest = (Decimal(0), False) if high is None or high[0] >= 0 else (high[0].copy_negate(), high[1])
        farthest = None if low is None else (low[0].copy_negate(), low[1])
        parts.append(_magnitude("-", nearest, farthest, is_integer))
    found = [each for each in parts if each is not None]
    if not found:
        raise GrammarError("no output satisfies it")
    return either(found)


def _magnitude(sign: str, low: tuple[Decimal, bool], high: Bound, is_integer: bool) -> str | None:
    """The numbers of one sign, by their size."""
    if high is not None and high[0] >= 10**MAX_DIGITS:
        high = (Decimal(10**MAX_DIGITS), False)
    if low[0] >= 10**MAX_DIGITS:
        raise GrammarError(f"a number would have more than {MAX_DIGITS} digits")
    if high is not None and (low[0] > high[0] or (low[0] == high[0] and not (low[1] and high[1]))):
        return None
    sides = [_at_least(*low, is_integer)] + ([] if high is None else [_at_most(*high, is_integer)])
    if None in sides:
        return None
    return f"({' & '.join(f'/{sign}({side})/' for side in sides)})"


_FRACTION = r"(\.[0-9]+)?"


def _at_least(number: Decimal, is_within: bool, is_integer: bool) -> str:
    whole, digits = _split(number)
    if is_integer:
        return _whole_at_least(whole + bool(digits or not is_within))
    above = _whole_at_least(whole + 1) + _FRACTION
    if digits or not is_within:
        return f"{above}|{whole}\\.({_fraction_at_least(digits, is_within)})"
    return f"{above}|{whole}{_FRACTION}"


def _at_most(number: Decimal, is_within: bool, is_integer: bool) -> str | None:
    whole, digits = _split(number)
    if is_integer or (not digits and not is_within):
        last = whole if digits or is_within else whole - 1
        return None if last < 0 else _whole_at_most(last) + ("" if is_integer else _FRACTION)
    below = f"{_whole_at_most(whole - 1)}{_FRACTION}|" if whole else ""
    return f"{below}{whole}(\\.({_fraction_at_most(digits, is_within)}))?"


def _split(number: Decimal) -> tuple[int, str]:
    """The whole part, and the digits behind the point without zeros at their end."""
    whole, _, digits = format(number, "f").partition(".")
    return int(whole), digits.rstrip("0")


def _whole_at_least(number: int) -> str:
    text = str(number)
    same = [text] + [
        f"{text[:at]}[{int(digit) + 1}-9][0-9]{{{len(text) - at - 1}}}" for at, digit in enumerate(text) if digit != "9"
    ]
    return f"({'|'.join([*same, f'[1-9][0-9]{{{len(text)},}}'])})"


def _whole_at_most(number: int) -> str:
    text = str(number)
    same = [text] + [
        f"{text[:at]}[{0 if at else 1}-{int(digit) - 1}][0-9]{{{len(text) - at - 1}}}"
        for at, digit in enumerate(text)
        if int(digit) > (0 if at else 1)
    ]
    shorter = ["0"] if len(text) == 1 and number else ["0", f"[1-9][0-9]{{0,{len(text) - 2}}}"] if number else []
    return f"({'|'.join([*same, *shorter])})"


def _fraction_at_least(digits: str, is_within: bool) -> str:
    if not digits:
        return "[0-9]*" if is_within else "[0-9]*[1-9][0-9]*"
    more = f"|[{int(digits[0]) + 1}-9][0-9]*" if digits[0] != "9" else ""
    return f"{digits[0]}({_fraction_at_least(digits[1:], is_within)}){more}"


def _fraction_at_most(digits: str, is_within: bool) -> str:
    """At least one digit."""
    if not digits:
        return "0+"
    less = [f"[0-{int(digits[0]) - 1}][0-9]*"] if digits[0] != "0" else []
    if digits[1:]:
        return "|".join([f"{digits[0]}({_fraction_at_most(digits[1:], is_within)})?", *less])
    return "|".join([*([f"{digits[0]}0*"] if is_within else []), *less])


def either(choices: Sequence[str]) -> str:
    """An expression in Lark that takes what one of these takes."""
    return f"({' | '.join(choices)})"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def in_slashes(pattern: str) -> str:
    """The pattern as it stands in Lark."""
    escaped = re.sub(r"\\.|/", lambda found: "\\/" if found[0] == "/" else found[0], pattern, flags=re.DOTALL)
    return escaped.replace("\n", "\\n")
