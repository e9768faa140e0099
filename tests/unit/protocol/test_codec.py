"""Bytes to messages and back."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.protocol import codec
from kvrelay.protocol.limits import MOST_SAMPLES, MOST_SEQUENCES, MOST_STEP_TOKENS
from kvrelay.protocol.messages import (
    Alive,
    AnyBody,
    Header,
    Reserve,
    TokenBatch,
    TokenEntry,
    pack_tokens,
    unpack_tokens,
)
from tests.thoroughness import examples
from tests.unit.protocol.message_strategies import KINDS, hostile_frames, structs_of, values

HEADER = Header(sender="p0", incarnation="1", reply_to="tcp://p0:1", to_incarnation="2", link=1)

bodies: st.SearchStrategy[AnyBody] = st.one_of([values(kind) for kind in KINDS])
headers: st.SearchStrategy[Header] = values(Header)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: str(kind.__name__))
def test_every_kind_survives_the_way(kind: type[AnyBody]) -> None:
    @settings(max_examples=20, deadline=None)
    @given(headers, values(kind))
    def survives(header: Header, body: AnyBody) -> None:
        frames = codec.encode(header, body)
        assert codec.decode_header(frames) == header
        decoded = codec.decode_body([memoryview(frame) for frame in frames])
        assert type(decoded) is kind
        assert decoded == body

    survives()


def test_a_large_message_survives_the_way() -> None:
    entry = TokenEntry(request="r", attempt=1, sequence=0, index=0, token_ids=list(range(MOST_STEP_TOKENS)))
    body = TokenBatch(entries=[entry] * 30)
    assert codec.decode_body(codec.encode(HEADER, body)) == body


def test_no_two_kinds_share_a_name() -> None:
    names = [kind.__struct_config__.tag for kind in KINDS]
    assert len(set(names)) == len(names)


@settings(max_examples=examples(200), deadline=None)
@given(headers, bodies, st.data())
def test_a_truncated_message_is_malformed(header: Header, body: AnyBody, data: st.DataObject) -> None:
    frames = codec.encode(header, body)
    header_length = data.draw(st.integers(0, len(frames[0]) - 1))
    body_length = data.draw(st.integers(0, len(frames[1]) - 1))
    with pytest.raises(codec.MalformedMessage, match="header"):
        codec.decode_header([frames[0][:header_length], frames[1]])
    with pytest.raises(codec.MalformedMessage, match="body"):
        codec.decode_body([frames[0], frames[1][:body_length]])


@settings(max_examples=examples(300), deadline=None)
@given(bodies, st.binary(max_size=64), st.data())
def test_damaged_bytes_are_a_message_or_malformed_but_nothing_else(
    body: AnyBody, noise: bytes, data: st.DataObject
) -> None:
    good, *_ = codec.encode_body(body)
    at = data.draw(st.integers(0, len(good)))
    frames = [good[:at] + noise + good[at + len(noise) :]] * 2
    for decode in (codec.decode_header, codec.decode_body):
        with contextlib.suppress(codec.MalformedMessage):
            decode(frames)


@settings(max_examples=examples(1000), deadline=None)
@given(hostile_frames(bodies))
def test_hostile_fields_are_within_their_limits_or_refused(frame: bytes) -> None:
    with contextlib.suppress(codec.MalformedMessage):
        body = codec.decode_body([b"", frame])
        assert codec.decode_body([b"", *codec.encode_body(body)]) == body


@settings(max_examples=examples(300), deadline=None)
@given(hostile_frames(headers))
def test_hostile_headers_are_headers_or_malformed(frame: bytes) -> None:
    with contextlib.suppress(codec.MalformedMessage):
        header = codec.decode_header([frame, b""])
        assert codec.decode_header([codec.encode_header(header), b""]) == header


UNLIMITED = {"TokenEntry": {"request", "attempt", "sequence", "index"}, "Prompt": {"tokens"}}
"""Fields that are compared with what the receiver knows, or that a rule between fields checks."""


@pytest.mark.parametrize("struct", structs_of(Header, *KINDS), ids=lambda struct: str(struct.__name__))
def test_every_number_text_and_list_has_a_limit(struct: type[msgspec.Struct]) -> None:
    info = msgspec.inspect.type_info(struct)
    assert isinstance(info, msgspec.inspect.StructType)
    unlimited = {field.name for field in info.fields if not _is_limited(field.type)}
    assert unlimited == UNLIMITED.get(struct.__name__, set())


def _is_limited(info: object) -> bool:
    match info:
        case msgspec.inspect.IntType(ge=least, le=most):
            return least is not None and most is not None
        case msgspec.inspect.FloatType(le=most):  # which also excludes NaN
            return most is not None
        case msgspec.inspect.StrType(max_length=most) | msgspec.inspect.BytesType(max_length=most):
            return most is not None
        case msgspec.inspect.ListType(item_type=item, max_length=most):
            return most is not None and _is_limited(item)
        case msgspec.inspect.VarTupleType(item_type=item, max_length=most):
            return most is not None and _is_limited(item)
        case msgspec.inspect.TupleType(item_types=items) | msgspec.inspect.UnionType(types=items):
            return all(map(_is_limited, items))
        case msgspec.inspect.DictType(key_type=key, value_type=value):
            return _is_limited(key) and _is_limited(value)
    return True


PROMPT = {"tokens": b"\0" * 8, "sampling": {}}
ENTRY = {"request": "r", "attempt": 1, "sequence": 0, "index": 0, "token_ids": []}
TOO_LONG: list[tuple[str, dict[str, object]]] = [
    ("65536", {"kind": "token_batch", "entries": [ENTRY | {"token_ids": [1] * (MOST_STEP_TOKENS + 1)}]}),
    ("65536", {"kind": "token_batch", "entries": [ENTRY] * (MOST_SEQUENCES + 1)}),
    ("1024", {"kind": "token_batch", "entries": [ENTRY | {"texts": [[[], 0.0, 0.0, "length"]] * (MOST_SAMPLES + 1)}]}),
]
"""Lists that are longer than any that a correct worker sends. Their items are not even read."""


@pytest.mark.parametrize(("limit", "body"), TOO_LONG)
def test_lists_that_are_too_long_are_refused(limit: str, body: dict[str, object]) -> None:
    with pytest.raises(codec.MalformedMessage, match=limit):
        codec.decode_body([b"", msgspec.msgpack.encode(body)])


CONTRADICTIONS: list[tuple[str, dict[str, object]]] = [
    ("whole number", {"kind": "generate", "prompt": PROMPT | {"tokens": b"\0" * 7}}),
    ("are output", {"kind": "generate", "prompt": PROMPT | {"num_output": 3}}),
    (">= 1", {"kind": "generate", "prompt": PROMPT | {"num_samples": 0}}),
    (
        "than there are beams",
        {"kind": "generate", "prompt": PROMPT | {"sampling": {"beams": {"width": 1, "num_returned": 2}}}},
    ),
    (
        "granted twice",
        {
            "kind": "granted",
            "reservation": "r",
            "first_block": 0,
            "slots": [3, 3],
            "transport": "zmq",
            "endpoints": [{}],
        },
    ),
    ("either a token", {"kind": "handoff", "reservation": "r", "index": 0, "num_tokens": 1, "num_blocks": 1}),
    (
        "either a token",
        {
            "kind": "handoff",
            "reservation": "r",
            "index": 0,
            "num_tokens": 1,
            "num_blocks": 1,
            "token_id": 1,
            "candidate_ids": [7],
            "candidate_logprobs": [0.0],
        },
    ),
    (
        "were cached",
        {
            "kind": "handoff",
            "reservation": "r",
            "index": 0,
            "num_tokens": 1,
            "num_blocks": 1,
            "token_id": 1,
            "cached_tokens": 2,
        },
    ),
    (
        "log-probability",
        {
            "kind": "handoff",
            "reservation": "r",
            "index": 0,
            "num_tokens": 1,
            "num_blocks": 1,
            "candidate_ids": [7],
        },
    ),
]


@pytest.mark.parametrize(("reason", "body"), CONTRADICTIONS)
def test_fields_that_contradict_each_other_are_refused(reason: str, body: dict[str, object]) -> None:
    with pytest.raises(codec.MalformedMessage, match=reason):
        codec.decode_body([b"", msgspec.msgpack.encode(body)])


@pytest.mark.parametrize(
    ("process", "is_taken"),
    [
        ("", True),
        ("boot:pid:[4026531836]/12/345", True),
        (f"{'b' * 128}/{'1' * 10}/{'2' * 20}", True),
        ("boot:pid:[1]/12", False),
        ("boot:pid:[1]/12/3/4", False),
        ("boot:pid:[1]/12/3\n", False),
        ("boot:pid:[1]/٣/3", False),
        (f"boot:pid:[1]/{'1' * 11}/3", False),
        (f"{'b' * 129}/1/1", False),
    ],
)
def test_a_process_is_an_identity_or_empty(process: str, is_taken: bool) -> None:
    router = {"peer_id": "r", "incarnation": "1", "address": "tcp://r"}
    body = {
        "kind": "reserve",
        "prompt": PROMPT,
        "router": router,
        "transports": [],
        "processes": [process],
    }
    with contextlib.nullcontext() if is_taken else pytest.raises(codec.MalformedMessage, match="process"):
        decoded = codec.decode_body([b"", msgspec.msgpack.encode(body)])
        assert isinstance(decoded, Reserve) and decoded.processes == [process]


@pytest.mark.parametrize("frame", [b"\x81\xa1x" + b"\x91" * 100_000, b"\x81\xa1x" * 100_000], ids=["arrays", "maps"])
def test_deep_nesting_is_malformed(frame: bytes) -> None:
    with pytest.raises(codec.MalformedMessage):
        codec.decode_header([frame, b""])
    with pytest.raises(codec.MalformedMessage):
        codec.decode_body([b"", frame])


@pytest.mark.parametrize("kind", ["from_the_future", "", 7, None])
def test_an_unknown_kind_is_malformed(kind: object) -> None:
    with pytest.raises(codec.MalformedMessage):
        codec.decode_body([b"", msgspec.msgpack.encode({"kind": kind})])


def test_fields_that_a_neighbour_added_are_passed_over() -> None:
    body = msgspec.msgpack.encode({"kind": "alive", "mood": {"nested": [1, 2]}})
    header = msgspec.msgpack.encode({**msgspec.to_builtins(HEADER), "colour": "blue"})
    assert codec.decode_header([header, body]) == HEADER
    assert codec.decode_body([header, body]) == Alive()


@pytest.mark.parametrize("num_frames", [0, 1, 4, 10])
def test_a_message_has_two_frames_or_three(num_frames: int) -> None:
    with pytest.raises(codec.MalformedMessage, match="2 or 3 frames"):
        codec.decode_header([codec.encode_header(HEADER)] * num_frames)


@pytest.mark.parametrize("position", [0, 1])
def test_a_frame_beyond_the_limit_is_malformed(monkeypatch: pytest.MonkeyPatch, position: int) -> None:
    monkeypatch.setattr(codec, "MAX_FRAME_BYTES", 1000)
    frames = codec.encode(HEADER, Alive())
    frames[position] = b"\x00" * 1001
    with pytest.raises(codec.MalformedMessage, match="larger than 1000 bytes"):
        codec.decode_header(frames)


def test_a_body_beyond_the_limit_is_not_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = TokenEntry(request="r", attempt=1, sequence=0, index=0, token_ids=list(range(1000)))
    monkeypatch.setattr(codec, "MAX_FRAME_BYTES", 1000)
    with pytest.raises(codec.MessageTooLarge, match="TokenBatch"):
        codec.encode(HEADER, TokenBatch(entries=[entry]))


@pytest.mark.parametrize(
    ("theirs", "ours", "is_taken"),
    [("qwen", "qwen", True), ("qwen", "llama", False), ("", "qwen", True), ("qwen", "", True), ("", "", True)],
)
def test_fingerprints_must_agree_where_both_have_one(theirs: str, ours: str, is_taken: bool) -> None:
    refusal = codec.refusal(msgspec.structs.replace(HEADER, fingerprint=theirs), ours)
    assert (refusal is None) == is_taken
    if refusal is not None:
        assert refusal[0] == "fingerprint"
        assert theirs in refusal[1] and ours in refusal[1]


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_token_ids_survive_packing(token_ids: list[int]) -> None:
    packed = pack_tokens(token_ids)
    assert len(packed) == 4 * len(token_ids)
    assert unpack_tokens(packed).tolist() == token_ids


def test_a_token_id_that_does_not_fit_is_no_token_id() -> None:
    with pytest.raises(OverflowError):
        pack_tokens([2**31])
