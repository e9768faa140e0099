"""Runs output parsers over texts that come in pieces."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec

from kvrelay.text.output_parsing.events import (
    ArgumentsDelta,
    ContentText,
    Event,
    OutputParser,
    ReasoningText,
    ToolCallBegun,
    ToolCallEnded,
)

NewParser = Callable[[], OutputParser]


def parsed(new_parser: NewParser, pieces: Iterable[str]) -> list[Event]:
    """The events with adjacent texts joined, and with numbers for random ids."""
    parser = new_parser()
    events: list[Event] = []
    for event in [*itertools.chain.from_iterable(map(parser.feed, pieces)), *parser.finish()]:
        if events and (joined := _joined(events[-1], event)) is not None:
            events[-1] = joined
        elif isinstance(event, ToolCallBegun) and not event.call_id.startswith("functions."):
            assert event.call_id
            events.append(msgspec.structs.replace(event, call_id=f"id{event.index}"))
        else:
            events.append(event)
    check_order(events)
    return events


def _joined(first: Event, second: Event) -> Event | None:
    match first, second:
        case ContentText(a), ContentText(b):
            return ContentText(a + b)
        case ReasoningText(a), ReasoningText(b):
            return ReasoningText(a + b)
        case ArgumentsDelta(index, a), ArgumentsDelta(other, b) if index == other:
            return ArgumentsDelta(index, a + b)
    return None


def check_order(events: Sequence[Event]) -> None:
    """Calls are numbered from 0, and each begins before its arguments and ends before the next event."""
    num_begun, is_open = 0, False
    for event in events:
        match event:
            case ToolCallBegun(index, _, name):
                assert name and index == num_begun and not is_open
                num_begun, is_open = num_begun + 1, True
            case ArgumentsDelta(index, text):
                assert text and is_open and index == num_begun - 1
            case ToolCallEnded(index):
                assert is_open and index == num_begun - 1
                is_open = False
            case ContentText(text) | ReasoningText(text):
                assert text and not is_open
    assert not is_open


def splits_of(text: str) -> Iterator[list[str]]:
    """Every way to cut a text in two, and the text in single characters."""
    yield list(text)
    for cut in range(len(text) + 1):
        yield [text[:cut], text[cut:]]


def check_splits(new_parser: NewParser, text: str) -> list[Event]:
    """Parses a text in one piece, and asserts that the pieces do not matter."""
    whole = parsed(new_parser, [text])
    for pieces in splits_of(text):
        assert parsed(new_parser, pieces) == whole, pieces
    return whole


def content_of(events: Sequence[Event]) -> str:
    return "".join([each.text for each in events if isinstance(each, ContentText)])


def reasoning_of(events: Sequence[Event]) -> str:
    return "".join([each.text for each in events if isinstance(each, ReasoningText)])


def calls_of(events: Sequence[Event]) -> list[tuple[str, str]]:
    """Names and arguments."""
    calls: list[Any] = []
    for event in events:
        if isinstance(event, ToolCallBegun):
            calls.append([event.name, ""])
        elif isinstance(event, ArgumentsDelta):
            calls[event.index][1] += event.text
    return [(name, arguments) for name, arguments in calls]


def all_text_of(events: Sequence[Event]) -> str:
    """Every text of the events, in order."""
    return "".join([each.name if isinstance(each, ToolCallBegun) else getattr(each, "text", "") for each in events])
