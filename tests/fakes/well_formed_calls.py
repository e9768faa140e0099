"""A slow oracle for parsers of calls: all well-formed calls in a text, wherever they stand."""

from __future__ import annotations

import ast
import itertools
import json
import math
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvrelay.text.output_parsing.argument_values import ANY_TYPE, STRING, types_of, written_json
from tests.fakes.call_families import TOOLS, Call

SPACES = r"[ \t\n\r]*"
NAME = r"([A-Za-z0-9_.:/-]{1,256})"
KEYS = {"parameters": "arguments"}


class NotWellFormed(ValueError):
    pass


def _finite(text: str) -> float:
    largest = sys.float_info.max
    return min(max(float(text), -largest), largest)


def _integer(text: str) -> float:
    return int(text) if math.isfinite(float(text)) else _finite(text)


def _refused(text: str) -> Any:
    raise NotWellFormed(text)


DECODER = json.JSONDecoder(parse_constant=_refused, parse_float=_finite, parse_int=_integer)
PAIRS = json.JSONDecoder(object_pairs_hook=list)


def plain(value: Any) -> Any:
    """The value with a mark for each half of a character."""
    return json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))


def _json_at(text: str, at: int) -> tuple[Any, int]:
    try:
        return DECODER.raw_decode(text, at)
    except RecursionError as error:
        raise NotWellFormed from error


def _call_of(written: Any, pairs: Any) -> Call:
    """`pairs`: those of the object, which has no key twice."""
    if not isinstance(written, dict):
        raise NotWellFormed
    keys = [KEYS.get(key, key) for key, _ in pairs]
    name = written.get("name")
    if len(set(keys)) < len(keys) or not isinstance(name, str) or not name:
        raise NotWellFormed
    arguments = next((value for key, value in written.items() if KEYS.get(key, key) == "arguments"), None)
    if isinstance(arguments, str):
        arguments = DECODER.decode(arguments or "{}")
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        raise NotWellFormed
    return plain(name), plain(arguments)


def _call_at(text: str, at: int, behind: str = "") -> Iterator[Call]:
    """The object there as a call, or its objects if it is a list."""
    try:
        value, end = _json_at(text, at)
        pairs = PAIRS.raw_decode(text, at)[0]
        is_list = isinstance(value, list)
        calls = [
            _call_of(*each) for each in zip(value if is_list else [value], pairs if is_list else [pairs], strict=True)
        ]
    except (ValueError, TypeError):
        return
    if re.compile(behind).match(text, end):
        yield from calls


def _object_at(text: str, name: str, at: int, behind: str = "") -> Iterator[Call]:
    try:
        value, end = _json_at(text, at)
    except ValueError:
        return
    if isinstance(value, dict) and re.compile(behind).match(text, end):
        yield name, plain(value)


def _hermes(text: str) -> Iterator[Call]:
    for found in re.finditer(rf"<tool_call>{SPACES}(?={{)", text):
        yield from _call_at(text, found.end(), rf"{SPACES}</tool_call>")


def _llama(text: str) -> Iterator[Call]:
    for found in re.finditer(r"\{", text):
        yield from (call for call in _call_at(text, found.start()) if call[0] in {tool.name for tool in TOOLS})


def _mistral(text: str) -> Iterator[Call]:
    for found in re.finditer(rf"\[TOOL_CALLS\]{SPACES}", text):
        yield from _call_at(text, found.end())
        for named in re.finditer(rf"\s*{NAME}\s*(?:\[CALL_ID\]\s*[A-Za-z0-9_-]+\s*)?(?:\[ARGS\])?{SPACES}", text):
            if named.start() == found.end():
                yield from _object_at(text, named[1], named.end())


def _deepseek(text: str) -> Iterator[Call]:
    begin, separator, end = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"  # noqa: RUF001
    for found in re.finditer(rf"{begin}\s*{NAME}\s*{separator}{SPACES}(?={{)", text):
        yield from _object_at(text, found[1], found.end(), SPACES + end)
    for found in re.finditer(
        rf"{begin}\s*[A-Za-z0-9_.:/-]+\s*{separator}\s*{NAME}[^\S\n]*\n{SPACES}```json{SPACES}", text
    ):
        yield from _object_at(text, found[1], found.end(), rf"{SPACES}```{SPACES}{end}")


def _kimi(text: str) -> Iterator[Call]:
    begin, end = re.escape("<|tool_call_begin|>"), re.escape("<|tool_call_end|>")
    separator = re.escape("<|tool_call_argument_begin|>")
    for found in re.finditer(rf"{begin}\s*(?:functions\.)?([A-Za-z0-9_.-]+?)(?::\d+)?\s*{separator}{SPACES}", text):
        yield from _object_at(text, found[1], found.end(), SPACES + end)


def _harmony(text: str) -> Iterator[Call]:
    header = r"\bto=functions\.([^\s<]+)(?:(?!<\|(?:message|end|call|return)\|>).)*<\|message\|>"
    behind = rf"{SPACES}(?:<\|(?:end|call|return|start|channel)\|>|\Z)"
    for found in re.finditer(header + SPACES, text, re.DOTALL):
        yield from _object_at(text, found[1], found.end(), behind)
        if re.compile(behind).match(text, found.end()):
            yield found[1], {}


def _anywhere(call: re.Pattern[str], opening: str, text: str) -> Iterator[re.Match[str]]:
    """All matches, which may overlap."""
    for found in re.finditer(re.escape(opening), text):
        if matched := call.match(text, found.start()):
            yield matched


