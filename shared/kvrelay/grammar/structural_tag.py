"""Structural tags, as Lark: free text in which certain strings begin a part that follows a schema, and other forms.

`{"format": {...}}` is XGrammar's notation. Its formats are `const_string`, `json_schema`, `regex`, `grammar`,
`any_text`, `sequence`, `or`, `tag`, `triggered_tags`, `tags_with_separator` and `token`. Free text ends at the first
place where what follows it stands.

A `json_schema` may have its own `whitespace`, and a `regex` another pattern, `excludes`, of texts that it does not
match. `begin`, `end` and triggers are strings, or the format `{"type": "token", "token": ID}` for a special token,
which no text matches. If it has a `text`, free text ends before this text as well as before the token. A tag with
`"lazy_begin": true` is taken as soon as its `begin` is there, even if free text may stand there too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from kvrelay.excerpts import quoted, shortened
from kvrelay.grammar.exact_numbers import either, exact_schema, in_slashes, may_be_rounded
from kvrelay.grammar.grammar_compiler import GrammarError
from kvrelay.grammar.schema_rewrite import rewritten

MAX_DEPTH = 16
MAX_FORMATS = 4096
Marker = str | dict[str, Any]
"""A text, or a token."""

DEFAULT_WHITESPACE = r" {1,2}|\r?\n( {0,64}|\t{0,16})"
"""Between JSON's tokens: two spaces, or a line break and an indentation. Models may write whitespace without end."""
_LARK = re.compile(r"(?m)^\s*(%llguidance\b|[?!]*start\b\s*(\[[^\]]*\])?(\.-?\d+)?\s*:(?!:=))")
"""The library's own test takes `start ::=` of GBNF for Lark, and `?start:` of Lark for GBNF."""
_ASCII_CLASSES = "dw"
"""Of \\d and \\w, as in JSON schemas: a model of random weights would find the digits of every script."""


def lark_of_regex(pattern: str) -> str:
    return str(regex_to_lark(pattern, _ASCII_CLASSES))


def lark_of_grammar(text: str, what: str) -> str:
    """The grammar, in Lark's notation or in GBNF, as Lark. `what`: its name in the GrammarError that this raises."""
    try:
        return text if _LARK.search(text) else str(gbnf_to_lark(text))
    except Exception as error:  # the library raises plain exceptions here
        raise GrammarError(shortened(f"{what} is neither in Lark's notation nor in GBNF: {error}")) from None


def structural_tag_to_lark(text: str, whitespace: str, *, rewrites: bool = False) -> str:
    """The tag, given as JSON, as a Lark grammar. `whitespace` limits the whitespace of its JSON. `rewrites`: schemas
    are rewritten first. Raises GrammarError."""
    written = _Written(whitespace, rewrites=rewrites)
    try:
        start = written.expression(json.loads(text)["format"], "", 0)
    except GrammarError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise GrammarError(f"malformed structural tag: {error}") from None
    return lark_grammar(start, ["TAG_TEXT: /(.|\\n)*/", *written.rules], written.side_grammars)


def lark_grammar(start: str, rules: Sequence[str], side_grammars: Sequence[dict[str, str]] = ()) -> str:
    """A grammar in the library's notation."""
    lark = "\n".join(["%llguidance {}", f"start: {start}", *rules])
    return json.dumps({"grammars": [{"name": "main", "lark_grammar": lark}, *side_grammars]})


def _rewritten(schema: dict[str, Any]) -> dict[str, Any]:
    text = rewritten(json.dumps(schema))
    found: dict[str, Any] = schema if text is None else json.loads(text)
    return found


