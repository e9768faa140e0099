"""Formats are found by the chat template."""

from __future__ import annotations

import pytest

from kvrelay.text.output_parsing.dialect import HarmonyDialect, MarkedDialect, UnknownParser, find_dialect

pytestmark = pytest.mark.unit


HERMES = '<tool_call>\n{"name": "'
LLAMA = '<|start_header_id|>assistant{"name": "\' + name + \'", "parameters": '
KIMI = "<|tool_calls_section_begin|><|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>"
DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ name }}<｜tool▁sep｜>"  # noqa: RUF001


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (HERMES, "hermes"),
        ('<tool_call>\n<function={{ tool_call["name"] }}>\n<parameter=', "qwen3_coder"),
        ('<tool_call>{{ tc["name"] }}\n<arg_key>{{ k }}</arg_key>\n<arg_value>', "glm45"),
        (LLAMA, "llama3_json"),
        (LLAMA + "use [func_name1(params_name1=params_value1, params_name2=params_value2...)", "pythonic"),
        ("[TOOL_CALLS]{{ name }}[ARGS]", "mistral"),
        ("[TOOL_CALLS] [{{ calls }}]", "mistral_json"),
        (DEEPSEEK + "\\n```json", "deepseek_v3"),
        (DEEPSEEK, "deepseek_v31"),
        (KIMI, "kimi_k2"),
        ("{{ messages }}", None),
    ],
)
def test_the_template_shows_the_tool_format(template: str, name: str | None) -> None:
    dialect = find_dialect("auto", "none", template)
    assert isinstance(dialect, MarkedDialect)
    assert (None if dialect.tools is None else dialect.tools.name) == name


def test_harmony_is_one_format_for_calls_and_reasoning() -> None:
    template = "<|start|>assistant<|channel|>analysis<|message|>"
    for names in (("auto", "auto"), ("harmony", "auto"), ("auto", "harmony"), ("harmony", "harmony")):
        assert isinstance(find_dialect(*names, template), HarmonyDialect)
    unparsed = find_dialect("none", "none", template)
    assert unparsed.is_plain and not unparsed.calls_tools
    with pytest.raises(UnknownParser, match="both"):
        find_dialect("harmony", "none", template)
    with pytest.raises(UnknownParser, match="hermes"):
        find_dialect("nonsense", "auto", template)
