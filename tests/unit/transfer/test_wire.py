"""The header on the wire."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from kvrelay.handoff.transports.wire import MAGIC, WIRE_VERSION, MalformedBlocks, decode_header, encode_header

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("checksums", [None, [0, 0xDEADBEEF, (1 << 32) - 1]])
def test_a_header_comes_back_as_it_was(checksums: list[int] | None) -> None:
    indices, slots = np.array([0, 7, (1 << 32) - 1]), np.array([5, 0, 1])
    sent = None if checksums is None else np.array(checksums, np.uint32)
    header = decode_header(encode_header("r", 4096, indices, slots, sent))
    assert (header.reservation, header.block_bytes) == ("r", 4096)
    assert (None if header.checksums is None else header.checksums.tolist()) == checksums
    assert header.indices.tolist() == indices.tolist()
    assert header.slots.tolist() == slots.tolist()


@pytest.mark.parametrize(
    "fields",
    [
        ["other", WIRE_VERSION, "r", 8, b"1234", b"1234"],
        [MAGIC, WIRE_VERSION + 1, "r", 8, b"1234", b"1234"],
        [MAGIC, WIRE_VERSION, "r", 8, b"", b""],
        [MAGIC, WIRE_VERSION, "r", 8, b"1234", b"12345678"],
        [MAGIC, WIRE_VERSION, "r", 8, b"123", b"123"],
        [MAGIC, WIRE_VERSION, "r", 8, b"1234", b"1234", b"12345678"],
        [MAGIC, WIRE_VERSION, "r", 8, b"1234", b"1234", 5],
        [MAGIC, WIRE_VERSION, 5, 8, b"1234", b"1234"],
        [MAGIC, WIRE_VERSION, "r"],
        {"magic": MAGIC},
    ],
)
def test_anything_else_is_malformed(fields: object) -> None:
    with pytest.raises(MalformedBlocks):
        decode_header(msgspec.msgpack.encode(fields))


@pytest.mark.parametrize("frame", [b"", b"\xc1", b"GET / HTTP/1.1"])
def test_bytes_that_are_no_msgpack_are_malformed(frame: bytes) -> None:
    with pytest.raises(MalformedBlocks):
        decode_header(frame)


def test_a_cut_header_is_malformed() -> None:
    whole = encode_header("r", 4096, np.arange(3), np.arange(3))
    for length in range(len(whole)):
        with pytest.raises(MalformedBlocks):
            decode_header(whole[:length])
