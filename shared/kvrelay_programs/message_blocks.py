"""The blocks of messages that a program's state has, whether it runs or is traced."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

from kvrelay_programs.expressions import Role


class MessageBlocks(ABC):
    @contextmanager
    def system(self) -> Iterator[None]:
        """Content appended inside becomes a message of the system."""
        yield from self._block("system")

    @contextmanager
    def user(self) -> Iterator[None]:
        """Content appended inside becomes a message of the user."""
        yield from self._block("user")

    @contextmanager
    def assistant(self) -> Iterator[None]:
        """Content appended inside becomes a message of the assistant."""
        yield from self._block("assistant")

    @abstractmethod
    def _block(self, role: Role) -> Iterator[None]:
        """Opens a message, yields once, and closes it."""
