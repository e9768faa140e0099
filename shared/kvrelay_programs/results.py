"""Results of a program's calls, before and after they are complete, and the text of a state as it arrives."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from kvrelay_programs.errors import ProgramError


@dataclass(frozen=True, slots=True)
class Generated:
    """Output of a `gen`. `usage` and `logprobs` have the endpoint's form; `reasoning` stands before the text."""

    text: str
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    logprobs: Any = None
    reasoning: str | None = None


@dataclass(slots=True)
class Usage:
    """What a run has asked of the endpoint so far, in calls and tokens. `cached_tokens` are those of prompts that the
    endpoint found in its cache; 0 if it does not say.
    """

    calls: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    def add(self, usage: Mapping[str, Any] | None) -> None:
        """Adds a call with the usage of its answer."""
        self.calls += 1
        if usage is not None:
            self.prompt_tokens += usage.get("prompt_tokens") or 0
            self.completion_tokens += usage.get("completion_tokens") or 0
            self.cached_tokens += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


@dataclass(frozen=True, slots=True)
class ChoiceScore:
    """Log-likelihood of a choice behind the text before it. `score` is `total` after normalization."""

    choice: str
    total: float
    num_tokens: int
    score: float


@dataclass(frozen=True, slots=True)
class Selected:
    """Result of a `select`: the choice with the highest score, and all scores in the order of the choices."""

    text: str
    scores: tuple[ChoiceScore, ...]


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