def _written(name: str, values: Sequence[tuple[str, str, str]]) -> Call:
    """`values`: keys and texts, and whether they say that they are texts."""
    schemas = {tool.name: tool.parameters for tool in TOOLS}
    properties = schemas.get(name, {}).get("properties", {})
    arguments = {}
    for key, text, is_text in values:
        types = types_of(properties[key], {}) if key in properties else ANY_TYPE
        types = {"true": STRING, "false": (types - STRING) or ANY_TYPE}.get(is_text, types)
        arguments[key] = json.loads(written_json(text, types))
    return name, plain(arguments)


def _granite(text: str) -> Iterator[Call]:
    for found in re.finditer(rf"(?:<\|tool_call\|>|<tool_call>){SPACES}(?=\[)", text):
        yield from _call_at(text, found.end())


def _invocations(text: str, mark: str, key_end: str) -> Iterator[Call]:
    end = rf"</{mark}parameter>\s*(?:<{mark}parameter name=\"|</{mark}invoke>)"
    value = rf"<{mark}parameter name=\"(.*?){key_end}((?:(?!{end}).)*)</{mark}parameter>"
    call = re.compile(rf"<{mark}invoke name=\"{NAME}\">((?:\s*{value})*)\s*</{mark}invoke>", re.DOTALL)
    for found in _anywhere(call, f'<{mark}invoke name="', text):
        yield _written(found[1], [(key, each, kind) for key, kind, each in re.findall(value, found[2], re.DOTALL)])


def _minimax_m2(text: str) -> Iterator[Call]:
    return _invocations(text, "", '()">')


def _deepseek_v32(text: str) -> Iterator[Call]:
    return _invocations(text, "｜DSML｜", '" string="(true|false)">')  # noqa: RUF001


def _qwen3_coder(text: str, tag: str = "tool_call") -> Iterator[Call]:
    end = rf"</parameter>\s*(?:<parameter=|</function>|</{tag}>)|</function>\n</{tag}>\s*(?:<{tag}>|\Z)"
    value = rf"<parameter=([^>\n]*)>\n?((?:(?!{end}).)*)</parameter>"
    call = re.compile(rf"<function={NAME}\s*>((?:\s*{value})*)\s*</function>", re.DOTALL)
    for found in _anywhere(call, "<function=", text):
        pairs = re.findall(value, found[2], re.DOTALL)
        yield _written(found[1], [(key.strip(), each.removesuffix("\n"), "") for key, each in pairs])


def _glm45(text: str) -> Iterator[Call]:
    value = r"<arg_value>((?:(?!</arg_value>\s*(?:<arg_key>|</tool_call>)).)*)</arg_value>"
    pair = rf"<arg_key>((?:(?!</arg_key>|</tool_call>).)*)</arg_key>{SPACES}{value}"
    call = re.compile(rf"<tool_call>\s*{NAME}\s*((?:{pair}{SPACES})*)</tool_call>", re.DOTALL)
    for found in _anywhere(call, "<tool_call>", text):
        yield _written(found[1], [(key.strip(), each, "") for key, each in re.findall(pair, found[2], re.DOTALL)])


WORDS = {"true": True, "false": False, "null": None}


def _literal(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value) if value is None or isinstance(value, str | bool | int | float):
            return _finite(str(value)) if isinstance(value, float) else value
        case ast.Name(name) if name in WORDS:
            return WORDS[name]
        case ast.UnaryOp(ast.USub(), ast.Constant(value)) if isinstance(value, int | float):
            return -_literal(ast.Constant(value))
        case ast.UnaryOp(ast.UAdd(), ast.Constant(value)) if isinstance(value, int | float):
            return value
        case ast.List(values) | ast.Tuple(values):
            return list(map(_literal, values))
        case ast.Dict(keys, values) if None not in keys:
            return {_literal(key): _literal(value) for key, value in zip(keys, values, strict=True) if key is not None}
    raise NotWellFormed


def _python_call(node: ast.expr) -> Call:
    match node:
        case ast.Call(ast.Name(name), [], keywords) if name in {tool.name for tool in TOOLS}:
            keys = [each.arg for each in keywords]
            if None in keys or len(set(keys)) < len(keys):
                raise NotWellFormed
            return name, plain({each.arg: _literal(each.value) for each in keywords})
    raise NotWellFormed


def _pythonic(text: str) -> Iterator[Call]:
    starts = [0, *(found.end() for found in re.finditer(re.escape("<|python_start|>"), text))]
    ends = [*(found.start() for found in re.finditer(re.escape("<|python_end|>"), text)), len(text)]
    for start, end in itertools.product(starts, ends):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                parsed = ast.parse(text[start:end].strip(), mode="eval").body
            if isinstance(parsed, ast.List):
                yield from list(map(_python_call, parsed.elts))
        except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError, OverflowError):
            pass


ORACLES: dict[str, Callable[[str], Iterator[Call]]] = {
    "hermes": _hermes,
    "llama3_json": _llama,
    "qwen3_coder": _qwen3_coder,
    "seed_oss": lambda text: _qwen3_coder(text, "seed:tool_call"),
    "minimax_m2": _minimax_m2,
    "deepseek_v32": _deepseek_v32,
    "granite": _granite,
    "glm45": _glm45,
    "mistral": _mistral,
    "mistral_json": _mistral,
    "deepseek_v3": _deepseek,
    "deepseek_v31": _deepseek,
    "kimi_k2": _kimi,
    "pythonic": _pythonic,
    "harmony": _harmony,
}
"""By parser."""


def well_formed_calls(parser: str, text: str) -> list[Call]:
    return list(ORACLES[parser](text))
