"""Outputs that are parsed: stop strings count in their content alone, and each token's score belongs to one text."""

from __future__ import annotations

import asyncio
import codecs
import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.protocol.sampling import FinishReason, Sampling, TokenLogprobs
from kvrelay.text.choice import Choice, SequenceDelta, StopRules
from kvrelay.text.output_parsing.dialect import find_dialect
from kvrelay.text.output_parsing.events import ContentText, Event
from kvrelay.text.parsed_text import ParsedText, StopMatcher, TokenKind
from kvrelay.text.tokenizer import Detokenizer, Tokenizer
from kvrelay_router.dispatch.interface import GenerateRequest
from kvrelay_router.openai.generation import PromptRun
from kvrelay_router.responses.responses_format import ResponseFormat
from kvrelay_router.responses.responses_request import LOGPROBS, parse_response
from tests.fakes.call_families import FAMILIES, TOOLS, Call
from tests.fakes.parsed_output import calls_of, content_of, reasoning_of
from tests.thoroughness import examples

CALLS: Sequence[Call] = [("weather", {"city": "a STOP é🦦 b", "tags": ["STOP"]})]
THOUGHT = "<think>\nHm STOP 🦦\n</think>\n\n"
TOKENIZER = cast(Tokenizer, SimpleNamespace(token_bytes=lambda token_id: bytes([token_id])))


