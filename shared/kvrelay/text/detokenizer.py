"""Turns tokens into text incrementally, and withholds characters whose bytes are not complete yet.

The algorithm depends on the tokenizer's decoder:
- Byte-level BPE: tokens are bytes, so an incremental UTF-8 decoder gives the exact text in linear time.
- Any other decoder depends on neighbouring tokens (leading spaces, runs of byte tokens), so a short window of tokens is
  decoded with and without the new token, and the difference is the new text. This is the algorithm of
  text-generation-inference.

Both process single tokens, so the text does not depend on how the tokens were cut into deltas.
"""

from __future__ import annotations

from codecs import utf_8_decode
from typing import Protocol

from kvrelay.text.tokenizer import Tokenizer

CONTEXT_TOKENS = 6
"""Prompt tokens in the first window, because the text of the first output token may depend on them."""

MAX_WITHHELD_TOKENS = 8
"""A character has at most four bytes. Bytes that are incomplete after twice as many tokens will not become one."""

MAX_SILENT_TOKENS = 32
"""Maximum tokens without text in the window, such as skipped special tokens."""

REPLACEMENT = "\ufffd"

MAX_CONTINUATION_BYTES = 3
CONTINUATION_BYTES = frozenset(bytes([byte]) for byte in range(0x80, 0xC0))
"""The bytes of a UTF-8 character after its first. Only a token for such a byte begins with one."""


class Detokenizer(Protocol):
    """Decodes one sequence while it grows."""

    def feed(self, token_ids: list[int]) -> str:
        """Returns the text that these tokens complete."""
        ...

    def flush(self) -> str:
        """Returns the withheld text, with incomplete bytes as U+FFFD. Call it once, at the end."""
        ...


class ByteLevelDetokenizer:
    """Decodes byte-level BPE exactly, in time linear in the number of bytes."""

    def __init__(self, tokenizer: Tokenizer, *, hidden: frozenset[int]) -> None:
        """`hidden`: tokens without text."""
        texts = tokenizer.texts_without(hidden)
        self._bytes_of = texts.bytes_of.__getitem__
        self._text_of = texts.text_of
        self._withheld = b""

    def feed(self, token_ids: list[int]) -> str:
        if not self._withheld and len(token_ids) == 1:
            text = self._text_of[token_ids[0]]
            if text is not None:
                return text
        data = self._withheld + b"".join(map(self._bytes_of, token_ids))
        text, num_bytes = utf_8_decode(data, "replace", False)
        self._withheld = data[num_bytes:]
        return text

    def flush(self) -> str:
        withheld, self._withheld = self._withheld, b""
        return withheld.decode("utf-8", "replace")


class WindowedDetokenizer:
    """Decodes with any other decoder, over a window that advances whenever text is complete."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: list[int], *, hidden: frozenset[int]) -> None:
        """`hidden`: tokens without text."""
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._skips_special = bool(hidden) and hidden == tokenizer.special_ids
        self._window = prompt_ids[_window_start(tokenizer, prompt_ids) :]
        self._num_read = len(self._window)  # tokens of the window whose text was returned
        self._read_text = self._decode(self._window)

    def feed(self, token_ids: list[int]) -> str:
        return "".join([self._feed_one(token_id) for token_id in token_ids])

    def _feed_one(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        withheld = len(self._window) - self._num_read
        if text.endswith(REPLACEMENT) and withheld < MAX_WITHHELD_TOKENS:
            return ""
        return self._advance(text)

    def flush(self) -> str:
        if len(self._window) == self._num_read:
            return ""
        return self._advance(self._decode(self._window))

    def _advance(self, text: str) -> str:
        """Returns the new text and starts the window at its tokens."""
        new_text = text[len(self._read_text) :]
        self._window = self._window[self._num_read :] if new_text else self._window[-MAX_SILENT_TOKENS:]
        self._num_read = len(self._window)
        self._read_text = self._decode(self._window)
        return new_text

    def _decode(self, token_ids: list[int]) -> str:
        if self._hidden and not self._skips_special:
            token_ids = [each for each in token_ids if each not in self._hidden]
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skips_special)


def _window_start(tokenizer: Tokenizer, prompt_ids: list[int]) -> int:
    """The window must not begin within a character spelled in bytes, because decoders reject such a run of bytes."""
    start = max(0, len(prompt_ids) - CONTEXT_TOKENS)
    first = max(0, start - MAX_CONTINUATION_BYTES)
    while start > first and tokenizer.token_bytes(prompt_ids[start])[:1] in CONTINUATION_BYTES:
        start -= 1
    return start


def make_detokenizer(
    tokenizer: Tokenizer, prompt_ids: list[int], *, skip_special_tokens: bool, shown: frozenset[int] = frozenset()
) -> Detokenizer:
    """Returns the detokenizer for a sequence that follows this prompt. `shown`: special tokens that have text even if
    the others are skipped."""
    hidden = tokenizer.special_ids - shown if skip_special_tokens else frozenset[int]()
    if tokenizer.byte_level:
        return ByteLevelDetokenizer(tokenizer, hidden=hidden)
    return WindowedDetokenizer(tokenizer, prompt_ids, hidden=hidden)
