"""The formats in which models write calls and reasoning."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from kvrelay.text.output_parsing import pythonic
from kvrelay.text.output_parsing.call_grammar import (
    ANY_TEXT,
    NOTHING,
    CallSyntax,
    Format,
    MarkerOf,
    bare_value,
    either,
    json_arguments,
    json_value,
    marked,
    optional,
    parameters_of,
    sequence,
    tag,
    text,
)
from kvrelay.text.output_parsing.events import ContentText, OutputParser, Tool
from kvrelay.text.output_parsing.json_calls import (
    DeepSeekParser,
    GraniteParser,
    HermesParser,
    JsonArgumentsParser,
    JsonListParser,
    KimiK2Parser,
    Llama3JsonParser,
    MistralParser,
)
from kvrelay.text.output_parsing.parameter_calls import (
    DeepSeekV32Parser,
    Glm45Parser,
    MinimaxM2Parser,
    Qwen3CoderParser,
    SeedOssParser,
)

SUFFIX = ".py"
"""The suffix of the name of a file with an operator's own tool format."""
VARIABLE = "FORMAT"
_PROBE = "An otter is a mammal."


class BadFormatFile(ValueError):
    """The file cannot be used. The message has the reason."""


class ToolFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How calls are written. `signs`: texts in the chat templates of these models; all of one row must be there,
    and no `foreign_signs`. `syntax`: how a grammar makes a model write calls; None if no grammar can."""

    name: str
    new_parser: Callable[[Sequence[Tool]], OutputParser]
    markers: tuple[str, ...]  # control tokens that the parser reads, special in some tokenizers
    signs: tuple[tuple[str, ...], ...] = ()
    foreign_signs: tuple[str, ...] = ()
    syntax: CallSyntax | None = None


def _json_call(key: str, opening: str = "{", closing: str = "}") -> Callable[[Tool, bool, MarkerOf], Format]:
    """A call as a JSON object with the arguments at this key."""

    def content(tool: Tool, is_strict: bool, marker_of: MarkerOf) -> Format:
        begin = f'{opening}"name": {json.dumps(tool.name)}, "{key}": '
        return tag(begin, json_arguments(tool, is_strict=is_strict), closing)

    return content


def _arguments_alone(tool: Tool, is_strict: bool, marker_of: MarkerOf) -> Format:
    return json_arguments(tool, is_strict=is_strict)


def _named_call(separator: str) -> Callable[[Tool, bool, MarkerOf], Format]:
    def content(tool: Tool, is_strict: bool, marker_of: MarkerOf) -> Format:
        return sequence(text(tool.name), marked(marker_of(separator)), json_arguments(tool, is_strict=is_strict))

    return content


def _deepseek_block(tool: Tool, is_strict: bool, marker_of: MarkerOf) -> Format:
    block, block_end = DeepSeekParser.block, DeepSeekParser.block_end
    arguments = tag(f"{tool.name}\n{block}\n", json_arguments(tool, is_strict=is_strict), f"\n{block_end}")
    return sequence(text("function"), marked(marker_of(DeepSeekParser.separator)), arguments)


def _kimi_call(tool: Tool, is_strict: bool, marker_of: MarkerOf) -> Format:
    number: Format = {"type": "regex", "pattern": "[0-9]{1,4}"}
    arguments = json_arguments(tool, is_strict=is_strict)
    head = text(f"{KimiK2Parser.functions}{tool.name}:"), number, marked(marker_of(KimiK2Parser.separator))
    return sequence(*head, arguments)


_NAME: Format = {"type": "regex", "pattern": "[^<>\\n]{1,128}"}
"""Of an argument of a tool whose schema is not followed."""


def _any_number(argument: Format) -> Format:
    return {"type": "tags_with_separator", "tags": [argument], "separator": ""}


def _qwen3_coder_call(tool: Tool, is_strict: bool, marker_of: MarkerOf) -> Format:
    begin, end = f"\n{Qwen3CoderParser.function}{tool.name}>\n", Qwen3CoderParser.parameter_end
    arguments: list[Format] = []
    if not is_strict:
        value = tag(">\n", ANY_TEXT, end)
        arguments.append(_any_number(tag(Qwen3CoderParser.parameter, sequence(_NAME, value), "\n")))
    for parameter in parameters_of(tool) if is_strict else ():
        value = bare_value(tool, parameter, end, "<\n") or json_value(parameter.schema)
        closing = end if value == ANY_TEXT else f"\n{end}"  # free text writes its line break itself
        written = tag(f"{Qwen3CoderParser.parameter}{parameter.name}>\n", value, closing)
        arguments.append(optional(parameter, sequence(written, text("\n"))))
    return sequence(text(begin), *arguments, text(f"{Qwen3CoderParser.function_end}\n"))


def _glm45_call(tool: Tool, is_strict: bool, marker_of: MarkerOf) -> Format:
    key, key_end, begin, end = map(marker_of, _GLM45_MARKERS[2:])
    arguments: list[Format] = []
    if not is_strict:
        line = either([text("\n"), NOTHING])
        value = sequence(marked(key_end), line, tag(begin, ANY_TEXT, end), line)
        arguments.append(_any_number(tag(key, sequence(_NAME, value), "")))
    for parameter in parameters_of(tool) if is_strict else ():
        value = bare_value(tool, parameter, Glm45Parser.value_end, "<") or json_value(parameter.schema)
        name = marked(key), text(parameter.name), marked(key_end), text("\n")
        arguments.append(optional(parameter, sequence(*name, tag(begin, value, end), text("\n"))))
    return sequence(text(f"{tool.name}\n"), *arguments)


def _minimax_m2_call(tool: Tool, is_strict: bool, marker_of: MarkerOf) -> Format:
    begin, end = MinimaxM2Parser.parameter, MinimaxM2Parser.parameter_end
    arguments: list[Format] = []
    if not is_strict:
        arguments.append(_any_number(tag(begin, sequence(_NAME, tag(MinimaxM2Parser.name_end, ANY_TEXT, end)), "\n")))
    for parameter in parameters_of(tool) if is_strict else ():
        value = bare_value(tool, parameter, end, "<") or json_value(parameter.schema)
        written = tag(f"{begin}{parameter.name}{MinimaxM2Parser.name_end}", value, end)
        arguments.append(optional(parameter, sequence(written, text("\n"))))
    return sequence(text(f"{tool.name}{MinimaxM2Parser.name_end}\n"), *arguments)


_GLM45_MARKERS = (
    *(Glm45Parser.open, Glm45Parser.close, Glm45Parser.key, Glm45Parser.key_end),
    *(Glm45Parser.value, Glm45Parser.value_end),
)


def _sectioned(
    parser: type[DeepSeekParser | KimiK2Parser], content: Callable[[Tool, bool, MarkerOf], Format], separator: str = ""
) -> CallSyntax:
    begin, call_begin, call_end, end = parser.section
    return CallSyntax(begin=call_begin, content=content, end=call_end, separator=separator, around=((begin, end),))


TOOL_FORMATS = (
    ToolFormat(
        name="hermes",
        new_parser=HermesParser,
        markers=(HermesParser.open, HermesParser.close),
        signs=((HermesParser.open, '"name"'),),
        foreign_signs=(Qwen3CoderParser.function, Glm45Parser.key),  # other calls with the same tags
        syntax=CallSyntax(
            begin=HermesParser.open,
            content=_json_call("arguments", "\n{", "}\n"),
            end=HermesParser.close,
            separator="\n",
        ),
    ),
    ToolFormat(
        name="seed_oss",
        new_parser=SeedOssParser,
        markers=(SeedOssParser.open, SeedOssParser.close),
        signs=((SeedOssParser.open, SeedOssParser.function),),
        syntax=CallSyntax(begin=SeedOssParser.open, content=_qwen3_coder_call, end=SeedOssParser.close, separator="\n"),
    ),
    ToolFormat(
        name="minimax_m2",
        new_parser=MinimaxM2Parser,
        markers=(MinimaxM2Parser.open, MinimaxM2Parser.close),
        signs=((MinimaxM2Parser.open, MinimaxM2Parser.invoke),),
        syntax=CallSyntax(
            begin=MinimaxM2Parser.invoke,
            content=_minimax_m2_call,
            end=MinimaxM2Parser.invoke_end,
            separator="\n",
            around=((MinimaxM2Parser.open, MinimaxM2Parser.close), ("\n", "\n")),
        ),
    ),
    ToolFormat(name="deepseek_v32", new_parser=DeepSeekV32Parser, markers=(DeepSeekV32Parser.mark,)),
    ToolFormat(
        name="granite",
        new_parser=GraniteParser,
        markers=(GraniteParser.tag,),
        signs=((GraniteParser.tag,),),
        foreign_signs=("<|/tool_call|>",),
        syntax=CallSyntax(
            begin="{",
            content=_json_call("arguments", ""),
            end="",
            separator=", ",
            around=((GraniteParser.tag, ""), ("[", "]")),
        ),
    ),
    ToolFormat(
        name="qwen3_coder",
        new_parser=Qwen3CoderParser,
        markers=(Qwen3CoderParser.open, Qwen3CoderParser.close),
        signs=((Qwen3CoderParser.function, Qwen3CoderParser.parameter),),
        syntax=CallSyntax(
            begin=Qwen3CoderParser.open, content=_qwen3_coder_call, end=Qwen3CoderParser.close, separator="\n"
        ),
    ),
    ToolFormat(
        name="glm45",
        new_parser=Glm45Parser,
        markers=_GLM45_MARKERS,
        signs=((Glm45Parser.key, Glm45Parser.value),),
        syntax=CallSyntax(begin=Glm45Parser.open, content=_glm45_call, end=Glm45Parser.close, separator="\n"),
    ),
    ToolFormat(
        name="mistral",
        new_parser=MistralParser,
        markers=(MistralParser.tag, MistralParser.call_id, MistralParser.arguments),
        signs=((MistralParser.tag, MistralParser.arguments),),
        syntax=CallSyntax(begin=MistralParser.tag, content=_named_call(MistralParser.arguments), end="", separator=""),
    ),
    ToolFormat(
        name="mistral_json",
        new_parser=MistralParser,
        markers=(MistralParser.tag, MistralParser.call_id, MistralParser.arguments),
        signs=((MistralParser.tag,),),
        syntax=CallSyntax(
            begin="{",
            content=_json_call("arguments", ""),
            end="",
            separator=", ",
            around=((MistralParser.tag, ""), ("[", "]")),
        ),
    ),
    ToolFormat(
        name="deepseek_v3",
        new_parser=DeepSeekParser,
        markers=(*DeepSeekParser.section, DeepSeekParser.separator),
        signs=((DeepSeekParser.separator, DeepSeekParser.block),),
        syntax=_sectioned(DeepSeekParser, _deepseek_block, "\n"),
    ),
    ToolFormat(
        name="deepseek_v31",
        new_parser=DeepSeekParser,
        markers=(*DeepSeekParser.section, DeepSeekParser.separator),
        signs=((DeepSeekParser.separator,),),
        syntax=_sectioned(DeepSeekParser, _named_call(DeepSeekParser.separator)),
    ),
    ToolFormat(
        name="kimi_k2",
        new_parser=KimiK2Parser,
        markers=(*KimiK2Parser.section, KimiK2Parser.separator),
        signs=((KimiK2Parser.separator,),),
        syntax=_sectioned(KimiK2Parser, _kimi_call),
    ),
    ToolFormat(
        name="pythonic",
        new_parser=pythonic.PythonicParser,
        markers=(pythonic.START, pythonic.END),
        signs=(("[func_name1(params_name1=params_value1",),),
        syntax=pythonic.SYNTAX,
    ),
    ToolFormat(
        name="llama3_json",
        new_parser=Llama3JsonParser,
        markers=(Llama3JsonParser.tag,),
        signs=(("<|start_header_id|>", '"parameters": '), ("<|header_start|>", '"parameters": ')),
        syntax=CallSyntax(
            begin="{",
            content=_json_call("parameters", ""),
            end="",
            separator="; ",
            starts_output="{",
            bare_keys=("name", "parameters"),
        ),
    ),
)
"""If a template shows several, the first one counts."""


JSON_LIST = ToolFormat(
    name="json_list",
    new_parser=JsonListParser,
    markers=(),
    syntax=CallSyntax(
        begin="{", content=_json_call("parameters", ""), end="", separator=", ", around=(("[", "]"),), starts_output="["
    ),
)
JSON_ARGUMENTS = ToolFormat(
    name="json_arguments",
    new_parser=JsonArgumentsParser,
    markers=(),
    syntax=CallSyntax(begin="", content=_arguments_alone, end="", separator="", is_single=True),
)
"""For models whose way of calling is not known: general JSON, as vLLM has it."""


class ReasoningFormat(msgspec.Struct, frozen=True, kw_only=True):
    """Reasoning is text between two markers, before the content. `is_implied`: also without the first one, unless the
    prompt has ended the reasoning."""

    name: str
    begin: str
    end: str
    signs: tuple[tuple[str, ...], ...]
    foreign_signs: tuple[str, ...] = ()
    is_implied: bool = False


REASONING_FORMATS = (
    ReasoningFormat(name="think", begin="<think>", end="</think>", signs=(("</think>",),)),
    ReasoningFormat(name="seed_oss", begin="<seed:think>", end="</seed:think>", signs=(("</seed:think>",),)),
    ReasoningFormat(name="mistral", begin="[THINK]", end="[/THINK]", signs=(("[THINK]",),)),
    ReasoningFormat(name="deepseek_r1", begin="<think>", end="</think>", signs=(), is_implied=True),
)

OTHER_NAMES: dict[str, tuple[str | None, str | None]] = {
    "deepseek_r1": (None, "deepseek_r1"),
    "deepseek_v3": ("deepseek_v3", "think"),
    "deepseek_v31": ("deepseek_v31", None),
    "deepseek_v32": ("deepseek_v32", None),
    "deepseek_v4": ("deepseek_v32", "think"),
    "deepseekv3": ("deepseek_v3", None),
    "deepseekv31": ("deepseek_v31", None),
    "deepseekv32": ("deepseek_v32", None),
    "deepseekv4": ("deepseek_v32", None),
    "gemma4": ("template", "template"),
    "glm": ("glm45", None),
    "glm45": ("glm45", "think"),
    "glm47": ("glm45", "think"),
    "granite": ("granite", None),
    "gpt_oss": ("harmony", "harmony"),
    "holo2": (None, "deepseek_r1"),
    "interns1": (None, "think"),
    "kimi_k2": ("kimi_k2", "think"),
    "llama3": ("llama3_json", None),
    "llama4_json": ("llama3_json", None),
    "llama4_pythonic": ("pythonic", None),
    "mimo": ("qwen3_coder", "think"),
    "minimax": (None, "deepseek_r1"),
    "minimax_m2": ("minimax_m2", "deepseek_r1"),
    "nemotron_3": (None, "think"),
    "nemotron_v3": (None, "deepseek_r1"),
    "olmo3": (None, "think"),
    "openai": ("harmony", None),
    "openai_gptoss": (None, "harmony"),
    "qwen": ("hermes", None),
    "qwen25": ("hermes", None),
    "qwen3": (None, "think"),
    "qwen3_thinking": (None, "deepseek_r1"),
    "qwen3_xml": ("qwen3_coder", None),
    "seed_oss": ("seed_oss", "seed_oss"),
    "step3": (None, "deepseek_r1"),
    "step3p5": ("qwen3_coder", "deepseek_r1"),
}
"""Names of parsers in vLLM and SGLang, with `_` for `-`, and the tool and the reasoning parser here that read the same.
None: there is no such parser there, or none here that reads what it reads."""


def load_tool_format(path: str) -> ToolFormat:
    """Executes the file and returns its `FORMAT`. Raises BadFormatFile."""
    spec = importlib.util.spec_from_file_location(f"kvrelay_tool_format_{Path(path).stem}", path)
    if spec is None or spec.loader is None or not Path(path).is_file():
        raise BadFormatFile(f"tool parser {path}: there is no such Python file")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise BadFormatFile(f"tool parser {path}: {type(error).__name__}: {error}") from error
    found = getattr(module, VARIABLE, None)
    if not isinstance(found, ToolFormat):
        raise BadFormatFile(
            f"tool parser {path}: {VARIABLE} must be a kvrelay.text.output_parsing.formats.ToolFormat, "
            f"not {type(found).__name__}"
        )
    _check_parser(path, found)
    return found


def _check_parser(path: str, found: ToolFormat) -> None:
    """Text without calls must come back as content."""
    try:
        parser = found.new_parser([])
        events = [*parser.feed(_PROBE), *parser.finish()]
    except Exception as error:
        raise BadFormatFile(f"tool parser {path}: its parser raised {type(error).__name__}: {error}") from error
    content = "".join(event.text for event in events if isinstance(event, ContentText))
    if content != _PROBE:
        raise BadFormatFile(f"tool parser {path}: its parser made {content!r} of {_PROBE!r}, which has no calls")
