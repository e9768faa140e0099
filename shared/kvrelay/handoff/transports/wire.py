"""What one message of a transport says: a small header, and with ZMQ one data frame with the blocks back to back.

The header names each block twice, by its index in the prompt and by the slot the sender was told. The receiver writes
by its own record of the slot; the sender's word only has to agree with it, so that a sender with another idea of the
reservation is found out before a byte is written.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvrelay.protocol.codec import DECODE_ERRORS

MAGIC = "kvblocks"
WIRE_VERSION = 1

Indices = NDArray[np.int64]
Bytes = NDArray[np.uint8]
Checksums = NDArray[np.uint32]

_INDEX_DTYPE = _CHECKSUM_DTYPE = np.dtype("<u4")


class MalformedBlocks(ValueError):
    """The frames are no message of this transport; the text says why."""


class _Header(msgspec.Struct, array_like=True, frozen=True):
    magic: str
    version: int
    reservation: str
    block_bytes: int
    indices: bytes
    slots: bytes
    checksums: bytes | None = None
    part: int = 0


@dataclass(frozen=True, slots=True)
class BlocksHeader:
    """A header that was checked in itself: as many indices as slots, at least one.

    `indices` and `slots` are int64 of shape [num_blocks]; `checksums`, if sent, one CRC-32 per block, uint32.
    """

    reservation: str
    block_bytes: int
    indices: Indices
    slots: Indices
    checksums: Checksums | None
    part: int = 0
    """Of the parts of a block that the receiver has admitted; `block_bytes` are the bytes of that part of a block."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Header)


def encode_header(
    reservation: str,
    block_bytes: int,
    indices: Indices,
    slots: Indices,
    checksums: Checksums | None = None,
    part: int = 0,
) -> bytes:
    """The header frame; indices and slots are int64 of shape [num_blocks], each below 2**32."""
    return _encoder.encode(
        _Header(
            MAGIC,
            WIRE_VERSION,
            reservation,
            block_bytes,
            indices.astype(_INDEX_DTYPE).tobytes(),
            slots.astype(_INDEX_DTYPE).tobytes(),
            None if checksums is None else checksums.astype(_CHECKSUM_DTYPE).tobytes(),
            part,
        )
    )


def decode_header(frame: bytes | memoryview) -> BlocksHeader:
    """The header of a message. Raises MalformedBlocks."""
    try:
        header = _decoder.decode(frame)
    except DECODE_ERRORS as error:
        raise MalformedBlocks(f"header: {error}") from error
    if header.magic != MAGIC or header.version != WIRE_VERSION:
        raise MalformedBlocks(f"header says {header.magic!r} version {header.version}, not {MAGIC!r} {WIRE_VERSION}")
    if not header.indices or len(header.indices) != len(header.slots) or len(header.indices) % _INDEX_DTYPE.itemsize:
        raise MalformedBlocks(f"{len(header.indices)} bytes of block indices, {len(header.slots)} of slots")
    if header.checksums is not None and len(header.checksums) != len(header.indices):
        raise MalformedBlocks(f"{len(header.indices)} bytes of block indices, {len(header.checksums)} of checksums")
    return BlocksHeader(
        header.reservation,
        header.block_bytes,
        _indices(header.indices),
        _indices(header.slots),
        None if header.checksums is None else np.frombuffer(header.checksums, _CHECKSUM_DTYPE).astype(np.uint32),
        header.part,
    )


def _indices(packed: bytes) -> Indices:
    return np.frombuffer(packed, _INDEX_DTYPE).astype(np.int64)
