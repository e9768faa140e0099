"""The index in Redis: its script, and the encodings of slot sets, batches of operations and the stream's events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any
from urllib.parse import quote

import msgspec

from kvrelay.kv.hashing import HASH_BYTES, BlockHash

MAX_SLOTS = 2000
"""Maximum ranges, including those that wait to be swept. A slot set then takes at most 251 bytes."""
MAX_BATCH_BLOCKS = 1000
"""Maximum blocks per script call, since scripts block all other clients."""
NUM_BUCKETS = 1 << 16
"""Number of Redis hashes over which blocks are spread by their first two bytes. Small hashes use Redis' compact
encoding: about 30 bytes per block instead of 130 for a key per block."""

STORED = ord("+")
REMOVED = ord("-")


def index_base(prefix: str, model: str) -> str:
    """Prefix of all keys of a model's index. The tag in braces places them on one Cluster node."""
    return f"{prefix}:{{{quote(model, safe='/')}}}:index"


class IndexScripts:
    """The operations of index.lua on one blocking or asynchronous client. They are run by digest, and reloaded if a
    server does not know them (NOSCRIPT)."""

    def __init__(self, client: Any, base: str) -> None:
        self.base = base
        source = resources.files("kvrelay.fleet.index").joinpath("index.lua").read_text(encoding="utf-8")
        self._script = client.register_script(source)

    def run(self, operation: str, arguments: Sequence[Any] = ()) -> Any:
        """The answer, or an awaitable of it for an asynchronous client."""
        return self._script(keys=[self.base], args=[operation, *arguments])


def decode_slots(value: bytes) -> int:
    """Decodes a block's value to an integer whose bit i is set if slot i holds the block."""
    return int.from_bytes(value[1:], "little") << (8 * value[0])


# -- batches ----------------------------------------------------------------------------------------------------------

Run = tuple[int, Sequence[BlockHash]]
"""STORED or REMOVED, and hashes in order."""


def encode_operations(runs: Iterable[Run]) -> bytes:
    """Encodes runs of at most 65,535 hashes each, in order."""
    parts: list[bytes] = []
    for operation, hashes in runs:
        parts.append(bytes((operation, len(hashes) >> 8, len(hashes) & 255)))
        parts += hashes
    return b"".join(parts)


def decode_operations(data: bytes) -> Iterator[Run]:
    """Yields the runs given to `encode_operations`."""
    position = 0
    while position < len(data):
        operation, count = data[position], (data[position + 1] << 8) + data[position + 2]
        position += 3
        end = position + HASH_BYTES * count
        yield operation, [data[at : at + HASH_BYTES] for at in range(position, end, HASH_BYTES)]
        position = end


# -- the stream -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RangeOpened:
    """A worker opened a slot with an empty range."""

    slot: int
    range_id: str
    worker_id: str


@dataclass(frozen=True, slots=True)
class RangeRetired:
    """A range ended. Its bits are cleared later."""

    slot: int
    range_id: str


@dataclass(frozen=True, slots=True)
class Batch:
    """A range's next operations."""

    slot: int
    range_id: str
    seq: int
    operations: bytes


IndexEvent = RangeOpened | RangeRetired | Batch


def encode_batch(batch: Batch) -> bytes:
    """Encodes a batch as a stream entry."""
    return msgspec.msgpack.encode(("b", batch.slot, batch.range_id, batch.seq, batch.operations))


def decode_event(data: bytes) -> IndexEvent:
    """Decodes a stream entry. Raises ValueError for an unknown or invalid one."""
    try:
        match msgspec.msgpack.decode(data):
            case ["b", int(slot), str(range_id), int(seq), bytes(operations)]:
                return Batch(slot, range_id, seq, operations)
            case ["o", int(slot), str(range_id), str(worker_id)]:
                return RangeOpened(slot, range_id, worker_id)
            case ["r", int(slot), str(range_id)]:
                return RangeRetired(slot, range_id)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"invalid index event: {error}") from error
    raise ValueError("unknown kind of index event")


def parse_id(stream_id: bytes | str) -> tuple[int, int]:
    """A stream id as a comparable pair."""
    text = stream_id.decode() if isinstance(stream_id, bytes) else stream_id
    milliseconds, _, number = text.partition("-")
    return int(milliseconds), int(number or 0)
