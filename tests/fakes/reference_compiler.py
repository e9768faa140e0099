"""A compiler of grammars in plain Python: choices and a subset of regexes, by derivatives over bytes.

Slow, and written apart from any library, so that tests can compare masks with it. Source of the algorithm: Brzozowski,
"Derivatives of Regular Expressions", 1964.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache, reduce
from re import _constants, _parser  # type: ignore[attr-defined]
from typing import Any

import numpy as np

from kvrelay.grammar.grammar_compiler import GrammarError, GrammarMatcher, TokenMask
from kvrelay.protocol.sampling import Grammar, GrammarKind

Node = tuple[Any, ...]
"""("none",), ("empty",), ("bytes", frozenset), ("then", node, node), ("or", frozenset of nodes), ("star", node)."""
NONE: Node = ("none",)
EMPTY: Node = ("empty",)
DIGITS = frozenset(b"0123456789")
WORD = frozenset(each for each in range(128) if chr(each).isalnum() or chr(each) == "_")
SPACE = frozenset(b" \t\n\r\f\v")
_CATEGORIES = {"DIGIT": DIGITS, "WORD": WORD, "SPACE": SPACE}


class ReferenceCompiler:
    """Refuses all other grammars. `token_bytes`: of each token; None for a special one."""

    def __init__(self, token_bytes: Sequence[bytes | None], vocab_size: int, end_token_id: int) -> None:
        self._tokens = [(token_id, data) for token_id, data in enumerate(token_bytes) if data]
        self._bytes = dict(self._tokens)
        self._vocab_size = vocab_size
        self._end = end_token_id

    @property
    def mask_words(self) -> int:
        return (self._vocab_size + 31) // 32

    def knows(self, grammar: Grammar) -> bool:
        return False

    def compile(self, grammar: Grammar) -> GrammarMatcher:
        return _Matcher(self._tokens, self._bytes, self._end, parse(grammar))


class _Matcher:
    allows_all = False

    def __init__(self, tokens: list[tuple[int, bytes]], bytes_of: dict[int, bytes], end: int, state: Node) -> None:
        self._tokens, self._bytes, self._end = tokens, bytes_of, end
        self._state = state
        self._has_ended = False

    def copy(self) -> GrammarMatcher:
        other = _Matcher(self._tokens, self._bytes, self._end, self._state)
        other._has_ended = self._has_ended
        return other

    def accept(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if token_id == self._end:
                if not self._has_ended and not is_nullable(self._state):
                    raise GrammarError("the output is not complete")
                self._has_ended = True
                continue
            state = NONE if self._has_ended else after(self._state, self._bytes.get(token_id, b""))
            if state == NONE or token_id not in self._bytes:
                raise GrammarError(f"token {token_id} is not allowed")
            self._state = state

    def forced(self) -> Sequence[int]:
        """Only the end: which tokens a forced text has is the tokenizer's business."""
        return [self._end] if self._state == EMPTY and not self._has_ended else []

    def fill(self, mask: TokenMask) -> None:
        bits = np.zeros(mask.size * 32, np.uint8)
        if not self._has_ended:
            bits[[token_id for token_id, data in self._tokens if after(self._state, data) != NONE]] = 1
        bits[self._end] = self._has_ended or is_nullable(self._state)
        if not bits.any():
            raise GrammarError("no output satisfies it")
        mask[:] = np.packbits(bits, bitorder="little").view(np.int32)


def parse(grammar: Grammar) -> Node:
    """Raises GrammarError."""
    if grammar.kind is GrammarKind.CHOICE:
        return either(literal(choice.encode()) for choice in json.loads(grammar.text))
    if grammar.kind is not GrammarKind.REGEX:
        raise GrammarError(f"the reference has no grammars of kind {grammar.kind}")
    try:
        return _sequence(_parser.parse(grammar.text, re.ASCII))
    except re.error as error:
        raise GrammarError(str(error)) from None


def then(first: Node, second: Node) -> Node:
    if NONE in (first, second):
        return NONE
    if first == EMPTY:
        return second
    return first if second == EMPTY else ("then", first, second)


def either(nodes: Iterable[Node]) -> Node:
    flat: set[Node] = set()
    for node in nodes:
        flat |= node[1] if node[0] == "or" else {node}
    flat.discard(NONE)
    if len(flat) <= 1:
        return flat.pop() if flat else NONE
    return ("or", frozenset(flat))


