"""Shortens what others wrote, such as values of requests and messages of libraries, for messages of our own."""

from __future__ import annotations

import reprlib

MAX_VALUE_CHARS = 100
MAX_TEXT_CHARS = 600

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxlong = _REPR.maxother = MAX_VALUE_CHARS
_REPR.maxlevel = 2  # a deeper value shows `...`, however deep it is


def quoted(value: object) -> str:
    """The value as Python writes it, in at most `MAX_VALUE_CHARS` characters."""
    return shortened(_REPR.repr(value), MAX_VALUE_CHARS)


def shortened(text: str, max_chars: int = MAX_TEXT_CHARS) -> str:
    """The text. Of a longer one its beginning and its end."""
    if len(text) <= max_chars:
        return text
    num_last = max_chars // 4
    return f"{text[: max_chars - num_last - 5]} ... {text[-num_last:]}"
