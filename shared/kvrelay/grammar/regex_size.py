"""Bounds the work that a grammar asks for, before it is compiled.

`(a{99}){99}` stands for 9,801 characters. The library expands such counted repetitions when it computes the first mask,
which takes microseconds for each character, and no limit of its own ends that. `multipleOf` and the number of
structures of a tag are limited for the same reason.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from kvrelay.grammar.grammar_compiler import GrammarError
from kvrelay.protocol.grammar import Grammar, GrammarKind

MAX_EXPANDED = 20_000
MAX_MULTIPLE = 10_000
"""Of the digits of `multipleOf` without the decimal point: an automaton of remainders has as many states."""
MAX_STRUCTURES = 256

_COUNT = re.compile(r"\{(\d+)(,(\d*))?\}")
_LARK_REGEX = re.compile(r"/((?:\\.|[^/\\\n])+)/")


def check_regex_sizes(grammar: Grammar) -> None:
    """Raises GrammarError if a regex of the grammar expands to too many characters, or another part to too many states.
    Malformed ones are let through: the compiler says what is wrong with them."""
    for pattern in _patterns_of(grammar):
        size = expanded_size(pattern)
        if size > MAX_EXPANDED:
            shown = pattern if len(pattern) <= 60 else pattern[:60] + "..."
            raise GrammarError(
                f"the repetitions of the regex {shown!r} expand to {min(size, 10**12)} characters or more; at most "
                f"{MAX_EXPANDED} are allowed"
            )


def expanded_size(pattern: str) -> int:
    """The number of characters and classes in a regex whose counted repetitions are written out."""
    groups, at = [[0]], 0  # of each open group, the sizes of its parts
    while at < len(pattern):
        char = pattern[at]
        if char == "(":
            groups.append([0])
        elif char == ")" and len(groups) > 1:
            groups[-2].append(sum(groups.pop()))
        elif char == "{" and (count := _COUNT.match(pattern, at)):
            groups[-1][-1] *= max(1, int(count[1]), int(count[3] or 0))
            at = count.end()
            continue
        elif char == "[":
            at = _end_of_class(pattern, at)
            groups[-1].append(1)
        elif char not in "?*+|":
            at += char == "\\"
            groups[-1].append(1)
        at += 1
    return sum(map(sum, groups))


def _end_of_class(pattern: str, at: int) -> int:
    """The index of the bracket that closes the class at `at`, or the last index."""
    at += 2 if pattern.startswith("[^", at) else 1
    first = at
    while at < len(pattern) and (pattern[at] != "]" or at == first):
        at += 2 if pattern[at] == "\\" else 1
    return min(at, len(pattern) - 1)


def _patterns_of(grammar: Grammar) -> Iterator[str]:
    match grammar.kind:
        case GrammarKind.REGEX:
            yield grammar.text
        case GrammarKind.GRAMMAR:
            yield from _patterns_of_text(grammar.text)
        case GrammarKind.JSON_SCHEMA | GrammarKind.STRUCTURAL_TAG:
            try:
                value = json.loads(grammar.text)
            except (ValueError, RecursionError):
                return  # the compiler refuses it
            _check_structures(value)
            yield from _patterns_in(value)
    if grammar.whitespace is not None:
        yield grammar.whitespace


def _patterns_of_text(lark: str) -> Iterator[str]:
    yield from (found[1] for found in _LARK_REGEX.finditer(lark))


def _patterns_in(value: Any) -> Iterator[str]:
    """The patterns of a schema or of a structural tag. Properties with these names are taken for patterns too, which
    only makes it stricter for names that look like large regexes."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            _check_multiple(item.get("multipleOf"))
            if isinstance(item.get("pattern"), str):
                yield item["pattern"]
            if isinstance(item.get("grammar"), str):
                yield from _patterns_of_text(item["grammar"])
            if isinstance(item.get("patternProperties"), dict):
                yield from item["patternProperties"]
            waiting.extend(item.values())
        elif isinstance(item, list):
            waiting.extend(item)


def _check_multiple(value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    if isinstance(value, float) and not math.isfinite(value):
        return
    _, digits, exponent = Decimal(str(value)).normalize().as_tuple()
    assert isinstance(exponent, int)
    if len(digits) + max(exponent, 0) > 5 or int("".join(map(str, digits))) * 10 ** max(exponent, 0) > MAX_MULTIPLE:
        raise GrammarError(
            f"multipleOf {str(value)[:40]} has too many digits; without the point at most {MAX_MULTIPLE} is allowed"
        )


def _check_structures(value: Any) -> None:
    structures = value.get("structures") if isinstance(value, dict) else None
    if isinstance(structures, list) and len(structures) > MAX_STRUCTURES:
        raise GrammarError(f"at most {MAX_STRUCTURES} structures are allowed")
