"""A value that a call will bring, and the text of a state as it arrives."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future

from kvrelay_programs.errors import ProgramError
from kvrelay_programs.results import Generated, Selected


class Value:
    """Set on the program loop, read in any other thread."""

    def __init__(self) -> None:
        self.result: Future[Generated | Selected] = Future()

    def __str__(self) -> str:
        if not self.result.done():
            return "pending"
        return "failed" if self.result.exception() is not None else repr(self.result.result().text)

    def set(self, result: Generated | Selected) -> None:
        self.result.set_result(result)

    def fail(self, error: ProgramError) -> None:
        if not self.result.done():
            self.result.set_exception(error)


class TextFeed:
    """Pieces of a state's text in their order, each with the name of the value it belongs to (None: constant text)."""

    def __init__(self) -> None:
        self._pieces: list[tuple[str | None, str]] = []
        self._error: ProgramError | None = None
        self._is_complete = False
        self._changed = threading.Condition()

    def add(self, name: str | None, text: str) -> None:
        with self._changed:
            self._pieces.append((name, text))
            self._changed.notify_all()

    def complete(self, error: ProgramError | None = None) -> None:
        """Ends the text. Readers get `error` behind it."""
        with self._changed:
            self._is_complete, self._error = True, self._error or error
            self._changed.notify_all()

    def pieces(self) -> Iterator[tuple[str | None, str]]:
        """From the first piece on, until the text is complete. Raises ProgramError if the program fails."""
        position = 0
        while True:
            with self._changed:
                while len(self._pieces) == position and not self._is_complete:
                    self._changed.wait()
                new, error = self._pieces[position:], self._error
            if not new:
                if error is not None:
                    raise error
                return
            position += len(new)
            yield from new