class _Written:
    def __init__(self, whitespace: str, *, rewrites: bool) -> None:
        self._whitespace, self._rewrites = whitespace, rewrites
        self.rules: list[str] = []
        self.side_grammars: list[dict[str, str]] = []
        self._texts_until: dict[str, str] = {}
        self._num_formats = 0

    def expression(self, tag_format: Any, end: Marker, depth: int) -> str:
        """Returns the expression of a format that `end` follows."""
        self._num_formats += 1
        if self._num_formats > MAX_FORMATS or depth > MAX_DEPTH:
            raise GrammarError(f"a structural tag has at most {MAX_FORMATS} formats, {MAX_DEPTH} deep")
        if not isinstance(tag_format, dict):
            raise GrammarError("malformed structural tag: a format must be an object")
        match tag_format:
            case {"type": "const_string", "value": str() as value}:
                return _joined(_quoted(value), _quoted(end))
            case {"type": "json_schema", "json_schema": dict() | bool() as schema}:
                return _joined(self._json(schema, tag_format.get("whitespace", self._whitespace)), _quoted(end))
            case {"type": "token"}:
                return _joined(_quoted(tag_format), _quoted(end))
            case {"type": "regex", "pattern": str() as pattern}:
                return _joined(self._regex(pattern, tag_format.get("excludes")), _quoted(end))
            case {"type": "grammar", "grammar": str() as grammar}:
                return _joined(self._side_grammar(grammar), _quoted(end))
            case {"type": "any_text"}:
                return self._text_until(end) if end else "TAG_TEXT"
            case {"type": "sequence", "elements": [*elements, last]}:
                if any(_is_open(each) for each in elements):
                    raise GrammarError("free text in a sequence of a structural tag must be its last element")
                firsts = [self.expression(each, "", depth + 1) for each in elements]
                return _joined(*firsts, self.expression(last, end, depth + 1))
            case {"type": "or", "elements": [_, *_] as elements}:
                return either([self.expression(each, end, depth + 1) for each in elements])
            case {"type": "tag"}:
                return _joined(self._tag(tag_format, "", depth), _quoted(end))
            case {"type": "triggered_tags", "triggers": list() as triggers, "tags": [_, *_] as tags}:
                return self._triggered(tag_format, triggers, tags, end, depth)
            case {"type": "tags_with_separator", "separator": str() as separator, "tags": [_, *_] as tags}:
                return _joined(self._separated(tag_format, separator, tags, depth), _quoted(end))
        kind = tag_format.get("type")
        raise GrammarError(f"the format {quoted(kind)} of a structural tag is malformed, or not supported")

    def _regex(self, pattern: str, excludes: Any) -> str:
        expression = f"/{in_slashes(lark_of_regex(pattern))}/"
        if not isinstance(excludes, str):
            return expression
        name = f"REGEX_{len(self.rules)}"
        self.rules.append(f"{name}: {expression} & ~/{in_slashes(lark_of_regex(excludes))}/")
        return name

    def _json(self, schema: dict[str, Any] | bool, whitespace: Any) -> str:
        if not isinstance(whitespace, str):
            raise GrammarError("the whitespace of a JSON schema in a structural tag must be a string")
        if self._rewrites and isinstance(schema, dict):
            schema = _rewritten(schema)
        if schema is False:
            return "%json false"
        schema = {} if schema is True else schema
        prefix = f"exact{len(self.rules)}_"
        if may_be_rounded(json.dumps(schema)) and (exact := exact_schema(schema, whitespace, prefix)):
            self.rules += exact.rules
            return exact.start
        return f"%json {json.dumps(schema | {'x-guidance': {'whitespace_pattern': whitespace}})}"

    def _tag(self, tag: Any, trigger: Marker, depth: int) -> str:
        """A tag without the `trigger` that it begins with."""
        match tag:
            case {"begin": str() | dict() as begin, "content": content, "end": str() | dict() as end}:
                rest = "" if isinstance(begin, dict) and begin == trigger else begin
                if isinstance(begin, str) and isinstance(trigger, str):
                    rest = begin[len(trigger) :]
                opening = self._lazy(rest) if tag.get("lazy_begin") is True else _quoted(rest)
                return _joined(opening, self.expression(content, end, depth + 1))
        raise GrammarError(
            "a tag of a structural tag needs 'begin' and 'end', which are texts or tokens, and 'content'"
        )

    def _triggered(
        self, tag_format: dict[str, Any], triggers: list[Any], tags: list[Any], end: Marker, depth: int
    ) -> str:
        if tag_format.get("excludes"):
            raise GrammarError("'excludes' of a structural tag is not supported")
        choices = []
        for tag in tags:
            begin = tag.get("begin") if isinstance(tag, dict) else None
            found = [each for each in triggers if _begins_with(begin, each)]
            if not found:
                raise GrammarError(f"no trigger is the beginning of {quoted(begin)}")
            choices.append(_joined(self._text_until(found[0]), self._tag(tag, found[0], depth)))
        one = either(choices)
        rest = self._text_until(end) if end else "TAG_TEXT"
        if tag_format.get("stop_after_first"):
            first = _joined(one, _quoted(end))
            return first if tag_format.get("at_least_one") else either([first, rest])
        return _joined(f"{one}{'+' if tag_format.get('at_least_one') else '*'}", rest)

    def _separated(self, tag_format: dict[str, Any], separator: str, tags: list[Any], depth: int) -> str:
        one = either([self._tag(tag, "", depth) for tag in tags])
        more = "" if tag_format.get("stop_after_first") else f"({_joined(_quoted(separator), one)})*"
        expression = _joined(one, more)
        return expression if tag_format.get("at_least_one") else f"({expression})?"

    def _lazy(self, text: Marker) -> str:
        """A text that the lexer takes as soon as it is there."""
        if isinstance(text, dict):
            return either([_quoted(text), *filter(None, [self._lazy(_text_of(text))])])
        if not text:
            return ""
        name = f"lazy_{len(self.rules)}"
        self.rules.append(f"{name}[lazy]: {_quoted(text)}")
        return name

    def _text_until(self, end: Marker) -> str:
        """Free text to the first `end`. Both are one lexeme, unless `end` is a token."""
        if isinstance(end, dict):
            until_token, text = _joined("TAG_TEXT", _quoted(end)), _text_of(end)
            return either([until_token, self._text_until(text)]) if text else until_token
        if end not in self._texts_until:
            self._texts_until[end] = f"until_{len(self.rules)}"
            self.rules.append(f"{self._texts_until[end]}[lazy]: TAG_TEXT {_quoted(end)}")
        return self._texts_until[end]

    def _side_grammar(self, text: str) -> str:
        name = f"grammar_{len(self.side_grammars)}"
        self.side_grammars.append({"name": name, "lark_grammar": lark_of_grammar(text, "a grammar")})
        return "@" + name


