"""Bytes to messages and back: two msgpack frames, the header first.

The header is decoded on its own, so that a peer of another protocol version or model is refused with a clear reason
before its body, whose shape may have changed, is looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import msgspec

from kvrelay.protocol.messages import PROTOCOL_VERSION, AnyBody, Header, RejectCode

Frame = bytes | memoryview
MAX_FRAME_BYTES = 64 * 1024 * 1024


class MalformedMessage(ValueError):
    """The frames are no message of ours; the text says why."""


class InvalidBody(MalformedMessage):
    """The body is of a kind that we know, but its fields break the limits of `messages.py`."""

    def __init__(self, kind: type[msgspec.Struct], text: str) -> None:
        super().__init__(f"body: {kind.__name__}: {text}")
        self.kind = kind


class MessageTooLarge(ValueError):
    """The message exceeds the size that peers accept."""


DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""All errors of msgspec on invalid bytes. The last two are not subclasses of its own."""


class _Kind(msgspec.Struct):
    kind: str


_KINDS: dict[str, type[msgspec.Struct]] = {str(kind.__struct_config__.tag): kind for kind in get_args(AnyBody)}
_kind_decoder = msgspec.msgpack.Decoder(_Kind)
_encoder = msgspec.msgpack.Encoder()
_header_decoder = msgspec.msgpack.Decoder(Header)
_body_decoder: msgspec.msgpack.Decoder[AnyBody] = msgspec.msgpack.Decoder(AnyBody)


def encode(header: Header, body: AnyBody) -> list[bytes]:
    """The two frames of a message. Raises MessageTooLarge."""
    return [encode_header(header), encode_body(body)]


def encode_body(body: AnyBody) -> bytes:
    """The second frame alone, for a sender that keeps it for repeats. Raises MessageTooLarge."""
    frame = _encoder.encode(body)
    if len(frame) > MAX_FRAME_BYTES:
        raise MessageTooLarge(f"{type(body).__name__} has {len(frame)} bytes, more than {MAX_FRAME_BYTES}")
    return frame


def encode_header(header: Header) -> bytes:
    """The first frame alone."""
    return _encoder.encode(header)


def decode_header(frames: Sequence[Frame]) -> Header:
    """The header of a message. Raises MalformedMessage."""
    if len(frames) != 2:
        raise MalformedMessage(f"a message has 2 frames, this one {len(frames)}")
    if len(frames[0]) > MAX_FRAME_BYTES or len(frames[1]) > MAX_FRAME_BYTES:
        raise MalformedMessage(f"a frame is larger than {MAX_FRAME_BYTES} bytes")
    try:
        return _header_decoder.decode(frames[0])
    except DECODE_ERRORS as error:
        raise MalformedMessage(f"header: {error}") from error


def decode_body(frames: Sequence[Frame]) -> AnyBody:
    """The body of a message whose header was accepted. Raises InvalidBody, and MalformedMessage for one that tells
    nothing."""
    try:
        return _body_decoder.decode(frames[1])
    except DECODE_ERRORS as error:
        kind = _kind_of(frames[1])
        if kind is not None:
            raise InvalidBody(kind, str(error)) from error
        raise MalformedMessage(f"body: {error}") from error


def _kind_of(frame: Frame) -> type[msgspec.Struct] | None:
    """None if the frame is no msgpack, or of a kind that this version does not know."""
    try:
        return _KINDS.get(_kind_decoder.decode(frame).kind)
    except DECODE_ERRORS:
        return None


def refusal(header: Header, fingerprint: str) -> tuple[RejectCode, str] | None:
    """Why a peer cannot be talked to, as (code, reason), or None.

    Versions talk to their neighbours. Fingerprints are compared where both sides have one (a router has none).
    """
    if abs(header.version - PROTOCOL_VERSION) > 1:
        return "version", (
            f"{header.sender} speaks protocol version {header.version}, this side {PROTOCOL_VERSION}; "
            f"only neighbouring versions talk to each other"
        )
    if header.fingerprint and fingerprint and header.fingerprint != fingerprint:
        return "fingerprint", (
            f"{header.sender} serves model fingerprint {header.fingerprint}, this side {fingerprint}: weights, dtype, "
            f"kv_cache_dtype, KV layout, block size and tokenizer must be the same"
        )
    return None
