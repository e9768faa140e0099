"""A stranger that speaks just enough of ZMTP 3.0, without CURVE, to announce a frame of any size."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from tests.fakes.waiting import PATIENCE_S

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_PROPERTIES = b"\x05READY" + b"\x0bSocket-Type" + b"\x00\x00\x00\x04PUSH"
READY = bytes([4, len(_PROPERTIES)]) + _PROPERTIES
LARGE_FRAME = b"\x02"


async def until_closed_after_announcing(address: str, num_bytes: int) -> None:
    """Returns when the receiver at tcp://HOST:PORT has closed the connection, although only the length of a frame of
    this many bytes has come."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(GREETING + READY + LARGE_FRAME + num_bytes.to_bytes(8, "big"))
        async with asyncio.timeout(PATIENCE_S):
            with suppress(ConnectionError):
                while await reader.read(1 << 16):
                    pass
    finally:
        writer.close()
