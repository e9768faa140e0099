r"""Caches the token ids of pieces of text, most of which recur: instructions, the turns of a conversation, words.

A byte-level BPE tokenizer splits a text by a regular expression, and its model encodes each match separately. If a text
is cut

(a) before each space between two non-whitespace characters,
(b) before each space that is followed by an ASCII letter,
(c) after each ASCII letter that is followed by whitespace or one of `.,;:!?)"`,

the ids of its pieces are the ids of the text, provided that:

1. At each cut one match ends and the next begins, whatever follows. So no alternative of the expression matches a space
   and a non-whitespace character after anything else, or a letter and a character of (c). None looks ahead except
   `\s+(?!\S)`, for which the end of the text is the same as a space; it must come before `\s+`, which would take the
   space from the following word. An alternative for characters that are neither letter nor digit must exist, so that
   nothing after a cut remains unmatched.
2. The expression sees the text, and not the characters that represent its bytes.
3. No added token contains a cut, in any Unicode composition of its letters; none begins with a letter or digit (before
   such a token, (b) would change the end of the preceding text); none depends on its surroundings (`lstrip`, `rstrip`,
   `single_word`).
4. Normalization does not change the characters at a cut. NFC does not.
5. BPE is deterministic (no `dropout`), and the post-processor only adds tokens before and after the text.

`piece_cache_of` checks a tokenizer's parts against these conditions. A tokenizer with an unknown part gets no cache.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping
from itertools import chain, islice
from typing import Any
from unicodedata import normalize

import tokenizers

MAX_CHARS = 16_384
"""Maximum length of a text to cut into pieces: cutting holds the GIL, the tokenizer does not."""

MAX_PIECES = 1 << 16
"""Maximum cached pieces: about 20 MB for the words of a language, 65 MB for texts made to fill the cache."""

MAX_PIECE_CHARS, MAX_PIECE_IDS = 64, 16
"""Maximum size of a cached piece, in characters and in ids."""

WHOLE_SHARE, LEARNED_SHARE = 2, 8
"""A piece costs about twice as much by itself as within its text. So if more than 1/2 of a text's pieces are new, the
text is encoded as a whole, and new pieces up to 1/8 of all are encoded once more to fill the cache."""

_ENDS_WORD = r'\s.,;:!?)"'
_CUT = rf" [A-Za-z]|(?<=\S) \S|(?<=[A-Za-z])[{_ENDS_WORD}]"
PIECE = re.compile(rf" ?+[A-Za-z]++(?![^{_ENDS_WORD}])|.(?:[^{_ENDS_WORD}]+|(?!{_CUT}).)*", re.DOTALL)
"""Matches one piece: a word, which is the usual case, or everything up to the next cut. Python's `\\s` includes all
characters that `\\s` of other engines includes. A word is followed by one of `_ENDS_WORD` or the end of the text; `++`
and the negative look-ahead say so with the fewest steps."""

SPACES_BUT_LAST, SPACES = r"\s+(?!\S)", r"\s+"
SIGNS = frozenset(
    {
        *(r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]+[\r\n/]*"),
        r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
    }
)
ALTERNATIVES = frozenset(
    {
        *("'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "(?i:'s|'t|'re|'ve|'m|'ll|'d)", "'(?i:[sdmt]|ll|ve|re)"),
        *(r" ?\p{L}+", r"[^\r\n\p{L}\p{N}]?\p{L}+", r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"),
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        *(r"\p{N}", r"\p{N}{1,3}", r" ?\p{N}+"),
        *(r"\s*[\r\n]+", r"\s*[\r\n]", SPACES_BUT_LAST, SPACES, *SIGNS),
    }
)
"""The alternatives in the expressions of GPT-2, Llama 3, Qwen, GPT-4o, Mistral's Tekken and their derivatives."""


