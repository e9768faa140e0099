"""Encodes and decodes texts, and knows the bytes of each token."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import tokenizers

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
