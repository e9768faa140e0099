"""Packed log-probabilities are those that went in, in parts that fit messages."""

from __future__ import annotations

import math
import struct

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.protocol import codec
from kvrelay.protocol.messages import PromptLogprobs
from kvrelay.protocol.packed_logprobs import (
    MOST_LOGPROBS_PER_MESSAGE,
    CollectedLogprobs,
    PackedLogprobs,
    own_logprobs,
    packed_in_parts,
)
from kvrelay.protocol.sampling import TokenLogprobs
from kvrelay.worker.requests import ScoreParts
from tests.thoroughness import examples

ids = st.integers(0, 2**31 - 1)
logprobs = st.floats(max_value=1.0, allow_nan=False)


@st.composite
def entries(draw: st.DrawFn) -> TokenLogprobs:
    num_top = draw(st.sampled_from([0, 1, 3]))
    top_ids = draw(st.lists(ids, min_size=num_top, max_size=num_top))
    return TokenLogprobs(draw(ids), draw(logprobs), top_ids, [draw(logprobs) for _ in top_ids])


def sent_and_received(message: PromptLogprobs) -> PromptLogprobs:
    body = codec.decode_body([b"", *codec.encode_body(message)])
    assert isinstance(body, PromptLogprobs)
    return body


@settings(max_examples=examples(100))
@given(st.lists(st.lists(entries(), max_size=8), max_size=4), st.integers(-3, 40), st.integers(-3, 40))
def test_what_steps_brought_arrives_in_slices(steps: list[list[TokenLogprobs]], start: int, stop: int) -> None:
    parts, collected = ScoreParts(), CollectedLogprobs()
    for step in steps:
        for message in map(sent_and_received, parts.add(step)):
            assert message.start == len(collected)
            collected.add(message.part)
    expected = [entry for step in steps for entry in step]
    assert (len(collected), collected[:]) == (len(expected), expected)
    assert collected[start:stop] == expected[start:stop]
    for rows in (collected, expected):
        assert own_logprobs(rows).tolist() == [entry.logprob for entry in expected]


@settings(max_examples=examples(50))
@given(st.lists(entries(), min_size=2, max_size=8))
def test_the_first_entries_can_be_left_out(rows: list[TokenLogprobs]) -> None:
    part = next(packed_in_parts(rows))
    for count in range(len(part)):
        rest = part.without_first(count)
        assert rest.rows(0, len(rest)) == rows[count : len(part)]


@pytest.mark.parametrize("num_top", [0, 20, 1024])
def test_no_part_exceeds_a_message(num_top: int) -> None:
    entry = TokenLogprobs(7, -0.5, list(range(num_top)), [-1.0] * num_top)
    parts = list(packed_in_parts([entry] * 20_000 if not num_top else [entry] * 1000))
    assert all(len(part) * (num_top + 1) <= MOST_LOGPROBS_PER_MESSAGE for part in parts)
    assert all(len(codec.encode_body(PromptLogprobs(start=0, part=part))) < 128 << 10 for part in parts)
    num_bytes = sum(len(part.top_ids) for part in parts)
    assert num_bytes == 4 * num_top * sum(map(len, parts))
    assert len(parts) <= 1 + sum(map(len, parts)) * (num_top + 1) // (MOST_LOGPROBS_PER_MESSAGE // 2)


GOOD = PackedLogprobs(1, b"\1\0\0\0", bytes(8), b"\2\0\0\0", bytes(8))
NAN = struct.pack("<d", math.nan)


@pytest.mark.parametrize(
    "fields",
    [
        (0, b"", b"", b"", b""),
        (1, b"\1\0\0\0", bytes(8), b"", b""),
        (1, b"\1\0\0", bytes(8), b"\2\0\0\0", bytes(8)),
        (1, b"\1\0\0\0", bytes(16), b"\2\0\0\0", bytes(8)),
        (1, b"\1\0\0\x80", bytes(8), b"\2\0\0\0", bytes(8)),
        (1, b"\1\0\0\0", bytes(8), b"\2\0\0\xff", bytes(8)),
        (1, b"\1\0\0\0", NAN, b"\2\0\0\0", bytes(8)),
        (1, b"\1\0\0\0", bytes(8), b"\2\0\0\0", NAN),
        (-1, b"\1\0\0\0", bytes(8), b"", b""),
        (1025, b"\1\0\0\0", bytes(8), bytes(4 * 1025), bytes(8 * 1025)),
        (0, bytes(4 * (MOST_LOGPROBS_PER_MESSAGE + 1)), bytes(8 * (MOST_LOGPROBS_PER_MESSAGE + 1)), b"", b""),
    ],
)
def test_what_does_not_fit_together_is_refused(fields: tuple[int, bytes, bytes, bytes, bytes]) -> None:
    good = sent_and_received(PromptLogprobs(start=0, part=GOOD))
    assert good.part == GOOD
    data = msgspec.msgpack.encode({"kind": "prompt_logprobs", "start": 0, "part": fields})
    with pytest.raises(codec.MalformedMessage):
        codec.decode_body([b"", data])