def _is_open(tag_format: Any) -> bool:
    """Returns whether a format may end with free text."""
    match tag_format:
        case {"type": "any_text" | "triggered_tags"}:
            return True
        case {"type": "sequence" | "or", "elements": list() as elements}:
            return any(_is_open(each) for each in elements)
        case {"type": "tags_with_separator", "tags": list() as tags}:
            return any(_is_open(each) for each in tags)
        case {"content": content, "end": ""}:
            return _is_open(content)
    return False


def _text_of(token: dict[str, Any]) -> str:
    text = token.get("text", "")
    if not isinstance(text, str):
        raise GrammarError("the text of a token of a structural tag must be a string")
    return text


def _begins_with(begin: Any, trigger: Any) -> bool:
    if isinstance(begin, str) and isinstance(trigger, str):
        return bool(trigger) and begin.startswith(trigger)
    return isinstance(begin, dict) and begin == trigger


def _quoted(marker: Marker) -> str:
    if isinstance(marker, str):
        return json.dumps(marker, ensure_ascii=False) if marker else ""
    token_id = marker.get("token")
    if marker.get("type") != "token" or type(token_id) is not int or token_id < 0:
        raise GrammarError("a token of a structural tag must have the type 'token' and the id 'token'")
    return f"<[{token_id}]>"


def _joined(*parts: str) -> str:
    return f"({' '.join(filter(None, parts))})" if any(parts) else '""'
