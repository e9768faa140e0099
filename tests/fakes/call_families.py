"""How each family of models writes calls, for tests of its parser and its grammar."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from kvrelay.text.output_parsing.dialect import find_dialect
from kvrelay.text.output_parsing.events import OutputParser, Tool

TOOLS = [
    Tool(
        name="weather",
        parameters={
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "tags": {"type": "array"},
                "note": {"type": ["string", "null"]},
            },
        },
    ),
    Tool(name="now"),
]
Call = tuple[str, dict[str, Any]]


class Family(msgspec.Struct, frozen=True):
    """`calls`: returns what the model writes to make these calls."""

    parser: str
    calls: Callable[[Sequence[Call]], str]
    pieces: tuple[str, ...]

    def new_parser(self, tools: Sequence[Tool] = TOOLS) -> OutputParser:
        return find_dialect(self.parser, "harmony" if self.parser == "harmony" else "none", None).new_parser(
            tools, begins_inside=False
        )


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _xml_value(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _hermes(calls: Sequence[Call]) -> str:
    return "\n".join(f'<tool_call>\n{{"name": "{n}", "arguments": {_json(a)}}}\n</tool_call>' for n, a in calls)


def _llama(calls: Sequence[Call]) -> str:
    return "; ".join(f'{{"name": "{name}", "parameters": {_json(arguments)}}}' for name, arguments in calls)


def _granite(calls: Sequence[Call]) -> str:
    return "<|tool_call|>" + _json([{"name": name, "arguments": arguments} for name, arguments in calls])


def _minimax_m2(calls: Sequence[Call]) -> str:
    written = []
    for name, arguments in calls:
        values = [f'<parameter name="{key}">{_xml_value(value)}</parameter>\n' for key, value in arguments.items()]
        written.append(f'<invoke name="{name}">\n{"".join(values)}</invoke>')
    return "<minimax:tool_call>\n" + "\n".join(written) + "\n</minimax:tool_call>"


def _deepseek_v32(calls: Sequence[Call]) -> str:
    mark, written = "｜DSML｜", []  # noqa: RUF001
    for name, arguments in calls:
        values = [
            f'<{mark}parameter name="{key}" string="{str(isinstance(value, str)).lower()}">{_xml_value(value)}'
            f"</{mark}parameter>\n"
            for key, value in arguments.items()
        ]
        written.append(f'<{mark}invoke name="{name}">\n{"".join(values)}</{mark}invoke>')
    return f"<{mark}function_calls>\n" + "\n".join(written) + f"\n</{mark}function_calls>"


def _seed_oss(calls: Sequence[Call]) -> str:
    return _qwen3_coder(calls, "seed:tool_call")


def _qwen3_coder(calls: Sequence[Call], tag: str = "tool_call") -> str:
    written = []
    for name, arguments in calls:
        values = [f"<parameter={key}>\n{_xml_value(value)}\n</parameter>\n" for key, value in arguments.items()]
        written.append(f"<{tag}>\n<function={name}>\n{''.join(values)}</function>\n</{tag}>")
    return "\n".join(written)


def _glm45(calls: Sequence[Call]) -> str:
    written = []
    for name, arguments in calls:
        pairs = [f"<arg_key>{k}</arg_key>\n<arg_value>{_xml_value(v)}</arg_value>\n" for k, v in arguments.items()]
        written.append(f"<tool_call>{name}\n{''.join(pairs)}</tool_call>")
    return "\n".join(written)


def _mistral(calls: Sequence[Call]) -> str:
    return "".join([f"[TOOL_CALLS]{name}[ARGS]{_json(arguments)}" for name, arguments in calls])


def _mistral_bare(calls: Sequence[Call]) -> str:
    return "".join([f"[TOOL_CALLS]{name}{_json(arguments)}" for name, arguments in calls])


def _mistral_json(calls: Sequence[Call]) -> str:
    return "[TOOL_CALLS] " + _json([{"name": name, "arguments": arguments} for name, arguments in calls])


def _deepseek_v3(calls: Sequence[Call]) -> str:
    written = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{_json(arguments)}\n```<｜tool▁call▁end｜>"  # noqa: RUF001
        for name, arguments in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "\n".join(written) + "<｜tool▁calls▁end｜>"  # noqa: RUF001


def _deepseek_v31(calls: Sequence[Call]) -> str:
    written = [f"<｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{_json(a)}<｜tool▁call▁end｜>" for n, a in calls]  # noqa: RUF001
    return "<｜tool▁calls▁begin｜>" + "".join(written) + "<｜tool▁calls▁end｜>"  # noqa: RUF001


def _kimi_k2(calls: Sequence[Call]) -> str:
    written = [
        f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{_json(arguments)}<|tool_call_end|>"
        for number, (name, arguments) in enumerate(calls)
    ]
    return "<|tool_calls_section_begin|>" + "".join(written) + "<|tool_calls_section_end|>"


def _pythonic(calls: Sequence[Call]) -> str:
    written = [f"{n}({', '.join(f'{key}={value!r}' for key, value in a.items())})" for n, a in calls]
    return f"[{', '.join(written)}]"


def _llama4(calls: Sequence[Call]) -> str:
    return f"<|python_start|>{_pythonic(calls)}<|python_end|>"


def _harmony(calls: Sequence[Call]) -> str:
    messages = [f"<|channel|>commentary to=functions.{n} <|constrain|>json<|message|>{_json(a)}" for n, a in calls]
    return "<|call|><|start|>assistant".join(messages)


_PARAMETERS = ("<parameter=", "<parameter=city>", "</parameter>", ">")
SYNTAX = ('"', "'", "{", "}", "[", "]", "(", ")", ":", ",", "=", "\\", "\n", " ", "\\u00e9", "1", "None", "é🦦", "x")
_XML = ("<tool_call>", "</tool_call>", "weather", "\n")
_DEEPSEEK: tuple[str, ...] = ("```json\n", "```", "function", "now\n", '{"city": "é')
_DEEPSEEK += ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>")  # noqa: RUF001
_DEEPSEEK += ("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")  # noqa: RUF001
_KIMI: tuple[str, ...] = (
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "functions.now:0",
    "<|tool_call_argument_begin|>",
    "{}",
)
_KIMI += ("<|tool_call_end|>", "<|tool_calls_section_end|>")
_MISTRAL = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "now", '{"name": "now", "arguments": ', "abc")
_HARMONY: tuple[str, ...] = (
    "<|start|>assistant",
    "<|channel|>",
    "<|message|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
    "analysis",
    "final",
)
_HARMONY += ("commentary to=functions.now ", "<|constrain|>json", "<|chan")

FAMILIES = {
    "hermes": Family("hermes", _hermes, (*_XML, '{"name": "now", "arguments": ')),
    "llama3_json": Family("llama3_json", _llama, ("<|python_tag|>", '{"name": "now", "parameters": ', ";")),
    "qwen3_coder": Family(
        "qwen3_coder",
        _qwen3_coder,
        (*_XML, "<function=", "<function=now>", "</function>", "<parameter=", "<parameter=city>", "</parameter>", ">"),
    ),
    "seed_oss": Family(
        "seed_oss",
        _seed_oss,
        ("<seed:tool_call>", "</seed:tool_call>", "weather", "\n", "<function=now>", "</function>", *_PARAMETERS),
    ),
    "minimax_m2": Family(
        "minimax_m2",
        _minimax_m2,
        (
            *("<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="', '<invoke name="now">', "</invoke>"),
            *('<parameter name="', '<parameter name="city">', "</parameter>", '">', "weather", "\n"),
        ),
    ),
    "deepseek_v32": Family(
        "deepseek_v32",
        _deepseek_v32,
        tuple(
            piece.replace("|", "｜DSML｜")  # noqa: RUF001
            for piece in (
                *("<|function_calls>", "</|function_calls>", '<|invoke name="', '<|invoke name="now">', "</|invoke>"),
                *('<|parameter name="city" string="true">', "</|parameter>", '">', '" string="false">', "now", "\n"),
            )
        ),
    ),
    "granite": Family("granite", _granite, ("<tool_call>", '{"name": "now", "arguments": ', "now", "[", "]")),
    "glm45": Family(
        "glm45", _glm45, (*_XML, "<arg_key>", "city", "days", "</arg_key>", "<arg_value>", "</arg_value>", "now\n")
    ),
    "mistral": Family("mistral", _mistral, _MISTRAL),
    "mistral_bare": Family("mistral", _mistral_bare, _MISTRAL),
    "mistral_json": Family("mistral_json", _mistral_json, _MISTRAL),
    "deepseek_v3": Family("deepseek_v3", _deepseek_v3, _DEEPSEEK),
    "deepseek_v31": Family("deepseek_v31", _deepseek_v31, _DEEPSEEK),
    "kimi_k2": Family("kimi_k2", _kimi_k2, _KIMI),
    "pythonic": Family("pythonic", _pythonic, ("now(", "weather(", "city=", "days=", "<|python_start|>", "'''", "\\x")),
    "llama4": Family("pythonic", _llama4, ("now()", "<|python_end|>", "<|python_start|>[", "tags=[", '"""', "True")),
    "harmony": Family("harmony", _harmony, _HARMONY),
}

UNWRITTEN = ("mistral_bare", "llama4", "deepseek_v32")
"""The parsers read these, but grammars write another form, or none."""