def star(node: Node) -> Node:
    return EMPTY if node in (NONE, EMPTY) else ("star", node)


def literal(data: bytes) -> Node:
    return reduce(then, (("bytes", frozenset([each])) for each in data), EMPTY)


@lru_cache(1 << 16)
def is_nullable(node: Node) -> bool:
    """Returns whether the empty text is complete."""
    match node[0]:
        case "then":
            return is_nullable(node[1]) and is_nullable(node[2])
        case "or":
            return any(is_nullable(each) for each in node[1])
    return node[0] in ("empty", "star")


@lru_cache(1 << 18)
def derivative(node: Node, byte: int) -> Node:
    """What may follow the byte."""
    match node[0]:
        case "bytes":
            return EMPTY if byte in node[1] else NONE
        case "then":
            found = then(derivative(node[1], byte), node[2])
            return either([found, derivative(node[2], byte)]) if is_nullable(node[1]) else found
        case "or":
            return either(derivative(each, byte) for each in node[1])
        case "star":
            return then(derivative(node[1], byte), node)
    return NONE


def after(node: Node, data: bytes) -> Node:
    for byte in data:
        node = derivative(node, byte)
        if node == NONE:
            break
    return node


def _range(low: int, high: int) -> Node:
    return ("bytes", frozenset(range(low, high + 1)))


_TAIL = _range(0x80, 0xBF)
NON_ASCII = either(
    [
        then(_range(0xC2, 0xDF), _TAIL),
        then(("bytes", frozenset([0xE0])), then(_range(0xA0, 0xBF), _TAIL)),
        then(("bytes", frozenset([*range(0xE1, 0xED), 0xEE, 0xEF])), then(_TAIL, _TAIL)),
        then(("bytes", frozenset([0xED])), then(_range(0x80, 0x9F), _TAIL)),
        then(("bytes", frozenset([0xF0])), then(_range(0x90, 0xBF), then(_TAIL, _TAIL))),
        then(_range(0xF1, 0xF3), then(_TAIL, then(_TAIL, _TAIL))),
        then(("bytes", frozenset([0xF4])), then(_range(0x80, 0x8F), then(_TAIL, _TAIL))),
    ]
)
"""A character outside ASCII, in UTF-8."""


def _sequence(items: Iterable[tuple[Any, Any]]) -> Node:
    return reduce(then, [_item(*item) for item in items], EMPTY)


def _item(code: Any, value: Any) -> Node:
    match str(code):
        case "LITERAL":
            return literal(chr(value).encode())
        case "NOT_LITERAL":
            return _class([(_constants.NEGATE, None), (_constants.LITERAL, value)])
        case "ANY":
            return _class([(_constants.NEGATE, None), (_constants.LITERAL, ord("\n"))])
        case "IN":
            return _class(value)
        case "BRANCH":
            return either(_sequence(each) for each in value[1])
        case "SUBPATTERN":
            return _sequence(value[3])
        case "MAX_REPEAT":
            low, high, inner = value[0], value[1], _sequence(value[2])
            node = star(inner) if high == _constants.MAXREPEAT else EMPTY
            for _ in range(0 if high == _constants.MAXREPEAT else int(high) - low):
                node = either([EMPTY, then(inner, node)])
            return reduce(lambda rest, _: then(inner, rest), range(low), node)
    raise GrammarError(f"the reference has no {code} in a regex")


def _class(items: list[tuple[Any, Any]]) -> Node:
    found: set[int] = set()
    is_negated = False
    for code, value in items:
        match str(code):
            case "NEGATE":
                is_negated = True
            case "LITERAL" if value < 128:
                found.add(value)
            case "RANGE" if value[1] < 128:
                found |= {*range(value[0], value[1] + 1)}
            case "CATEGORY":
                name = str(value).removeprefix("CATEGORY_")
                chars = _CATEGORIES[name.removeprefix("NOT_")]
                if name.startswith("NOT_"):
                    raise GrammarError("the reference has no negated category in a class")
                found |= chars
            case _:
                raise GrammarError("the reference has only ASCII in a class")
    if is_negated:
        return either([("bytes", frozenset(range(128)) - found), NON_ASCII])
    return ("bytes", frozenset(found)) if found else NONE
