"""Reasoning in front of the content: in tags, and in channels as gpt-oss writes it."""

from __future__ import annotations

import pytest

from kvrelay.text.output_parsing.events import OutputParser, PlainParser
from kvrelay.text.output_parsing.harmony import HarmonyParser
from kvrelay.text.output_parsing.json_calls import HermesParser
from kvrelay.text.output_parsing.reasoning import HarmonyCounter, ReasoningCounter, ThinkingParser
from tests.fakes.call_families import TOOLS
from tests.fakes.parsed_output import calls_of, check_splits, content_of, reasoning_of


def thinking(inner: OutputParser, *, begins_inside: bool = False) -> ThinkingParser:
    return ThinkingParser(inner, begin="<think>", end="</think>", begins_inside=begins_inside)


@pytest.mark.parametrize(
    ("text", "begins_inside", "reasoning", "content"),
    [
        ("<think>\nHm.\n\nSo 🦦.\n</think>\n\nAn otter.", False, "Hm.\n\nSo 🦦.", "An otter."),
        ("Hm.\n</think>\n\nAn otter. ", True, "Hm.", "An otter. "),
        ("<think>Hm.</think>An otter.", True, "Hm.", "An otter."),
        ("\n<think></think>An otter.", False, "", "An otter."),
        ("An <think>otter</think>", False, "", "An <think>otter</think>"),
        (" An otter", False, "", " An otter"),
        ("Hm. </thin", True, "Hm. </thin", ""),
        ("<think>Hm.\n", False, "Hm.\n", ""),
        ("<thi", False, "", "<thi"),
        ("", True, "", ""),
        ("a</think>b</think>c", True, "a", "b</think>c"),
    ],
)
def test_reasoning_is_apart(text: str, begins_inside: bool, reasoning: str, content: str) -> None:
    events = check_splits(lambda: thinking(PlainParser(), begins_inside=begins_inside), text)
    assert reasoning_of(events) == reasoning and content_of(events) == content


def test_calls_are_looked_for_behind_the_reasoning() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    events = check_splits(lambda: thinking(HermesParser()), f"<think>{call}</think>\n{call}")
    assert reasoning_of(events) == call and calls_of(events) == [("f", "{}")] and content_of(events) == ""


@pytest.mark.parametrize(
    ("ids", "begins_inside", "num_tokens"),
    [([1, 7, 7, 2, 8], False, 4), ([7, 2, 8, 1, 7, 2], True, 2), ([5, 1, 7], False, 3), ([7, 8], False, 0)],
)
def test_the_tokens_of_the_reasoning_are_counted(ids: list[int], begins_inside: bool, num_tokens: int) -> None:
    for cut in range(len(ids) + 1):
        counter = ReasoningCounter(1, 2, begins_inside=begins_inside)
        counter.count(ids[:cut])
        counter.count(ids[cut:])
        assert counter.num_tokens == num_tokens


# -- messages in channels --------------------------------------------------------------------------------------------


NEXT = "<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("text", "begins_inside", "reasoning", "content"),
    [
        (
            "<|channel|>analysis<|message|>Hm 🦦." + NEXT + "<|channel|>final<|message|>An otter. ",
            False,
            "Hm 🦦.",
            "An otter. ",
        ),
        ("Hm." + NEXT + "<|channel|>final<|message|>An otter.<|return|>", True, "Hm.", "An otter."),
        ("<|channel|>commentary<|message|>I look." + NEXT + "<|channel|>final<|message|>So", False, "", "I look.\nSo"),
        ("<|channel|>analysis<|message|>a" + NEXT + "<|channel|>analysis<|message|>b", False, "a\nb", ""),
        ("<|channel|>analysis<|message|>cut \n", False, "cut \n", ""),
        ("<|channel|>analy", False, "", ""),
        ("<|channel|>final<|message|>An otter." + NEXT + "<|chan", False, "", "An otter."),
        ("An otter <b> without channels", False, "", "An otter <b> without channels"),
        ("<|channel|>final<|end|>otter", False, "", "<|channel|>final<|end|>otter"),
        ("<|channel|>analysis to=python<|message|>1 + 1<|call|>", False, "1 + 1", ""),
        ("", False, "", ""),
    ],
)
def test_channels(text: str, begins_inside: bool, reasoning: str, content: str) -> None:
    events = check_splits(lambda: HarmonyParser(TOOLS, begins_inside=begins_inside), text)
    assert reasoning_of(events) == reasoning and content_of(events) == content and calls_of(events) == []


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.weather <|constrain|>json",
        " to=functions.weather<|channel|>commentary json",
        "<|start|>assistant to=functions.weather<|channel|>commentary <|constrain|>json",
        "<|channel|>commentary to=functions.weather",
    ],
)
@pytest.mark.parametrize("end", ["", "<|call|>", "<|end|>"])
def test_headers_of_calls(header: str, end: str) -> None:
    thought = "" if header[0] == " " else "<|channel|>analysis<|message|>Hm" + NEXT.removesuffix("<|start|>assistant")
    text = thought + header + '<|message|>{"city": "<|x|>"}' + end
    events = check_splits(lambda: HarmonyParser(TOOLS), text)
    assert calls_of(events) == [("weather", '{"city": "<|x|>"}')] and content_of(events) == ""


def test_without_tools_no_message_is_a_call() -> None:
    text = "<|channel|>commentary to=functions.weather<|message|>{}"
    events = check_splits(lambda: HarmonyParser([]), text)
    assert calls_of(events) == [] and content_of(events) == "{}"


CHANNEL, ANALYSIS, START, FINAL, MESSAGE, END = range(6)


@pytest.mark.parametrize(
    ("ids", "begins_inside", "num_tokens"),
    [
        ([CHANNEL, ANALYSIS, MESSAGE, 9, 9, END, START, 8, CHANNEL, FINAL, MESSAGE, 9], False, 6),
        ([9, END, START, 8, CHANNEL, ANALYSIS, MESSAGE, 9], True, 8),
        ([CHANNEL, FINAL, MESSAGE, 9, ANALYSIS, 9], False, 0),
        ([9, 9, ANALYSIS], False, 0),
    ],
)
def test_the_tokens_of_the_analysis_are_counted(ids: list[int], begins_inside: bool, num_tokens: int) -> None:
    for cut in range(len(ids) + 1):
        counter = HarmonyCounter(CHANNEL, ANALYSIS, START, begins_inside=begins_inside)
        counter.count(ids[:cut])
        counter.count(ids[cut:])
        assert counter.num_tokens == num_tokens
