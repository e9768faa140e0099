"""A log handler whose lines a thread writes, so a pipe, terminal or disk that takes none delays nothing else."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import TextIO

MAX_WAITING_CHARS = 4 << 20
"""Characters kept in memory while nothing can be written. Further lines are counted and dropped."""
FLUSH_TIMEOUT_S = 2.0
"""Maximum wait for the last lines when the process ends."""


class BackgroundHandler(logging.Handler):
    """Writes to a text stream, or to its file descriptor if it has one. `flush` and `close` wait until all lines are
    written, but not for ever."""

    def __init__(self, stream: TextIO, max_waiting_chars: int = MAX_WAITING_CHARS) -> None:
        super().__init__()
        self._write = _writer_of(stream)
        self._max_waiting_chars = max_waiting_chars
        self._lines: SimpleQueue[str | threading.Event | None] = SimpleQueue()
        # Each of these numbers has one writer, so their difference needs no lock: `emit` runs under the handler's.
        self._num_put = 0
        self._num_written = 0
        self._num_lost = 0
        self._thread = threading.Thread(target=self._write_lines, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Returns at once."""
        try:
            line = self.format(record) + "\n"
        except Exception:
            self.handleError(record)
            return
        if self._num_put - self._num_written + len(line) > self._max_waiting_chars:
            self._num_lost += 1
            return
        if self._num_lost:
            line = f"{self._num_lost} log lines were lost: they could not be written in time\n{line}"
            self._num_lost = 0
        self._num_put += len(line)
        self._lines.put(line)

    def flush(self) -> None:
        """Waits until all lines are written, `FLUSH_TIMEOUT_S` at most."""
        if self._thread.is_alive():
            written = threading.Event()
            self._lines.put(written)
            written.wait(FLUSH_TIMEOUT_S)

    def close(self) -> None:
        """Ends the thread once all lines are written. Idempotent."""
        self._lines.put(None)
        self._thread.join(FLUSH_TIMEOUT_S)
        super().close()

    def _write_lines(self) -> None:
        while (item := self._lines.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            with suppress(OSError, ValueError):  # the reader is gone, or the stream is closed
                self._write(item)
            self._num_written += len(item)


def _writer_of(stream: TextIO) -> Callable[[str], None]:
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):  # the stream is in memory

        def write(text: str) -> None:
            stream.write(text)
            stream.flush()
    else:
        # A thread that waits in `stream.write` would keep the stream's lock, which the interpreter takes at its end.
        def write(text: str) -> None:
            data = text.encode(errors="backslashreplace")
            while data:
                data = data[os.write(descriptor, data) :]

    return write
