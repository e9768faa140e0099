"""What is read out of an answer, whichever way a server writes it and the network cuts it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay_bench.answer_reader import NOT_WHOLE, AnswerReader, Record

SSE = "text/event-stream; charset=utf-8"


def event(content: dict[str, Any] | str, end: str = "\n\n") -> bytes:
    text = content if isinstance(content, str) else json.dumps(content)
    return f"data: {text}{end}".encode()


def text(piece: str, finish: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": piece, "finish_reason": finish, **more}]}


def delta(finish: str | None = None, **content: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": content, "finish_reason": finish}]}


def usage(num_output: int, num_prompt: int = 7, cached: int | None = None) -> dict[str, Any]:
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    return {"choices": [], "usage": {"prompt_tokens": num_prompt, "completion_tokens": num_output, **details}}


def read(*chunks: bytes, status: int = 200, content_type: str = SSE) -> Record:
    """Chunk `i` comes at second `i`."""
    record = Record(0.0)
    reader = AnswerReader(record, status, content_type)
    for at_s, chunk in enumerate(chunks):
        reader.feed(chunk, float(at_s))
    reader.end(float(len(chunks)))
    return record


def test_a_stream_with_a_role_first_and_usage_last() -> None:
    record = read(
        event(delta(role="assistant", content="")),
        event(delta(content="a")),
        event(delta(content="b c")),
        event(delta("stop")),
        event(usage(9, cached=4)),
        event("[DONE]"),
    )
    assert (record.pieces_s, record.ended_s, record.error) == ([1.0, 2.0], 6.0, "")
    assert (record.num_prompt, record.num_output, record.num_cached, record.num_tokens) == (7, 9, 4, 9)
    assert (record.ttft_s, record.e2e_s, record.tpot_s, record.gaps_s) == (1.0, 6.0, 1 / 8, [1.0])


@pytest.mark.parametrize(
    "said",
    [
        text("x"),
        text("", token_ids=[5]),
        delta(content="x"),
        delta(reasoning_content="x"),
        delta(reasoning="x"),
        delta(refusal="x"),
        delta(tool_calls=[{"index": 0}]),
    ],
)
def test_every_kind_of_text_is_a_piece(said: dict[str, Any]) -> None:
    record = read(b": comment\n\n", event(said), event(text("", "stop")), event("[DONE]"))
    assert (record.pieces_s, record.error) == ([1.0], "")


def test_tokens_are_counted_by_usage_else_by_ids_else_by_pieces() -> None:
    ids = [event(text("ab", token_ids=[1, 2, 3])), event(text("c", "length", token_ids=[4])), event("[DONE]")]
    assert read(*ids).num_tokens == 4
    assert read(*ids[:2], event(usage(6)), ids[2]).num_tokens == 6
    plain = read(event(text("ab")), event(text("c", "length")), event("[DONE]"))
    assert (plain.num_output, plain.num_tokens) == (None, 2)


def test_usage_with_every_chunk_counts_the_last() -> None:
    chunks = [event(text("a") | {"usage": usage(n)["usage"]}) for n in (1, 2, 3)]
    assert read(*chunks, event("[DONE]")).num_output == 3


def test_streams_that_are_not_whole() -> None:
    assert read(event(text("a"))).error == NOT_WHOLE
    assert read(event(text("a")), event({"error": {"message": "worker died"}})).error == "in the stream: worker died"
    assert read(event(text("a")), event("{nonsense"), event("[DONE]")).error.startswith("a chunk that cannot be read")
    assert read(event("[1, 2]"), event("[DONE]")).error.startswith("a chunk that cannot be read")
    assert read(event("[DONE]")).error == "the answer has no text"
    silent = read(event(delta(role="assistant")), event(delta("length")), event(usage(1)), event("[DONE]"))
    assert (silent.error, silent.pieces_s) == ("", [1.0])  # a token without text of its own
    assert read(event(text("a", "stop"))).error == ""  # no [DONE], but the choice ended


def test_answers_that_are_no_stream() -> None:
    whole = json.dumps({"choices": [{"text": "a b"}], "usage": usage(2)["usage"]}).encode()
    record = read(whole[:9], whole[9:], content_type="application/json")
    assert (record.pieces_s, record.num_output, record.error) == ([2.0], 2, "")
    refused = json.dumps({"error": {"message": "too many"}}).encode()
    assert read(refused, status=429, content_type="application/json").error == "status 429: too many"
    assert read(b"<html>", status=502, content_type="text/html").error == "status 502: <html>"
    assert read(b"<html>", content_type="text/html").error == "the answer is neither a stream nor a completion"


@given(st.data())
def test_how_the_network_cuts_a_stream_changes_only_times(data: st.DataObject) -> None:
    end = data.draw(st.sampled_from(["\n\n", "\r\n\r\n"]))
    said = data.draw(st.lists(st.sampled_from([text("a"), text(""), delta(content="ü"), delta(role="assistant")])))
    tail = data.draw(st.lists(st.sampled_from([usage(4), text("", "stop"), {"error": {"message": "no"}}]), max_size=2))
    whole = b"".join(event(each, end) for each in [*said, *tail])
    whole += data.draw(st.sampled_from([b"", event("[DONE]", end), b"data: [DONE]", b": ping\n\n"]))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    one, cut = read(whole), read(*pieces)
    assert (len(one.pieces_s), one.num_output, one.num_prompt, one.error) == (
        len(cut.pieces_s),
        cut.num_output,
        cut.num_prompt,
        cut.error,
    )
    assert cut.pieces_s == sorted(cut.pieces_s)
