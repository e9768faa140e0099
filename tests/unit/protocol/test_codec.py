"""Bytes to messages and back."""

from __future__ import annotations

import contextlib
from typing import Annotated, get_args, get_origin

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.protocol import codec
from kvrelay.protocol.grammar import Grammar
from kvrelay.protocol.messages import (
    PROTOCOL_VERSION,
    Alive,
    AnyBody,
    Header,
    PeerRef,
    Prompt,
    SequenceUsage,
    TokenBatch,
    TokenEntry,
    pack_tokens,
    unpack_tokens,
)
from kvrelay.protocol.sampling import Sampling, TokenLogprobs
from tests.thoroughness import examples

KINDS: tuple[type[msgspec.Struct], ...] = get_args(AnyBody)
HEADER = Header(sender="p0", incarnation="1", reply_to="tcp://p0:1", to_incarnation="2", link=1)

int64 = st.integers(-(2**63), 2**63 - 1)
st.register_type_strategy(int, int64)
st.register_type_strategy(float, st.floats(allow_nan=False))
NESTED: tuple[type[msgspec.Struct], ...] = (
    PeerRef,
    Grammar,
    Sampling,
    TokenLogprobs,
    Prompt,
    SequenceUsage,
    TokenEntry,
)
STRUCTS: tuple[type[msgspec.Struct], ...] = (*NESTED, Header, *KINDS)


def values(hint: object) -> st.SearchStrategy[object]:
    """Values that a field of this type may hold. Raises NotImplementedError for a limit that it does not know."""
    match msgspec.inspect.type_info(hint):
        case msgspec.inspect.StrType(min_length=None, max_length=int(most), pattern=None):
            return st.text(max_size=most)
        case msgspec.inspect.FloatType(gt=None, ge=float(least), lt=None, le=float(most), multiple_of=None):
            return st.floats(least, most)
    if get_origin(hint) is Annotated:
        raise NotImplementedError(hint)
    return st.from_type(hint)  # type: ignore[arg-type]


for struct in STRUCTS:
    hints = {field.name: values(field.type) for field in msgspec.structs.fields(struct)}
    st.register_type_strategy(struct, st.builds(struct, **hints))

bodies: st.SearchStrategy[AnyBody] = st.one_of([st.from_type(kind) for kind in KINDS])  # type: ignore[arg-type]
headers = st.from_type(Header)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: str(kind.__name__))
def test_every_kind_survives_the_way(kind: type[AnyBody]) -> None:
    @settings(max_examples=20, deadline=None)
    @given(headers, st.from_type(kind))
    def survives(header: Header, body: AnyBody) -> None:
        frames = codec.encode(header, body)
        assert codec.decode_header(frames) == header
        decoded = codec.decode_body([memoryview(frame) for frame in frames])
        assert type(decoded) is kind
        assert decoded == body

    survives()


def test_a_large_message_survives_the_way() -> None:
    entry = TokenEntry(request="r", attempt=1, sequence=0, index=0, token_ids=list(range(100_000)))
    body = TokenBatch(entries=[entry] * 20)
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
    good = codec.encode_body(body)
    at = data.draw(st.integers(0, len(good)))
    frames = [good[:at] + noise + good[at + len(noise) :]] * 2
    for decode in (codec.decode_header, codec.decode_body):
        with contextlib.suppress(codec.MalformedMessage):
            decode(frames)


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


@pytest.mark.parametrize("num_frames", [0, 1, 3, 10])
def test_a_message_has_two_frames(num_frames: int) -> None:
    with pytest.raises(codec.MalformedMessage, match="2 frames"):
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


@pytest.mark.parametrize("distance", [-2, -1, 0, 1, 2])
def test_neighbouring_versions_talk_and_others_do_not(distance: int) -> None:
    version = PROTOCOL_VERSION + distance
    refusal = codec.refusal(msgspec.structs.replace(HEADER, version=version), "")
    if abs(distance) <= 1:
        assert refusal is None
    else:
        assert refusal is not None
        code, reason = refusal
        assert code == "version"
        assert f"version {version}" in reason and f"{PROTOCOL_VERSION}" in reason


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
