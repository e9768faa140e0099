r"""Token ids of a text by its pieces, most of which were seen before: instructions, a conversation's turns, and words.

A tokenizer of byte-level BPE cuts a text by a regular expression, and its model sees one match after the other. Cut

(a) before each space between two characters that are no whitespace,
(b) before each space that stands before a letter of ASCII,
(c) behind a letter of ASCII before whitespace or one of `.,;:!?)"`,

a text gives the ids that it gives as a whole, where:

1. no alternative of the expression matches a space and something that is no whitespace after anything else, or what (c)
   names after a letter; none looks ahead but `\s+(?!\S)`, to which the text's end is what a space is; that comes before
   `\s+`, which would take a space from the word behind it; and with one for what is neither letter nor digit they leave
   nothing behind a cut unmatched: so at each cut one match ends and the next begins, whatever is beyond,
2. the expression sees the text, and not the characters that stand for its bytes,
3. no added token spans a cut, however its letters are composed, none begins with a letter or digit (before one, (b)
   would cut off what is the end of a text of its own), and none looks at its surroundings (`lstrip`, `rstrip`,
   `single_word`),
4. normalization leaves the characters about a cut alone, as NFC does,
5. BPE leaves nothing to chance (`dropout`), and what comes after it adds tokens before and behind, and no more.

`memory_of` holds a tokenizer against this by its parts; one of which not all is known has no memory.
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
"""Of a text: the way of the pieces keeps the GIL, that of the tokenizer does not."""

MAX_PIECES = 1 << 16
"""Of a language's words about 20 MB; of what is chosen to fill it, 65 MB."""

MAX_PIECE_CHARS, MAX_PIECE_IDS = 64, 16
"""Of one that is remembered."""

WHOLE_SHARE, LEARNED_SHARE = 2, 8
"""A piece of its own takes about twice what it takes within its text: where half of a text's are new, the text is
encoded as a whole, and of the new ones as many as are an eighth of all once more, to be remembered."""

_ENDS_WORD = r'\s.,;:!?)"'
_CUT = rf" [A-Za-z]|(?<=\S) \S|(?<=[A-Za-z])[{_ENDS_WORD}]"
PIECE = re.compile(rf" ?[A-Za-z]+(?=[{_ENDS_WORD}]|\Z)|.(?:[^{_ENDS_WORD}]+|(?!{_CUT}).)*", re.DOTALL)
"""Its matches are the pieces: a word, which is the usual case, or whatever there is up to the next cut. Python's `\\s`
has all that other engines' have."""

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
"""Those of GPT-2, Llama 3, Qwen, GPT-4o and Mistral's Tekken, and of many that took theirs over."""


class PieceMemory:
    """Ids of the pieces seen last. `encode`: of any text, as the tokenizer gives them. Safe in threads.

    `separators`: added tokens with their ids, as `_separators` finds them. Between pieces that are encoded together
    stands one of them that none of them has: a call for each would take several times as long.
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
        """Token ids of a text."""
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
        """At least one. None where no separator parts them: all are in the text, or it has one's id without it."""
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
            if len(self._ids) > self._capacity:  # the older half: what recurs is soon back
                for piece in list(islice(self._ids, len(self._ids) - self._capacity // 2)):
                    del self._ids[piece]


def _split(ids: list[int], separator: int) -> list[list[int]]:
    parts, start = [], 0
    for _ in range(ids.count(separator)):
        end = ids.index(separator, start)
        parts.append(ids[start:end])
        start = end + 1
    return [*parts, ids[start:]]


def memory_of(backend: tokenizers.Tokenizer, capacity: int = MAX_PIECES) -> PieceMemory | None:
    """Of this tokenizer's texts, without the special tokens that it adds; None where it may not have one."""
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

    return PieceMemory(encode, separators, capacity)


def added_around(backend: tokenizers.Tokenizer) -> tuple[list[int], list[int]] | None:
    """The special tokens that it adds before and after each text; None where they may depend on the text."""
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
    """Of a special token of a template; None for the text's place."""
    if "Sequence" in item:
        return None
    ids: list[int] = special_tokens[item["SpecialToken"]["id"]]["ids"]
    return ids


def _members(component: Any) -> list[dict[str, Any]]:
    """The steps of a part of a tokenizer, as its file describes them."""
    return [] if component is None else _flattened(json.loads(component.__getstate__()))


def _flattened(part: dict[str, Any]) -> list[dict[str, Any]]:
    for name in ("normalizers", "pretokenizers", "processors"):
        if name in part:
            return [member for each in part[name] for member in _flattened(each)]
    return [part]


def _is_sound_pre_tokenizer(component: Any) -> bool:
    """One of its steps must cut where pieces are cut; the others may cut more, and spell bytes only after it."""
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
    """All of it is known, and so is what the order of its alternatives does at a cut."""
    alternatives = _alternatives(pattern)
    return (
        ALTERNATIVES.issuperset(alternatives)
        and not SIGNS.isdisjoint(alternatives)
        and SPACES in alternatives
        and SPACES_BUT_LAST in alternatives[: alternatives.index(SPACES)]
    )


def _alternatives(pattern: str) -> list[str]:
    """Of the whole expression, not of the groups within it."""
    alternatives, depth = [""], 0
    for char in pattern:
        depth += (char == "(") - (char == ")")
        if char == "|" and not depth:
            alternatives.append("")
        else:
            alternatives[-1] += char
    return alternatives


def _is_sound_token(token: tokenizers.AddedToken) -> bool:
    """Whatever follows it, and whichever of its forms the text has."""
    forms = token.content, normalize("NFC", token.content), normalize("NFD", token.content)
    looks_around = token.lstrip or token.rstrip or token.single_word
    return not looks_around and not any(
        content[:1].isalnum() or len(PIECE.findall(content + "x")) > 1 for content in forms
    )


def _separators(added: Mapping[int, tokenizers.AddedToken]) -> dict[str, int]:
    """Added tokens that are found wherever they stand: none is longer and begins alike, none that ends in one can begin
    in what stands before it, and none is looked for in normalized text."""
    contents = [token.content for token in added.values()]
    return {
        token.content: token_id
        for token_id, token in added.items()
        if not token.normalized
        and not any(token.content[:1] in content[1:] for content in contents)
        and not any(content != token.content and content.startswith(token.content) for content in contents)
    }
