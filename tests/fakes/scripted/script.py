"""A script of answers: a JSON list of rules, of which the first that fits a prompt determines the answer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

NO_RULE = "No rule of the script fits this prompt."


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Fits a prompt in whose text each of these expressions is found. `newest`: found behind the last begin of a turn
    of the user or of a tool, so an earlier turn does not count."""

    answer: str
    when: tuple[str, ...] = ()
    newest: tuple[str, ...] = ()

    def fits(self, prompt: str, newest: str) -> bool:
        return all(re.search(each, prompt) for each in self.when) and all(
            re.search(each, newest) for each in self.newest
        )


class Script:
    """`turn`: the text that begins the turns that are answered."""

    def __init__(self, rules: Sequence[Rule], turn: str) -> None:
        self._rules, self._turn = rules, turn

    @classmethod
    def read(cls, path: Path, turn: str) -> Script:
        """Raises msgspec.DecodeError, OSError."""
        return cls(msgspec.json.decode(path.read_bytes(), type=list[Rule]), turn)

    def answer(self, prompt: str) -> str:
        newest = prompt[max(0, prompt.rfind(self._turn)) :]
        return next((rule.answer for rule in self._rules if rule.fits(prompt, newest)), NO_RULE)
