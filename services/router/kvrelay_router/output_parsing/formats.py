"""The formats in which models write calls and reasoning."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from kvrelay_router.output_parsing import deepseek, glm45, hermes, kimi_k2, llama3_json, mistral, pythonic, qwen3_coder
from kvrelay_router.output_parsing.call_grammar import CallSyntax
from kvrelay_router.output_parsing.events import OutputParser
from kvrelay_router.output_parsing.tool import Tool


class ToolFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How calls are written. `signs`: texts in the chat templates of these models; all of one row must be there,
    and no `foreign_signs`. `syntax`: how a grammar makes a model write calls; None if no grammar can."""

    name: str
    new_parser: Callable[[Sequence[Tool]], OutputParser]
    markers: tuple[str, ...]  # control tokens that the parser reads, special in some tokenizers
    signs: tuple[tuple[str, ...], ...] = ()
    foreign_signs: tuple[str, ...] = ()
    syntax: CallSyntax | None = None


class ReasoningFormat(msgspec.Struct, frozen=True, kw_only=True):
    """Reasoning is text between two markers, before the content."""

    name: str
    begin: str
    end: str
    signs: tuple[tuple[str, ...], ...]
    foreign_signs: tuple[str, ...] = ()


TOOL_FORMATS = (
    ToolFormat(
        name="hermes",
        new_parser=lambda tools: hermes.HermesParser(),
        markers=(hermes.OPEN, hermes.CLOSE),
        signs=(("<tool_call>", '"name"'),),
        foreign_signs=("<function=", "<arg_key>"),  # other calls with the same tags
        syntax=hermes.SYNTAX,
    ),
    ToolFormat(
        name="qwen3_coder",
        new_parser=qwen3_coder.Qwen3CoderParser,
        markers=(qwen3_coder.OPEN, qwen3_coder.CLOSE),
        signs=((qwen3_coder.FUNCTION, qwen3_coder.PARAMETER),),
        syntax=qwen3_coder.SYNTAX,
    ),
    ToolFormat(
        name="glm45",
        new_parser=glm45.Glm45Parser,
        markers=(glm45.OPEN, glm45.CLOSE, glm45.KEY, glm45.KEY_END, glm45.VALUE, glm45.VALUE_END),
        signs=((glm45.KEY, glm45.VALUE),),
        syntax=glm45.SYNTAX,
    ),
    ToolFormat(
        name="mistral",
        new_parser=lambda tools: mistral.MistralParser(),
        markers=(mistral.TAG, mistral.CALL_ID, mistral.ARGUMENTS),
        signs=((mistral.TAG, mistral.ARGUMENTS),),
        syntax=mistral.NAME_SYNTAX,
    ),
    ToolFormat(
        name="mistral_json",
        new_parser=lambda tools: mistral.MistralParser(),
        markers=(mistral.TAG, mistral.CALL_ID, mistral.ARGUMENTS),
        signs=((mistral.TAG,),),
        syntax=mistral.LIST_SYNTAX,
    ),
    ToolFormat(
        name="deepseek_v3",
        new_parser=lambda tools: deepseek.DeepSeekParser(),
        markers=(*deepseek.MARKERS.all, deepseek.SEPARATOR),
        signs=((deepseek.SEPARATOR, deepseek.BLOCK),),
        syntax=deepseek.BLOCK_SYNTAX,
    ),
    ToolFormat(
        name="deepseek_v31",
        new_parser=lambda tools: deepseek.DeepSeekParser(),
        markers=(*deepseek.MARKERS.all, deepseek.SEPARATOR),
        signs=((deepseek.SEPARATOR,),),
        syntax=deepseek.BARE_SYNTAX,
    ),
    ToolFormat(
        name="kimi_k2",
        new_parser=lambda tools: kimi_k2.KimiK2Parser(),
        markers=(*kimi_k2.MARKERS.all, kimi_k2.ARGUMENTS),
        signs=((kimi_k2.ARGUMENTS,),),
        syntax=kimi_k2.SYNTAX,
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
        new_parser=llama3_json.Llama3JsonParser,
        markers=(llama3_json.TAG,),
        signs=(("<|start_header_id|>", '"parameters": '), ("<|header_start|>", '"parameters": ')),
        syntax=llama3_json.SYNTAX,
    ),
)
"""If a template shows several, the first one counts."""

REASONING_FORMATS = (
    ReasoningFormat(name="think", begin="<think>", end="</think>", signs=(("</think>",),)),
    ReasoningFormat(name="mistral", begin="[THINK]", end="[/THINK]", signs=(("[THINK]",),)),
)