class PieceCache:
    """The ids of recent pieces. `encode` returns the ids of any text, as the tokenizer would. Thread-safe.

    New pieces are encoded in one call, joined by an added token that none of them contains, because a call for each
    would take several times as long. `separators` are the ids of such tokens by their text (see `_separators`).
    """

    def __init__(self, encode: Callable[[str], list[int]], separators: Mapping[str, int], capacity: int) -> None:
        self._encode = encode
        self._separators = separators
        self._capacity = capacity
        self._ids: dict[str, list[int]] = {}
        self._changing = threading.Lock()

    def __len__(self) -> int:
        return len(self._ids)

    def encode(self, text: str) -> list[int]:
        if len(text) > MAX_CHARS:
            return self._encode(text)
        pieces = PIECE.findall(text)
        found = list(map(self._ids.get, pieces))
        if None in found:
            new = list(dict.fromkeys(piece for piece, ids in zip(pieces, found, strict=True) if ids is None))
            if len(new) > len(pieces) // WHOLE_SHARE:
                if short := [piece for piece in new if len(piece) <= MAX_PIECE_CHARS]:
                    self._learn(short[: 1 + len(pieces) // LEARNED_SHARE])
                return self._encode(text)
            learned = self._learn(new)
            if learned is None:
                return self._encode(text)
            found = [learned[piece] if ids is None else ids for piece, ids in zip(pieces, found, strict=True)]
        return list(chain.from_iterable(found))  # type: ignore[arg-type]

    def _learn(self, pieces: list[str]) -> dict[str, list[int]] | None:
        """Encodes and caches at least one piece. Returns None if every separator occurs in the pieces, or if the ids of
        the pieces contain the separator's."""
        joined = "".join(pieces)
        separator = next((each for each in self._separators if each not in joined), None)
        if separator is None:
            return None
        ids = self._encode(separator.join(pieces))
        parts = _split(ids, self._separators[separator])
        if len(parts) != len(pieces):
            return None
        learned = dict(zip(pieces, parts, strict=True))
        self._remember(learned)
        return learned

    def _remember(self, learned: dict[str, list[int]]) -> None:
        short = {
            piece: ids for piece, ids in learned.items() if len(piece) <= MAX_PIECE_CHARS and len(ids) <= MAX_PIECE_IDS
        }
        with self._changing:
            self._ids.update(short)
            if len(self._ids) > self._capacity:  # drop the older half; pieces that recur soon return
                for piece in list(islice(self._ids, len(self._ids) - self._capacity // 2)):
                    del self._ids[piece]


def _split(ids: list[int], separator: int) -> list[list[int]]:
    parts, start = [], 0
    for _ in range(ids.count(separator)):
        end = ids.index(separator, start)
        parts.append(ids[start:end])
        start = end + 1
    return [*parts, ids[start:]]


def piece_cache_of(backend: tokenizers.Tokenizer, capacity: int = MAX_PIECES) -> PieceCache | None:
    """A cache for the tokenizer's texts, without the special tokens it adds; None if it breaks a condition above."""
    added = backend.get_added_tokens_decoder()
    separators = _separators(added)
    is_sound = (
        all(part["type"] == "NFC" for part in _members(backend.normalizer))
        and _is_sound_pre_tokenizer(backend.pre_tokenizer)
        and all(_is_sound_token(token) for token in added.values())
        and isinstance(backend.model, tokenizers.models.BPE)
        and not backend.model.dropout
        and added_around(backend) is not None
        and not backend.encode_special_tokens
    )
    if not (is_sound and separators):
        return None

    def encode(text: str) -> list[int]:
        (encoding,) = backend.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoding.ids
        return ids

    return PieceCache(encode, separators, capacity)


def added_around(backend: tokenizers.Tokenizer) -> tuple[list[int], list[int]] | None:
    """The special tokens that the tokenizer adds before and after each text; None if they may depend on the text."""
    steps = [part for part in _members(backend.post_processor) if part["type"] != "ByteLevel"]
    match steps:
        case []:
            return [], []
        case [{"type": "TemplateProcessing", "single": single, "special_tokens": special_tokens}]:
            items = [_ids_of(item, special_tokens) for item in single]
            if items.count(None) == 1:
                place = items.index(None)
                before, after = items[:place], items[place + 1 :]
                return [i for ids in before for i in ids or ()], [i for ids in after for i in ids or ()]
    return None


def _ids_of(item: dict[str, Any], special_tokens: dict[str, Any]) -> list[int] | None:
    """The ids of a template's item; None for the item that marks the text's position."""
    if "Sequence" in item:
        return None
    ids: list[int] = special_tokens[item["SpecialToken"]["id"]]["ids"]
    return ids


def _members(component: Any) -> list[dict[str, Any]]:
    """The steps of a tokenizer's component, in the form of `tokenizer.json`."""
    return [] if component is None else _flattened(json.loads(component.__getstate__()))


def _flattened(part: dict[str, Any]) -> list[dict[str, Any]]:
    for name in ("normalizers", "pretokenizers", "processors"):
        if name in part:
            return [member for each in part[name] for member in _flattened(each)]
    return [part]


def _is_sound_pre_tokenizer(component: Any) -> bool:
    """True if the first steps split at every cut of pieces. Later steps may split further or replace bytes."""
    is_cut = False
    for part in _members(component):
        match part:
            case {"type": "Digits"}:
                continue
            case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": bool(use_regex)}:
                is_cut = is_cut or use_regex
            case {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False}:
                is_cut = _is_sound_pattern(pattern)
            case _:
                return False
        if not is_cut:
            return False
    return is_cut


def _is_sound_pattern(pattern: str) -> bool:
    """True if all alternatives are known and their order satisfies condition 1."""
    alternatives = _alternatives(pattern)
    return (
        ALTERNATIVES.issuperset(alternatives)
        and not SIGNS.isdisjoint(alternatives)
        and SPACES in alternatives
        and SPACES_BUT_LAST in alternatives[: alternatives.index(SPACES)]
    )


def _alternatives(pattern: str) -> list[str]:
    """The top-level alternatives of an expression, without those inside groups."""
    alternatives, depth = [""], 0
    for char in pattern:
        depth += (char == "(") - (char == ")")
        if char == "|" and not depth:
            alternatives.append("")
        else:
            alternatives[-1] += char
    return alternatives


def _is_sound_token(token: tokenizers.AddedToken) -> bool:
    """True if the token satisfies condition 3 in every Unicode form, whatever follows it."""
    forms = token.content, normalize("NFC", token.content), normalize("NFD", token.content)
    looks_around = token.lstrip or token.rstrip or token.single_word
    return not looks_around and not any(
        content[:1].isalnum() or len(PIECE.findall(content + "x")) > 1 for content in forms
    )


def _separators(added: Mapping[int, tokenizers.AddedToken]) -> dict[str, int]:
    """Added tokens that the tokenizer finds at any position: they are not matched in normalized text, no longer token
    has them as a prefix, and no token contains their first character after its own first character."""
    contents = [token.content for token in added.values()]
    return {
        token.content: token_id
        for token_id, token in added.items()
        if not token.normalized
        and not any(token.content[:1] in content[1:] for content in contents)
        and not any(content != token.content and content.startswith(token.content) for content in contents)
    }
