"""Formats of tool calls: found by the chat template, or read from a file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvrelay.text.output_parsing.dialect import (
    HarmonyDialect,
    MarkedDialect,
    UnknownParser,
    find_dialect,
    own_parser_names,
)
from kvrelay.text.output_parsing.events import ArgumentsDelta, ContentText, ReasoningText, Tool, ToolCallBegun
from kvrelay.text.output_parsing.formats import OTHER_NAMES, BadFormatFile

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
        ("<seed:tool_call>\n<function={{ name }}>\n<parameter=", "seed_oss"),
        ('<minimax:tool_call>\n<invoke name="', "minimax_m2"),
        ("write <|tool_call|> and a JSON list", "granite"),
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


# -- names of other servers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "own"),
    [
        (("hermes", "qwen3"), ("hermes", "think")),
        (("qwen25", "qwen3-thinking"), ("hermes", "deepseek_r1")),
        (("qwen3_xml", "deepseek-v3"), ("qwen3_coder", "think")),
        (("deepseek_v3", "deepseek_r1"), ("deepseek_v3", "deepseek_r1")),
        (("deepseekv31", "deepseek-r1"), ("deepseek_v31", "deepseek_r1")),
        (("glm47", "glm45"), ("glm45", "think")),
        (("kimi_k2", "kimi_k2"), ("kimi_k2", "think")),
        (("openai", "openai_gptoss"), ("harmony", "harmony")),
        (("gpt-oss", "gpt_oss"), ("harmony", "harmony")),
        (("llama4_json", "none"), ("llama3_json", "none")),
        (("llama4_pythonic", "auto"), ("pythonic", "auto")),
        (("mistral", "mistral"), ("mistral", "mistral")),
        (("step3p5", "step3"), ("qwen3_coder", "deepseek_r1")),
        (("gemma4", "gemma4"), ("template", "template")),
        (("seed_oss", "seed_oss"), ("seed_oss", "seed_oss")),
        (("deepseek_v4", "deepseek_v4"), ("deepseek_v32", "think")),
        (("minimax-m2", "minimax"), ("minimax_m2", "deepseek_r1")),
    ],
)
def test_names_of_other_servers_mean_what_they_mean_there(given: tuple[str, str], own: tuple[str, str]) -> None:
    assert own_parser_names(*given) == own


def test_every_name_in_the_table_is_of_a_parser_here() -> None:
    for tools, reasoning in OTHER_NAMES.values():
        own_parser_names(tools or "auto", reasoning or "auto")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("qwen3", "auto"), "'qwen3' is no tool parser; known are auto, none, hermes, .*, and as in .*: .*qwen25"),
        (("hunyuan_a13b", "auto"), "'hunyuan_a13b' is no tool parser"),
        (("step3", "auto"), "'step3' is no tool parser"),
        (("auto", "hermes"), "'hermes' is no reasoning parser; known are auto, none, think, .*: .*qwen3"),
        (("auto", "kimi"), "'kimi' is no reasoning parser"),
    ],
)
def test_a_name_without_a_parser_here_is_refused_with_the_list(names: tuple[str, str], message: str) -> None:
    with pytest.raises(UnknownParser, match=message):
        find_dialect(*names, None)


def test_reasoning_of_deepseek_r1_needs_no_tag_that_opens_it() -> None:
    implied, marked = (find_dialect("none", name, None) for name in ("deepseek-r1", "qwen3"))
    for prompt, is_inside in (("<|assistant|>", True), ("<think>\n", True), ("<think></think>\n", False)):
        assert implied.is_opened_by(prompt) == is_inside
    assert not marked.is_opened_by("<|assistant|>") and marked.is_opened_by("<think>\n")
    for text in ("I think.</think>So.", "<think>I think.</think>So."):
        parser = implied.new_parser([], begins_inside=True)
        events = [*parser.feed(text), *parser.finish()]
        assert "".join(event.text for event in events if isinstance(event, ReasoningText)) == "I think."
        assert "".join(event.text for event in events if isinstance(event, ContentText)) == "So."


# -- a format of tool calls from a file, as the guide shows it -------------------------------------------------------


GUIDE = Path(__file__).parents[4] / "docs" / "guide.md"
SHOWN = re.findall(r"### A format of your own.*?```python run\n(.*?)```", GUIDE.read_text("utf-8"), re.DOTALL)[0]
TEXT = 'I look. [CALL] {"name": "define", "arguments": {"word": "ot\\"ter"}} [/CALL] and [CALL] no call'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "my_calls.py"


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_the_format_of_the_guide_reads_calls(file: Path, size: int) -> None:
    file.write_text(SHOWN, encoding="utf-8")
    dialect = find_dialect(str(file), "none", "a template that shows nothing")
    assert dialect.calls_tools and dialect.markers == ("[CALL]", "[/CALL]")
    parser = dialect.new_parser([Tool(name="define")], begins_inside=False)
    events = [event for at in range(0, len(TEXT), size) for event in parser.feed(TEXT[at : at + size])]
    events += parser.finish()
    assert [event.name for event in events if isinstance(event, ToolCallBegun)] == ["define"]
    arguments = "".join(event.text for event in events if isinstance(event, ArgumentsDelta))
    assert arguments == '{"word": "ot\\"ter"}'
    content = "".join(event.text for event in events if isinstance(event, ContentText))
    assert content.startswith("I look.") and content.endswith("and [CALL] no call")


def test_it_works_beside_a_reasoning_parser(file: Path) -> None:
    file.write_text(SHOWN, encoding="utf-8")
    assert "<think>" in find_dialect(str(file), "think", None).markers


def test_it_may_have_dataclasses(file: Path) -> None:
    kept = "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass X:\n    x: int\n"
    file.write_text(kept + SHOWN.replace("from __future__ import annotations", ""), encoding="utf-8")
    assert "<think>" in find_dialect(str(file), "think", None).markers


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "there is no such Python file"),
        ("import nothing_of_this_name", "ModuleNotFoundError: No module named 'nothing_of_this_name'"),
        ("def", "SyntaxError"),
        ("x = 1", "FORMAT must be a .*ToolFormat, not NoneType"),
        (SHOWN.replace("new_parser=MyParser", "new_parser=lambda tools: 7"), "AttributeError"),
        (SHOWN.replace("Markers(BEGIN)", "7"), "AttributeError"),
        (
            SHOWN.replace("def _call", "def _parse(self): yield from self._until(self._opens, len)\n\n    def _call"),
            "made '' of",
        ),
    ],
)
def test_a_file_that_is_wrong_is_refused(file: Path, content: str | None, reason: str) -> None:
    if content is not None:
        file.write_text(content, encoding="utf-8")
    with pytest.raises(BadFormatFile, match=reason) as refused:
        find_dialect(str(file), "auto", None)
    assert str(file) in str(refused.value)
