"""Bytes to messages and back: two msgpack frames, the header first, and a frame with the tokens of a prompt.

The header is decoded on its own, so that a peer of another protocol version or model is refused with a clear reason
before its body, whose shape may have changed, is looked at. All samples of a request share one frame of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from kvrelay.protocol.messages import PROTOCOL_VERSION, AnyBody, Generate, Header, Prefill, RejectCode, Reserve

Frame = bytes | memoryview
MAX_FRAME_BYTES = 64 * 1024 * 1024


class MalformedMessage(ValueError):
    """The frames are no message of ours; the text says why."""


class MessageTooLarge(ValueError):
    """The message exceeds the size that peers accept."""


DECODE_ERRORS = (msgspec.MsgspecError, ValueError, RecursionError)
"""All errors of msgspec on invalid bytes, and those of `__post_init__`."""


_encoder = msgspec.msgpack.Encoder()
_header_decoder = msgspec.msgpack.Decoder(Header)
_body_decoder: msgspec.msgpack.Decoder[AnyBody] = msgspec.msgpack.Decoder(AnyBody)


def encode(header: Header, body: AnyBody) -> list[bytes]:
    """The frames of a message. Raises MessageTooLarge."""
    return [encode_header(header), *encode_body(body)]


def encode_body(body: AnyBody) -> list[bytes]:
    """The frames after the header. Raises MessageTooLarge."""
    frames = []
    if isinstance(body, Prefill | Generate | Reserve):
        frames.append(body.prompt.tokens)
        body = replace(body, prompt=replace(body.prompt, tokens=b""))
    frames.insert(0, _encoder.encode(body))
    for frame in frames:
        if len(frame) > MAX_FRAME_BYTES:
            raise MessageTooLarge(f"{type(body).__name__} has {len(frame)} bytes, more than {MAX_FRAME_BYTES}")
    return frames


def encode_header(header: Header) -> bytes:
    """The first frame alone."""
    return _encoder.encode(header)


def decode_header(frames: Sequence[Frame]) -> Header:
    """The header of a message. Raises MalformedMessage."""
    if len(frames) not in (2, 3):
        raise MalformedMessage(f"a message has 2 or 3 frames, this one {len(frames)}")
    if max(map(len, frames)) > MAX_FRAME_BYTES:
        raise MalformedMessage(f"a frame is larger than {MAX_FRAME_BYTES} bytes")
    try:
        return _header_decoder.decode(frames[0])
    except DECODE_ERRORS as error:
        raise MalformedMessage(f"header: {error}") from error


def decode_body(frames: Sequence[Frame]) -> AnyBody:
    """The body of a message whose header was accepted. Raises MalformedMessage."""
    try:
        body = _body_decoder.decode(frames[1])
        for tokens in frames[2:]:
            if not isinstance(body, Prefill | Generate | Reserve):
                raise MalformedMessage(f"{type(body).__name__} has a frame of tokens")
            body = replace(body, prompt=replace(body.prompt, tokens=bytes(tokens)))
        return body
    except DECODE_ERRORS as error:
        raise MalformedMessage(f"body: {error}") from error


def refusal(header: Header, fingerprint: str) -> tuple[RejectCode, str] | None:
    """Why a peer cannot be talked to, as (code, reason), or None.

    Fingerprints are compared if both sides have one (a router has none).
    """
    if header.version != PROTOCOL_VERSION:
        return "version", f"{header.sender} speaks protocol version {header.version}, this side {PROTOCOL_VERSION}"
    if header.fingerprint and fingerprint and header.fingerprint != fingerprint:
        return "fingerprint", (
            f"{header.sender} serves model fingerprint {header.fingerprint}, this side {fingerprint}: weights, dtype, "
            f"kv_cache_dtype, KV layout, block size and tokenizer must be the same"
        )
    return None
