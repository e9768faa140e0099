"""Writes bytes on a thread, so that a pipe, terminal or disk that takes none delays nothing else."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread


class BackgroundWriter:
    """Passes what `put` gets to `write`, in order, all waiting parts at once. `write` must raise nothing. Call the
    methods on one thread, or under a lock."""

    def __init__(self, write: Callable[[list[bytes]], None], max_waiting_bytes: int, name: str) -> None:
        self.max_waiting_bytes = max_waiting_bytes
        self._write = write
        self._parts: SimpleQueue[bytes | Event | None] = SimpleQueue()
        # Each of these numbers has one writer, so their difference needs no lock.
        self._num_put = 0
        self._num_written = 0
        # A daemon, because the interpreter waits for other threads at its end.
        self._thread = Thread(target=self._write_parts, name=name, daemon=True)
        self._thread.start()

    @property
    def num_waiting_bytes(self) -> int:
        return self._num_put - self._num_written

    def put(self, data: bytes) -> bool:
        """Queues data and returns at once: False, without queueing it, if more than `max_waiting_bytes` would wait."""
        if self.num_waiting_bytes + len(data) > self.max_waiting_bytes:
            return False
        self._num_put += len(data)
        self._parts.put(data)
        return True

    def flush(self, timeout_s: float) -> None:
        """Waits until everything is written, `timeout_s` at most."""
        if self._thread.is_alive():
            written = Event()
            self._parts.put(written)
            written.wait(timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Ends the thread once everything is written. Returns False if `timeout_s` was too short. Idempotent."""
        self._parts.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _write_parts(self) -> None:
        is_last = False
        while not is_last:
            waiting = [self._parts.get(), *(self._parts.get_nowait() for _ in range(self._parts.qsize()))]
            data = [part for part in waiting if isinstance(part, bytes)]
            if data:
                self._write(data)
                self._num_written += sum(map(len, data))
            for part in waiting:
                if isinstance(part, Event):
                    part.set()
            is_last = None in waiting


def write_all(file: FileIO, data: bytes) -> None:
    """Writes all of the data. Raises OSError."""
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def open_to_append(path: Path) -> FileIO:
    """Opens a file to append, unbuffered, and makes its directory. Raises OSError, also for a pipe without a reader."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without O_NONBLOCK the call would wait for a reader of the pipe, and with it the start of the process.
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        raise OSError(errno.ENXIO, "this pipe has no reader: start the reader first", str(path)) from error
    os.set_blocking(descriptor, True)
    return FileIO(descriptor, "ab")
