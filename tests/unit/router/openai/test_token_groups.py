"""However the tokens of a sequence are grouped into deltas, its answer is that of one token at a time."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.protocol.sampling import FinishReason, Sampling, TokenLogprobs
from kvrelay.text.choice import Choice, SequenceDelta, StopRules
from kvrelay.text.request.completion_request import parse_completion
from kvrelay.text.service import DecodedPrompt
from kvrelay.text.tokenizer import Tokenizer, make_detokenizer
from kvrelay_router.dispatch.interface import GenerateRequest
from kvrelay_router.dispatch.running_request import RunningRequest
from kvrelay_router.openai.answer_format import AnswerFormat, usage_of
from kvrelay_router.openai.api_service import ApiService
from kvrelay_router.openai.chat_format import ChatFormat
from kvrelay_router.openai.chat_request import parse_chat
from kvrelay_router.openai.completions import CompletionFormat
from kvrelay_router.openai.generation import Generation, PromptRun, PromptSink
from tests.thoroughness import examples

KINDS = ["byte_level", "byte_fallback"]
PROMPT = [5, 6, 7]
FINISHES = st.sampled_from([FinishReason.LENGTH, FinishReason.STOP_TOKEN])
Groups = Sequence[Sequence[int]]


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    """Random tokens: halves of characters, invalid UTF-8, special tokens, ids beyond the vocabulary."""
    return {
        "token_ids": draw(st.lists(st.integers(0, 410), min_size=1, max_size=40)),
        "cuts": draw(st.sets(st.integers(1, 39))),
        "stop": draw(st.lists(st.text("abeint o", min_size=1, max_size=3), max_size=2)),
        "min_tokens": draw(st.sampled_from([0, 0, 5])),
        "include": draw(st.booleans()),
        "skip": draw(st.booleans()),
        "logprobs": draw(st.booleans()),
        "token_details": draw(st.booleans()),
        "usage": draw(st.sampled_from([None, "last", "continuous"])),
        "finish": draw(FINISHES),
        "finish_alone": draw(st.booleans()),
    }


def deltas_of(case: dict[str, Any], *, one_by_one: bool) -> list[SequenceDelta]:
    """The finish reason comes with the last tokens or, only for LENGTH, in a delta of its own."""
    token_ids = case["token_ids"]
    edges = range(len(token_ids) + 1) if one_by_one else sorted({0, len(token_ids), *case["cuts"]})
    edges = [edge for edge in edges if edge <= len(token_ids)]
    groups = [token_ids[start:end] for start, end in itertools.pairwise(edges)]
    finish = case["finish"]
    if case["finish_alone"] and finish is FinishReason.LENGTH:
        groups.append([])
    deltas = []
    for number, group in enumerate(groups):
        logprobs = [TokenLogprobs(token, -0.5 - token, [token], [-0.5]) for token in group] if case["logprobs"] else []
        is_last = number == len(groups) - 1
        deltas.append(SequenceDelta(0, group, logprobs, cached_tokens=2, finish=finish if is_last else None))
    return deltas


def new_choice(tokenizer: Tokenizer, case: dict[str, Any], text_offset: int = 0) -> Choice:
    rules = StopRules(case["stop"], frozenset(case["token_ids"][-1:]), case["min_tokens"], case["include"])
    detokenizer = make_detokenizer(tokenizer, PROMPT, skip_special_tokens=case["skip"])
    return Choice(0, detokenizer, rules, text_offset=text_offset)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(150))
@given(case=cases())
def test_a_choice(request: pytest.FixtureRequest, kind: str, case: dict[str, Any]) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    found = []
    for one_by_one in (True, False):
        choice = new_choice(tokenizer, case)
        text = ""
        for delta in deltas_of(case, one_by_one=one_by_one):
            if choice.finish_reason is None:
                choice.feed(delta)
                piece = choice.take_text()
                piece.encode()  # no half of a character
                text += piece
        ends = choice.finish_reason, choice.stop_reason, choice.num_tokens
        found.append((text, *ends, round(choice.logprob_sum, 6), choice.take_records()))
    assert found[0] == found[1]
    assert found[0][1] is not None


class Handle:
    def __init__(self) -> None:
        self.num_stopped = 0

    def stop(self, sequence: int) -> None:
        self.num_stopped += 1


def answer_of(tokenizer: Tokenizer, case: dict[str, Any], api: str, *, stream: bool, one_by_one: bool) -> bytes:
    head = {"id": "a", "object": "o", "created": 1, "model": "m"}
    service = cast(
        ApiService, SimpleNamespace(text=SimpleNamespace(tokenizer=tokenizer), answer_head=lambda *about: dict(head))
    )
    echo = DecodedPrompt("prompt", [0, 2, 4]) if api == "completion" and case["token_details"] else None
    generate = GenerateRequest(request_id="r", prompt_ids=PROMPT, sampling=Sampling())
    run = PromptRun(generate, [new_choice(tokenizer, case, len(echo.text) if echo is not None else 0)])
    body: dict[str, Any] = {"model": "m", "stream": stream, "return_token_ids": case["token_details"]}
    if stream and case["usage"]:
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": case["usage"] == "continuous"}
    answer: AnswerFormat
    if api == "chat":
        body |= {"messages": [{"role": "user", "content": "x"}], "logprobs": case["logprobs"]}
        answer = ChatFormat(service, "a", [parse_chat(body)], [run])
    else:
        body |= {"prompt": "x", "echo": echo is not None} | ({"logprobs": 1} if case["logprobs"] else {})
        answer = CompletionFormat(service, "a", parse_completion(body), [run], [echo] if echo is not None else [])
    generation = Generation(cast(Any, None), [run], answer.add if answer.is_stream else answer.keep)
    handle = Handle()
    sink = PromptSink(generation, run, cast(RunningRequest, handle))
    events = [sink.events_of([delta]) for delta in deltas_of(case, one_by_one=one_by_one)]
    assert generation.is_over
    assert handle.num_stopped <= 1
    if answer.is_stream:
        return b"".join(events) + answer.end(usage_of([run]))
    return json.dumps(answer.document(usage_of([run]))).encode()


def joined(events: bytes) -> dict[str, Any]:
    """Everything that a client puts together from a stream."""
    found: dict[str, Any] = {"text": "", "token_ids": [], "logprobs": [], "roles": 0, "usage": None}
    for event in events.decode().split("\n\n")[:-1]:
        content = json.loads(event.removeprefix("data: "))
        found["usage"] = content.get("usage") or found["usage"]
        for choice in content["choices"]:
            delta = choice.get("delta", {})
            found["roles"] += "role" in delta
            found["text"] += choice.get("text", "") + delta.get("content", "")
            found["token_ids"] += choice.get("token_ids", [])
            if choice["logprobs"] is not None:
                lists = choice["logprobs"]
                found["logprobs"] += (
                    lists["content"]
                    if "content" in lists
                    else list(zip(lists["tokens"], lists["token_logprobs"], lists["text_offset"], strict=True))
                )
            found |= {name: choice[name] for name in ("finish_reason", "stop_reason") if choice.get(name) is not None}
    return found


@pytest.mark.parametrize("api", ["chat", "completion"])
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(100))
@given(case=cases())
def test_an_answer(request: pytest.FixtureRequest, kind: str, api: str, case: dict[str, Any]) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    whole, grouped = (answer_of(tokenizer, case, api, stream=False, one_by_one=each) for each in (True, False))
    assert whole == grouped
    single, groups = (joined(answer_of(tokenizer, case, api, stream=True, one_by_one=each)) for each in (True, False))
    assert single == groups
    (choice,) = json.loads(whole)["choices"]
    assert groups["text"] == (choice["text"] if api == "completion" else choice["message"]["content"])
    assert groups["finish_reason"] == choice["finish_reason"]
    if case["token_details"]:
        assert groups["token_ids"] == choice["token_ids"]