class ByteDetokenizer:
    """Each token is one byte of UTF-8."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_ids: Sequence[int]) -> str:
        return self._decoder.decode(bytes(token_ids))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


def new_choice(
    parser: str, stop: Sequence[str] = (), *, hides_reasoning: bool = False, include: bool = False
) -> Choice:
    rules = StopRules(list(stop), frozenset(), 0, include)
    choice = Choice(0, cast(Detokenizer, ByteDetokenizer()), rules)
    reasoning = "harmony" if parser == "harmony" else "think"
    output_parser = find_dialect(parser, reasoning, None).new_parser(TOOLS, begins_inside=False)
    choice.parse_with(ParsedText(output_parser, hides_reasoning=hides_reasoning))
    return choice


def groups_of(text: str, cuts: Sequence[int]) -> list[list[int]]:
    token_ids = list(text.encode())
    edges = sorted({0, len(token_ids), *(cut % (len(token_ids) + 1) for cut in cuts)})
    return [token_ids[start:end] for start, end in itertools.pairwise(edges)]


def deltas_of(text: str, cuts: Sequence[int], *, scored: bool = False) -> list[SequenceDelta]:
    groups = groups_of(text, cuts)
    return [
        SequenceDelta(
            0,
            group,
            [TokenLogprobs(token, -1.0, [token], [-1.0]) for token in group] if scored else [],
            finish=FinishReason.STOP_TOKEN if number == len(groups) else None,
        )
        for number, group in enumerate([*groups, [0]] if scored else [*groups, []])
    ]


def fed(choice: Choice, deltas: Sequence[SequenceDelta]) -> list[Event]:
    events: list[Event] = []
    for delta in deltas:
        if choice.finish_reason is None:
            choice.feed(delta)
            events += choice.take_events()
    return events


CUTS = st.lists(st.integers(0, 2000), max_size=12)


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=examples(20), deadline=None)
@given(CUTS)
def test_a_stop_string_in_arguments_or_reasoning_is_no_stop(name: str, cuts: list[int]) -> None:
    family = FAMILIES[name]
    text = family.calls(CALLS) if family.parser == "harmony" else THOUGHT + family.calls(CALLS)
    choice = new_choice(family.parser, ["STOP"])
    events = fed(choice, deltas_of(text, cuts))
    assert choice.finish_reason == "tool_calls" and choice.stop_reason is None
    ((called, arguments),) = calls_of(events)
    assert called == "weather" and arguments.count("STOP") == 2
    if family.parser != "harmony":
        assert reasoning_of(events) == "Hm STOP 🦦"


@settings(max_examples=examples(200), deadline=None)
@given(
    st.lists(
        st.sampled_from(["ab", "c ", "🦦", THOUGHT, "\n\n", "S", "STOP", FAMILIES["hermes"].calls(CALLS)]), max_size=8
    ),
    st.lists(st.sampled_from(["STOP", "ST", "bc", "🦦S", "\n\na"]), min_size=1, max_size=3),
    CUTS,
    st.booleans(),
)
def test_the_content_ends_at_the_first_stop_string(
    parts: list[str], stop: list[str], cuts: list[int], include: bool
) -> None:
    text = "".join(parts)
    expected, matched = [], None
    for event in fed(new_choice("hermes"), deltas_of(text, [])):
        matcher = StopMatcher(stop, include_in_output=include)
        if isinstance(event, ContentText):
            found = matcher.feed(event.text)
            expected.append(found.text + ("" if found.matched else matcher.flush()))
            if (matched := found.matched) is not None:
                break
    choice = new_choice("hermes", stop, include=include)
    events = fed(choice, deltas_of(text, cuts))
    assert (content_of(events), choice.stop_reason) == ("".join(expected), matched)
    single = new_choice("hermes", stop, include=include)
    fed(single, deltas_of(text, range(len(text.encode()))))
    assert single.num_tokens == choice.num_tokens


def kinds_in(choice: Choice, kind: TokenKind) -> str:
    records = choice.take_records()
    assert len(records.kinds) == len(records.logprobs)
    found = zip(records.logprobs, records.kinds, strict=True)
    return bytes(entry.token_id for entry, each in found if each is kind).decode()


@pytest.mark.parametrize(
    "name", [name for name in FAMILIES if name not in ("harmony", "pythonic", "llama3_json", "llama4")]
)
@settings(max_examples=examples(20), deadline=None)
@given(CUTS)
def test_each_score_belongs_to_one_text(name: str, cuts: list[int]) -> None:
    family = FAMILIES[name]
    text = f"{THOUGHT}I look 🦦 é. {family.calls(CALLS)}"
    choices = {kind: new_choice(family.parser) for kind in TokenKind}
    for choice in choices.values():
        fed(choice, deltas_of(text, cuts, scored=True))
    assert kinds_in(choices[TokenKind.REASONING], TokenKind.REASONING) == THOUGHT
    assert kinds_in(choices[TokenKind.CONTENT], TokenKind.CONTENT) == "I look 🦦 é."
    assert kinds_in(choices[TokenKind.CALL], TokenKind.CALL) == f" {family.calls(CALLS)}\0"


@settings(max_examples=examples(60), deadline=None)
@given(CUTS)
def test_hidden_reasoning_has_no_scores(cuts: list[int]) -> None:
    choice = new_choice("hermes", hides_reasoning=True)
    scores = []
    for delta in deltas_of(f"{THOUGHT}I look 🦦.", cuts, scored=True):
        choice.feed(delta)
        scores += choice.take_records().logprobs
    assert bytes(entry.token_id for entry in scores).decode() == "I look 🦦.\0"


@settings(max_examples=examples(100), deadline=None)
@given(CUTS, st.booleans(), st.booleans())
def test_messages_of_a_response_have_the_scores_of_their_own_tokens(
    cuts: list[int], include_reasoning: bool, is_stream: bool
) -> None:
    choice = new_choice("hermes", hides_reasoning=not include_reasoning)
    request = parse_response({"model": "m", "input": "x", "include": [LOGPROBS], "stream": is_stream})
    run = PromptRun(GenerateRequest(request_id="r", prompt_ids=[1], sampling=Sampling()), [choice])
    answer = ResponseFormat("x", request, run, TOKENIZER, None)
    call = FAMILIES["hermes"].calls(CALLS)
    for delta in deltas_of(f"{THOUGHT}First 🦦.{call}Then é.{call}", cuts, scored=True):
        choice.feed(delta)
        if is_stream:
            answer.add(run, choice)
    asyncio.run(answer.finish())
    kept = [item for item in answer.document({})["output"] if item["type"] != "reasoning"]
    assert [item["type"] for item in kept] == ["message", "function_call", "message", "function_call"]
    for item, expected in zip(kept[::2], ("First 🦦.", "Then é."), strict=True):
        (part,) = item["content"]
        assert part["text"] == expected
        assert bytes(byte for score in part["logprobs"] for byte in score["bytes"]).decode() == expected
