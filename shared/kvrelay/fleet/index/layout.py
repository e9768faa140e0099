"""How the index lies in Redis and in its stream: sets of slots, batches of operations, events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import msgspec

from kvrelay.kv.hashing import HASH_BYTES, BlockHash

MAX_SLOTS = 2000
"""Ranges at a time, with those that wait to be swept. A set of slots then takes at most 251 bytes."""
MAX_BATCH_BLOCKS = 1000
"""Blocks that one script call may touch: scripts hold up everybody else."""
NUM_BUCKETS = 1 << 16
"""Blocks lie in hashes by their first two bytes, so that Redis keeps them in its compact form: about 30 bytes a block
where a key each takes 130."""

STORED = ord("+")
REMOVED = ord("-")


def index_base(prefix: str, model: str) -> str:
    """What all keys of a model's index begin with. The tag in braces puts them on one node of a Cluster."""
    return f"{prefix}:{{{quote(model, safe='/')}}}:index"


def decode_slots(value: bytes) -> int:
    """A block's value as an integer whose bit i is set where slot i holds the block."""
    return int.from_bytes(value[1:], "little") << (8 * value[0])


def decode_depths(answer: Sequence[Any]) -> dict[str, int]:
    """Of one chain, as lookup.lua says it: worker id to number of leading blocks."""
    return {worker.decode(): int(num) for worker, num in zip(answer[::2], answer[1::2], strict=True)}


# -- batches ----------------------------------------------------------------------------------------------------------

Run = tuple[int, Sequence[BlockHash]]
"""STORED or REMOVED, and hashes in order."""


def encode_operations(runs: Iterable[Run]) -> bytes:
    """Runs of at most 65,535 hashes each, in order."""
    parts: list[bytes] = []
    for operation, hashes in runs:
        parts.append(bytes((operation, len(hashes) >> 8, len(hashes) & 255)))
        parts += hashes
    return b"".join(parts)


def decode_operations(data: bytes) -> Iterator[Run]:
    """What `encode_operations` was given."""
    position = 0
    while position < len(data):
        operation, count = data[position], (data[position + 1] << 8) + data[position + 2]
        position += 3
        end = position + HASH_BYTES * count
        yield operation, [data[at : at + HASH_BYTES] for at in range(position, end, HASH_BYTES)]
        position = end


# -- the stream -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Opened:
    """A worker took a fresh slot: an empty range."""

    slot: int
    claim: str
    worker_id: str


@dataclass(frozen=True, slots=True)
class Retired:
    """A range ended; its bits are cleared later."""

    slot: int
    claim: str


@dataclass(frozen=True, slots=True)
class Batch:
    """A range's next operations."""

    slot: int
    claim: str
    seq: int
    operations: bytes


IndexEvent = Opened | Retired | Batch


def encode_batch(batch: Batch) -> bytes:
    """As the stream carries it."""
    return msgspec.msgpack.encode(("b", batch.slot, batch.claim, batch.seq, batch.operations))


def decode_event(data: bytes) -> IndexEvent:
    """An entry of the stream. Raises ValueError for what this version does not know."""
    try:
        match msgspec.msgpack.decode(data):
            case ["b", int(slot), str(claim), int(seq), bytes(operations)]:
                return Batch(slot, claim, seq, operations)
            case ["o", int(slot), str(claim), str(worker_id)]:
                return Opened(slot, claim, worker_id)
            case ["r", int(slot), str(claim)]:
                return Retired(slot, claim)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"no event of the index: {error}") from error
    raise ValueError("an event of an unknown kind")


def parse_id(stream_id: bytes | str) -> tuple[int, int]:
    """A stream id, comparable."""
    text = stream_id.decode() if isinstance(stream_id, bytes) else stream_id
    milliseconds, _, number = text.partition("-")
    return int(milliseconds), int(number or 0)
