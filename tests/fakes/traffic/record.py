"""Records what processes send each other in the component tests: a few messages of each kind.

Run as `python -m tests.fakes.traffic.record`, after the protocol has changed.
"""

from __future__ import annotations

import sys
from base64 import b64encode
from collections import defaultdict
from unittest.mock import patch

import msgspec
import pytest

from kvrelay.protocol.link import Links
from tests.fakes.traffic import PATH, places

SOURCES = (
    "tests/component/workers/test_handoff.py",
    "tests/component/workers/test_transfer_faults.py",
    "tests/component/workers/test_samples.py",
    "tests/component/workers/test_beams.py",
    "tests/component/workers/test_departures.py",
    "tests/component/dispatch/test_requests.py",
    "tests/component/dispatch/test_failures.py",
    "tests/component/messaging/test_messenger.py",
)
NUM_OF_A_KIND = 8
MAX_BYTES = 1500


IDENTITIES = {"machine": "0" * 32, "process": "boot:pid:[1]/2/3"}
"""Fields that name the machine of the recording, and what is recorded in their place."""


class Recorder:
    """Keeps, of each kind, the smallest message with each set of fields."""

    def __init__(self) -> None:
        self.found: defaultdict[str, dict[frozenset[str], tuple[bytes, bytes]]] = defaultdict(dict)

    def take(self, frames: list[bytes]) -> None:
        header, body, *tokens = frames
        tree = msgspec.msgpack.decode(body)
        if tokens:
            tree["prompt"]["tokens"] = tokens[0]
        for container, key in places(tree):
            if key in IDENTITIES and container[key]:
                container[key] = IDENTITIES[key]
        body = msgspec.msgpack.encode(tree)
        fields = frozenset(str(key) for _, key in places(tree) if isinstance(key, str))
        kept = self.found[tree["kind"]]
        if fields not in kept or len(body) < len(kept[fields][1]):
            kept[fields] = header, body

    def lines(self) -> list[bytes]:
        """The messages with the most fields of each kind, as lines of the file."""
        lines = []
        for kind, kept in sorted(self.found.items()):
            ordered = sorted(kept.items(), key=lambda item: (-len(item[0]), sorted(item[0])))
            fitting = [frames for _, frames in ordered if len(frames[1]) <= MAX_BYTES]
            for header, body in fitting[:NUM_OF_A_KIND]:
                line = {"kind": kind, "header": b64encode(header).decode(), "body": b64encode(body).decode()}
                lines.append(msgspec.json.encode(line))
        return lines


def record() -> int:
    recorder, take_outgoing = Recorder(), Links.take_outgoing

    def taken(links: Links) -> list[tuple[str, list[bytes]]]:
        outgoing = take_outgoing(links)
        for _, frames in outgoing:
            recorder.take(frames)
        return outgoing

    with patch.object(Links, "take_outgoing", taken):
        status = pytest.main(["-q", "-x", *SOURCES])
    if not status:
        PATH.write_bytes(b"\n".join(recorder.lines()) + b"\n")
    return int(status)


if __name__ == "__main__":
    sys.exit(record())
