"""Text that a call brought beyond what its `gen` asked for, and that later steps may use (API speculation, section 5 of
Zheng et al., "SGLang: Efficient Execution of Structured Language Model Programs", 2024).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvrelay_programs.results import Generated

DEFAULT_MAX_TOKENS = 16
"""Of a text completion; a chat without `max_tokens` has the rest of the context."""
_LIMITS = ("max_tokens", "stop")
_SAMPLING = frozenset(
    ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "seed")
)


@dataclass(frozen=True, slots=True)
class Surplus:
    """`ends` has the number of characters up to the end of each token. With `is_complete` the model has ended behind
    the text; otherwise the text was cut.
    """

    text: str = ""
    ends: tuple[int, ...] = ()
    is_complete: bool = False

    def behind(self, constant: str) -> Surplus | None:
        """Returns the rest behind `constant`; None if the model went on with another text."""
        if not self.text.startswith(constant):
            return None
        return self._from(len(constant))

    def generated(self, stop: Sequence[str], max_tokens: int | None) -> tuple[str, str, Surplus] | None:
        """Text, finish reason and what is left of a `gen` with these limits; None if the text is too short to know.

        Tokens are counted from the beginning of the text. A token that a constant has divided counts as one.
        """
        for number, end in enumerate(self.ends, start=1):
            found = [at for each in stop if (at := self.text.find(each, 0, end)) >= 0]
            if found:
                return self.text[: min(found)], "stop", self._from(min(found))
            if number == max_tokens:
                return self.text[:end], "length", self._from(end)
        return (self.text, "stop", self._from(len(self.text))) if self.is_complete else None

    def _from(self, num_chars: int) -> Surplus:
        ends = tuple(end - num_chars for end in self.ends if end > num_chars)
        return Surplus(self.text[num_chars:], ends, self.is_complete)


def sampling_of(fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """The fields of a call without its limits; None if its text cannot be taken from a longer one."""
    rest = {name: value for name, value in fields.items() if name not in _LIMITS}
    return rest if rest.keys() <= _SAMPLING else None


def surplus_of(answer: Generated, *, is_chat: bool) -> Surplus | None:
    """The text of an answer with the ends of its tokens; None if the endpoint gave no log-probabilities."""
    if answer.logprobs is None:
        return None
    length = len(answer.text)
    if is_chat:
        ends, read = [], b""
        for token in answer.logprobs["content"]:
            read += bytes(token["bytes"] or token["token"].encode())
            ends.append(min(length, len(read.decode(errors="ignore"))))
    else:
        ends = [min(length, offset) for offset in answer.logprobs["text_offset"][1:]] + [length]
    return Surplus(answer.text, tuple(ends), is_complete=answer.finish_reason == "stop")
