"""Recorded messages between real processes of this version, and changes to them for fuzzers.

`python -m tests.fakes.traffic.record` records them again.
"""

from __future__ import annotations

import random
from base64 import b64decode
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

PATH = Path(__file__).with_name("traffic.jsonl")
VALUES: list[object] = [None, True, -1, 0, 1, 2**31, 2**63 - 1, 2**64 - 1, -(2**63), float("nan"), float("inf"), 1e308]
VALUES += ["", b"", [], {}, "x" * 2000, [0, 0], [-1], "tcp://127.0.0.1:1", b"\xff" * 7]
"""Values of any type, for fields of any other."""


class Recorded(msgspec.Struct, frozen=True):
    """The two frames of a message, and the name of its kind. Its sender is a worker if the header has a fingerprint."""

    kind: str
    header: bytes
    body: bytes


@cache
def recorded_traffic() -> tuple[Recorded, ...]:
    """All recorded messages, in the order of their kinds."""
    lines = [msgspec.json.decode(line) for line in PATH.read_bytes().splitlines()]
    return tuple(Recorded(line["kind"], b64decode(line["header"]), b64decode(line["body"])) for line in lines)


def places(tree: Any, trusted: frozenset[str] = frozenset()) -> Iterator[tuple[Any, Any]]:
    """All (container, key) of decoded msgpack, without the fields in `trusted`."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in list(items):
        if key not in trusted:
            yield tree, key
        yield from places(value, trusted)


def with_changed_field(frame: bytes, rng: random.Random, trusted: frozenset[str] = frozenset({"kind"})) -> bytes:
    """A frame in which a field at any depth is replaced, removed or doubled; never one of `trusted`."""
    tree = msgspec.msgpack.decode(frame)
    found = list(places(tree, trusted))
    if not found:
        return frame
    container, key = rng.choice(found)
    match rng.choice(["replace", "replace", "remove", "double"]):
        case "double" if isinstance(container[key], str | bytes | list):
            container[key] = container[key] * 2
        case "remove":
            del container[key]
        case _:
            container[key] = rng.choice(VALUES)
    return msgspec.msgpack.encode(tree)


def with_changed_bytes(frame: bytes, rng: random.Random) -> bytes:
    """A frame with up to three bytes removed and up to three others put in their place."""
    at, length = rng.randrange(len(frame) + 1), rng.randrange(4)
    return frame[:at] + rng.randbytes(rng.randrange(4)) + frame[at + length :]


def changed(frame: bytes, rng: random.Random) -> bytes:
    """A frame as it is, or with changed fields or bytes."""
    for _ in range(rng.choice([0, 1, 1, 1, 2])):
        try:
            frame = rng.choice([with_changed_field, with_changed_field, with_changed_bytes])(frame, rng)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):  # its bytes were changed before
            frame = with_changed_bytes(frame, rng)
    return frame
