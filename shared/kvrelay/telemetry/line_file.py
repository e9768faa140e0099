"""An append-only file of lines that contains only complete lines, even after a full disk or a crash."""

from __future__ import annotations

import errno
import logging
import os
from io import FileIO
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread

log = logging.getLogger(__name__)

TAIL_BYTES = 1 << 20
"""Maximum bytes of a line."""
MAX_WAITING_BYTES = 16 << 20
"""Bytes kept in memory while the disk is slow: minutes of a busy worker."""
CLOSE_TIMEOUT_S = 2.0
"""Maximum wait for the last lines when the process ends."""


class LineFile:
    """Drops lines that cannot be written and warns when dropping begins, since the lines are not worth failing the
    process or keeping them in memory. The next write completes a partly written line.

    Raises OSError if the file cannot be opened. An incomplete last line from a crash is removed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_cut_line(path)
        self._file = open_to_append(path)
        self._rest = b""  # rest of a partly written line
        self._is_failing = False
        self.num_lost_bytes = 0

    @property
    def is_closed(self) -> bool:
        return self._file.closed

    def write(self, lines: bytes | bytearray) -> None:
        """Writes lines, each with its newline."""
        data = self._rest + lines
        num_written = 0
        try:
            while num_written < len(data):
                num_written += self._file.write(memoryview(data)[num_written:])
        except OSError as error:
            if not self._is_failing:
                log.warning("%s cannot be written, lines are lost until it can: %s", self._path, error)
            self._is_failing = True
        else:
            self._is_failing = False
        is_cut = num_written > 0 and data[num_written - 1 : num_written] != b"\n"
        keep_to = data.find(b"\n", num_written) + 1 if is_cut else num_written
        if not num_written and self._rest:
            keep_to = len(self._rest)
        self._rest = data[num_written:keep_to]
        self.num_lost_bytes += len(data) - keep_to

    def close(self) -> None:
        """Closes the file. Idempotent."""
        self._file.close()


class BackgroundLines:
    """A `LineFile` written by a thread, so that `write` never waits for the disk.

    Up to `max_waiting_bytes` wait for a slow disk; further lines are dropped, with a warning when dropping begins. Call
    it on one thread. Raises like `LineFile`.
    """

    def __init__(self, path: Path, max_waiting_bytes: int = MAX_WAITING_BYTES) -> None:
        self._path = path
        self._file = LineFile(path)
        self._max_waiting_bytes = max_waiting_bytes
        self._waiting = bytearray()
        self._parts: SimpleQueue[bytearray | None] = SimpleQueue()
        self._is_idle = Event()  # the thread has written all that it was given
        self._is_idle.set()
        self._is_late = False
        self.is_closed = False
        # A daemon, because the interpreter waits for other threads at its end.
        self._thread = Thread(target=self._write_parts, name="lines", daemon=True)
        self._thread.start()

    def write(self, lines: bytes | bytearray) -> None:
        """Queues lines, each with its newline. Returns at once."""
        if len(self._waiting) + len(lines) <= self._max_waiting_bytes:
            self._waiting += lines
        elif not self._is_late:
            log.warning("%s is not written as fast as lines come: some are lost", self._path)
            self._is_late = True
        if self._is_idle.is_set():
            self._hand_over()

    def close(self) -> None:
        """Waits until all queued lines are written, for `CLOSE_TIMEOUT_S` at most. Idempotent."""
        if self.is_closed:
            return
        self.is_closed = True
        self._hand_over()
        self._parts.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            log.warning("%s takes no bytes: its last lines are lost", self._path)
        else:
            self._file.close()

    def _hand_over(self) -> None:
        self._is_idle.clear()
        self._parts.put(self._waiting)
        self._waiting, self._is_late = bytearray(), False

    def _write_parts(self) -> None:
        while (lines := self._parts.get()) is not None:
            self._file.write(lines)
            self._is_idle.set()


def open_to_append(path: Path) -> FileIO:
    """Opens a file to append, unbuffered. Raises OSError, also for a pipe without a reader."""
    # Without O_NONBLOCK the call would wait for a reader of the pipe, and with it the start of the process.
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        raise OSError(errno.ENXIO, "this pipe has no reader: start the reader first", str(path)) from error
    os.set_blocking(descriptor, True)
    return FileIO(descriptor, "ab")


def _remove_cut_line(path: Path) -> None:
    if not path.is_file():  # the file does not exist, or is a pipe or device
        return
    with path.open("rb") as file:
        start = max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES)
        file.seek(start)
        tail = file.read()
    if tail and not tail.endswith(b"\n"):
        os.truncate(path, start + tail.rfind(b"\n") + 1)
