"""Writes every event and every answer of the state machines to a file, one JSON line each, for `kvrelay replay`.

A line holds the time (`at`, unix seconds), the machine (`machine` is its kind, `key` its sequence, `number` tells
machines of one key apart), the event's class and fields, and the instructions or the error that it led to. The first
line of a machine has the event `born` and the constructor's arguments. Lines hold prompts and output as token ids.

Without a log nothing is wrapped, so it costs nothing. With one, the machine's `handle` is wrapped and nothing else, so
recording does not change which code runs. A line is encoded at once, because what it describes changes, and written by
a separate thread, so that a slow disk does not delay a step. If the process is killed, the last milliseconds are lost.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from kvrelay.background_writer import BackgroundWriter, open_to_append, write_all
from kvrelay.protocol.sequence_key import SequenceKey

EventT = TypeVar("EventT")
AnswerT = TypeVar("AnswerT")
Handle = Callable[[EventT], AnswerT]
"""Takes an event of a machine, and returns a list of instructions, or one object, or None. Both are plain data."""

log = logging.getLogger(__name__)

encoder = msgspec.json.Encoder(order="deterministic")
BORN = "born"
MAX_WAITING_BYTES = 64 << 20
CLOSE_TIMEOUT_S = 5.0
MAX_FILE_BYTES = 64 << 20
"""Size at which the file of a service is rotated."""


class Line(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One line. `event` is the event's class and `args` its fields; `out` are the instructions, `raised` the error."""

    at: float
    machine: str
    key: tuple[str, int, int]
    number: int
    event: str
    args: msgspec.Raw
    out: msgspec.Raw = msgspec.Raw(b"[]")
    raised: str = ""


def encode_answer(answer: object) -> bytes:
    """A list of JSON objects, one per instruction, each with the instruction's class as its only key."""
    instructions = answer if isinstance(answer, list) else [] if answer is None else [answer]
    return encoder.encode([{type(instruction).__name__: instruction} for instruction in instructions])


def recorded(
    log: EventLog | None, kind: str, key: SequenceKey, handle: Handle[EventT, AnswerT], *arguments: object
) -> Handle[EventT, AnswerT]:
    """The `handle` to use for a new machine: its own, or with a log one that records every call.

    `arguments` are those of the machine's constructor, from which `kvrelay replay` makes it again.
    """
    return handle if log is None else log.record(kind, key, handle, *arguments)


def open_event_log(path: Path | None, name: str) -> EventLog | None:
    """Opens the event log of the service `name`; None if there is no path. Raises OSError."""
    return None if path is None else EventLog(Path(str(path).replace("{name}", name)), MAX_FILE_BYTES)


class EventLog:
    """Appends to `path`. At `max_bytes` the file is renamed to `path.1`, which replaces an earlier one; a pipe is not.
    Raises OSError if `path` cannot be opened, or is a pipe without a reader.

    If the disk is behind by `MAX_WAITING_BYTES`, the log ends, because a log with gaps cannot be replayed.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._numbers = itertools.count(1)
        self._is_broken = False
        self._path = path
        self._file = open_to_append(path)
        self._max_bytes = max_bytes if path.is_file() else math.inf  # pipes and devices are not renamed
        self._size = path.stat().st_size
        self._writer = BackgroundWriter(self._write_lines, MAX_WAITING_BYTES, "event-log")

    def close(self) -> None:
        """Waits up to CLOSE_TIMEOUT_S for lines that are not written yet. Idempotent."""
        if self._writer.close(CLOSE_TIMEOUT_S):
            self._file.close()

    def record(
        self, kind: str, key: SequenceKey, handle: Handle[EventT, AnswerT], *arguments: object
    ) -> Handle[EventT, AnswerT]:
        """Returns a new machine's `handle`, wrapped so that each call becomes a line."""
        number = next(self._numbers)
        self._write(Line(at=time.time(), machine=kind, key=key, number=number, event=BORN, args=_raw(list(arguments))))

        def recording(event: EventT) -> AnswerT:
            line = Line(
                at=time.time(), machine=kind, key=key, number=number, event=type(event).__name__, args=_raw(event)
            )
            try:
                answer = handle(event)
            except Exception as error:
                line.raised = type(error).__name__
                self._write(line)
                raise
            line.out = msgspec.Raw(encode_answer(answer))
            self._write(line)
            return answer

        return recording

    def _write(self, line: Line) -> None:
        if not self._is_broken and not self._writer.put(encoder.encode(line) + b"\n"):
            self._end(f"the disk is {MAX_WAITING_BYTES >> 20} MiB behind")

    def _end(self, cause: object) -> None:
        self._is_broken = True
        log.error("the event log ends here: %s", cause)

    def _write_lines(self, lines: list[bytes]) -> None:
        """Runs on the writer's thread. Writes in as few calls as `max_bytes` allows."""
        if self._is_broken:
            return
        together: list[bytes] = []
        try:
            for line in lines:
                together.append(line)
                self._size += len(line)
                if self._size >= self._max_bytes:
                    write_all(self._file, b"".join(together))
                    self._rotate()
                    together = []
            write_all(self._file, b"".join(together))
        except OSError as error:
            self._end(error)

    def _rotate(self) -> None:
        self._file.close()
        self._path.replace(self._path.with_name(self._path.name + ".1"))
        self._file = open_to_append(self._path)
        self._size = 0


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(encoder.encode(value))
