"""Tokens to text, one token at a time, withholding characters whose bytes are not complete yet.

Two ways, after what the tokenizer's decoder does:
- Byte-level BPE: tokens are bytes, so an incremental UTF-8 decoder gives the text exactly, at the cost of its bytes.
- Any other decoder sees its neighbours (leading spaces, runs of byte tokens), so a short window of tokens is decoded
  with and without the new token, and the difference is the new text (the algorithm of text-generation-inference).

Both take tokens one by one, so the text does not depend on how the tokens were cut into deltas.
"""

from __future__ import annotations

from codecs import utf_8_decode
from typing import Protocol

from kvrelay_router.text.tokenizer import Tokenizer

CONTEXT_TOKENS = 6
"""Prompt tokens that the windowed way keeps in view, so that the first token knows its left neighbours."""

MAX_WITHHELD_TOKENS = 8
"""A character has at most four bytes; whatever is incomplete after twice that many tokens is not going to be one."""

MAX_SILENT_TOKENS = 32
"""How far back the window reaches over tokens without text, such as skipped special tokens."""

REPLACEMENT = "\ufffd"

MAX_CONTINUATION_BYTES = 3
CONTINUATION_BYTES = frozenset(bytes([byte]) for byte in range(0x80, 0xC0))
"""Those of a UTF-8 character after its first. No other token than that of such a byte begins with one."""


class Detokenizer(Protocol):
    """The text of one sequence as it grows."""

    def feed(self, token_ids: list[int]) -> str:
        """Text that became certain with these tokens."""
        ...

    def flush(self) -> str:
        """What was withheld; incomplete bytes as U+FFFD. Call once, at the end."""
        ...


class ByteLevelDetokenizer:
    """For byte-level BPE: exact, and linear in the number of bytes."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._bytes_of = (tokenizer.visible_bytes_of if skip_special_tokens else tokenizer.bytes_of).__getitem__
        self._withheld = b""

    def feed(self, token_ids: list[int]) -> str:
        """Text that became certain with these tokens."""
        data = self._withheld + b"".join(map(self._bytes_of, token_ids))
        text, num_bytes = utf_8_decode(data, "replace", False)
        self._withheld = data[num_bytes:]
        return text

    def flush(self) -> str:
        """What was withheld; incomplete bytes as U+FFFD."""
        withheld, self._withheld = self._withheld, b""
        return withheld.decode("utf-8", "replace")


class WindowedDetokenizer:
    """For every other decoder: decodes a window that moves on with each piece of complete text."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: list[int], *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window = prompt_ids[_window_start(tokenizer, prompt_ids) :]
        self._num_read = len(self._window)  # tokens of the window whose text is out
        self._read_text = self._decode(self._window)

    def feed(self, token_ids: list[int]) -> str:
        """Text that became certain with these tokens."""
        return "".join([self._feed_one(token_id) for token_id in token_ids])

    def _feed_one(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        withheld = len(self._window) - self._num_read
        if text.endswith(REPLACEMENT) and withheld < MAX_WITHHELD_TOKENS:
            return ""
        return self._move_on(text)

    def flush(self) -> str:
        """What was withheld; incomplete bytes as U+FFFD."""
        if len(self._window) == self._num_read:
            return ""
        return self._move_on(self._decode(self._window))

    def _move_on(self, text: str) -> str:
        """The window now starts at the tokens that this text came from."""
        new_text = text[len(self._read_text) :]
        self._window = self._window[self._num_read :] if new_text else self._window[-MAX_SILENT_TOKENS:]
        self._num_read = len(self._window)
        self._read_text = self._decode(self._window)
        return new_text

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)


def _window_start(tokenizer: Tokenizer, prompt_ids: list[int]) -> int:
    """Not within a character that is spelled in bytes: decoders take none of a run of bytes that begins like this."""
    start = max(0, len(prompt_ids) - CONTEXT_TOKENS)
    first = max(0, start - MAX_CONTINUATION_BYTES)
    while start > first and tokenizer.token_bytes(prompt_ids[start])[:1] in CONTINUATION_BYTES:
        start -= 1
    return start


def make_detokenizer(tokenizer: Tokenizer, prompt_ids: list[int], *, skip_special_tokens: bool) -> Detokenizer:
    """The detokenizer for a sequence that follows this prompt."""
    if tokenizer.byte_level:
        return ByteLevelDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    return WindowedDetokenizer(tokenizer, prompt_ids, skip_special_tokens=skip_special_tokens)
