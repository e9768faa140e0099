"""Encodes and decodes texts, knows the bytes of each token, and turns tokens into text incrementally.

A detokenizer withholds characters whose bytes are not complete yet. The algorithm depends on the tokenizer's decoder:
- Byte-level BPE: tokens are bytes, so an incremental UTF-8 decoder gives the exact text in linear time.
- Any other decoder depends on neighbouring tokens (leading spaces, runs of byte tokens), so a short window of tokens is
  decoded with and without the new token, and the difference is the new text. This is the algorithm of
  text-generation-inference.

Both process single tokens, so the text does not depend on how the tokens were cut into deltas.
"""

from __future__ import annotations

import os
import re
from codecs import utf_8_decode
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import tokenizers

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

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
"""Single texts come from our own threads, so the library's thread pool would only add a switch."""

BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
"""The token for a single byte in byte-fallback vocabularies."""

SENTENCE_SPACE = "\u2581"


def byte_level_alphabet() -> dict[str, int]:
    """The byte for each printable character that byte-level BPE writes (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return alphabet


BYTE_OF_CHAR = byte_level_alphabet()


Value = TypeVar("Value")


class _TokenTable(dict[int, Value]):
    """A value for each token id, filled on demand. Ids beyond the vocabulary are not kept.

    An entry takes about 150 bytes with its key and value.
    """

    def __init__(self, vocab_size: int, value_of: Callable[[int], Value]) -> None:
        super().__init__()
        self._vocab_size, self._value_of = vocab_size, value_of

    def __missing__(self, token_id: int) -> Value:
        value = self._value_of(token_id)
        if token_id < self._vocab_size:
            self[token_id] = value
        return value


@dataclass(frozen=True, slots=True)
class TokenTexts:
    """What each token is in an output: its bytes, and its text if these are whole characters, else None."""

    bytes_of: _TokenTable[bytes]
    text_of: _TokenTable[str | None]


def _whole_text(data: bytes) -> str | None:
    """Returns the text of bytes that begin and end between characters, else None."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


class Tokenizer:
    """Wraps a `tokenizers.Tokenizer`. Thread-safe.

    Only the library's batch calls release the GIL, so they are also used for single texts.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.byte_level = isinstance(backend.decoder, tokenizers.decoders.ByteLevel)
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._added = {token_id: token.content for token_id, token in added.items()}
        self.bytes_of = _TokenTable(self.vocab_size, self._bytes_of)
        # The texts of tokens that consist of whole characters, None for the others.
        self.text_of = _TokenTable(self.vocab_size, lambda token_id: _whole_text(self.bytes_of[token_id]))
        self._visible = {frozenset[int](): TokenTexts(self.bytes_of, self.text_of)}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        (encoding,) = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def encode_marked(self, text: str, *, add_special_tokens: bool) -> tuple[list[int], list[bool]]:
        """The token ids of a text, and a flag for each that is true if the tokenizer added it to the text."""
        (encoding,) = self.backend.encode_batch([text], add_special_tokens=add_special_tokens)
        return encoding.ids, [bool(mark) for mark in encoding.special_tokens_mask]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """The text of token ids. Ids beyond the vocabulary are skipped."""
        (text,) = self.backend.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)
        return str(text)

    def token_string(self, token_id: int) -> str:
        """The token as its vocabulary spells it, or an empty string for an id beyond the vocabulary."""
        return self.backend.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token, or none for an id beyond the vocabulary."""
        return self.bytes_of[token_id]

    def texts_without(self, hidden: frozenset[int]) -> TokenTexts:
        """The tables in which these tokens have no text. There are few such sets, and their tables are kept."""
        texts = self._visible.get(hidden)
        if texts is None:
            bytes_of = _TokenTable(self.vocab_size, lambda each: b"" if each in hidden else self.bytes_of[each])
            text_of = _TokenTable(self.vocab_size, lambda token_id: _whole_text(bytes_of[token_id]))
            texts = self._visible.setdefault(hidden, TokenTexts(bytes_of, text_of))
        return texts

    def added_id_of(self, text: str) -> int | None:
        """The added token that is spelled so."""
        token_id = self.backend.token_to_id(text)
        return token_id if token_id in self._added else None

    def special_ids_of(self, texts: Iterable[str]) -> frozenset[int]:
        """The special tokens among those that are spelled so."""
        ids = {self.backend.token_to_id(text) for text in texts}
        return self.special_ids & {each for each in ids if each is not None}

    def _bytes_of(self, token_id: int) -> bytes:
        token = self.token_string(token_id)
        if self.byte_level:
            spelled = [BYTE_OF_CHAR.get(char) for char in token]
            return token.encode() if None in spelled else bytes(byte for byte in spelled if byte is not None)
        if token_id in self._added:
            return token.encode()
        if match := BYTE_TOKEN.fullmatch(token):
            return bytes.fromhex(match[1])
        return token.replace(SENTENCE_SPACE, " ").encode()


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
