"""Reasoning in front of the content."""

from __future__ import annotations

import pytest

from kvrelay.text.output_parsing.dialect import ReasoningCounter
from kvrelay.text.output_parsing.events import OutputParser, PlainParser
from kvrelay.text.output_parsing.json_calls import HermesParser
from kvrelay.text.output_parsing.text_parser import ThinkingParser
from tests.fakes.parsed_output import calls_of, check_splits, content_of, reasoning_of

pytestmark = pytest.mark.unit


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
