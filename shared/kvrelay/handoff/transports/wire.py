"""What one message of a transport says: a small header, and with ZMQ one data frame with the blocks back to back.

The header names each block twice, by its index in the prompt and by the slot the sender was told. The receiver writes
by its own record of the slot; the sender's word only has to agree with it, so that a sender with another idea of the
reservation is found out before a byte is written.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvrelay.protocol.codec import DECODE_ERRORS

MAGIC = "kvblocks"
WIRE_VERSION = 1

Indices = NDArray[np.int64]
Bytes = NDArray[np.uint8]
Checksums = NDArray[np.uint32]

_UINT32 = np.dtype("<u4")


class MalformedBlocks(ValueError):
    """The frames are no message of this transport; the text says why."""


class BlocksHeader(msgspec.Struct, array_like=True, frozen=True):
    """`indices` and `slots`: one for each block, `checksums`: none or one for each, as little-endian uint32. `part`: of
    the parts of a block that the receiver has admitted, each of `block_bytes` bytes."""

    magic: str
    version: int
    reservation: str
    block_bytes: int
    packed_indices: bytes
    packed_slots: bytes
    packed_checksums: bytes | None = None
    part: int = 0

    def __post_init__(self) -> None:
        if self.magic != MAGIC or self.version != WIRE_VERSION:
            raise MalformedBlocks(f"header says {self.magic!r} version {self.version}, not {MAGIC!r} {WIRE_VERSION}")
        size = len(self.packed_indices)
        if not size or size % _UINT32.itemsize or len(self.packed_slots) != size:
            raise MalformedBlocks(f"{size} bytes of block indices, {len(self.packed_slots)} of slots")
        if self.packed_checksums is not None and len(self.packed_checksums) != size:
            raise MalformedBlocks(f"{size} bytes of block indices, {len(self.packed_checksums)} of checksums")

    @property
    def num_blocks(self) -> int:
        return len(self.packed_indices) // _UINT32.itemsize

    @property
    def indices(self) -> Indices:
        """int64 [num_blocks]."""
        return np.frombuffer(self.packed_indices, _UINT32).astype(np.int64)

    @property
    def slots(self) -> Indices:
        """int64 [num_blocks]."""
        return np.frombuffer(self.packed_slots, _UINT32).astype(np.int64)

    @property
    def checksums(self) -> Checksums | None:
        """uint32 [num_blocks]; None if none were sent."""
        return None if self.packed_checksums is None else np.frombuffer(self.packed_checksums, _UINT32)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(BlocksHeader)


def encode_header(
    reservation: str,
    block_bytes: int,
    indices: Indices,
    slots: Indices,
    checksums: Checksums | None = None,
    part: int = 0,
) -> bytes:
    """The header frame; indices and slots are int64 of shape [num_blocks], each below 2**32."""
    packed_indices, packed_slots = (numbers.astype(_UINT32).tobytes() for numbers in (indices, slots))
    sums = None if checksums is None else checksums.astype(_UINT32).tobytes()
    header = BlocksHeader(MAGIC, WIRE_VERSION, reservation, block_bytes, packed_indices, packed_slots, sums, part)
    return _encoder.encode(header)


def decode_header(frame: bytes | memoryview) -> BlocksHeader:
    """The header of a message. Raises MalformedBlocks."""
    try:
        return _decoder.decode(frame)
    except DECODE_ERRORS as error:
        raise MalformedBlocks(f"header: {error}") from error
