"""Keeps control tokens that message contents spell out from becoming control tokens.

A chat template writes control tokens such as `<|im_start|>` between the contents of messages, and the rendered text is
tokenized as a whole. So a content that spells out such a token would end its turn and could begin another, with any
role. Here such a spelling stays text:

1. The first character of each spelling in a content is replaced by a marker, a private-use character that the request
   does not contain. The beginning of a token at the end of a content is marked too, because the next content could
   complete it. Templates render markers like other characters.
2. Control tokens without a marker in the rendered text are the template's.
3. If the rendered text spells out others, a second tokenizer encodes it. It knows each control token by a random alias
   only, and the template's tokens are replaced by their aliases. So the text is split, normalized and encoded as by the
   first tokenizer, except at the spellings.

A request without such a spelling takes the usual path, so its token ids, and the cached prefixes of its prompt, are the
same as without this module.

A template that changes contents could join the parts of a token. If it looks as if it might, and a content has the
first character of a token, the messages are also rendered with all such characters marked. If the template then writes
fewer control tokens, that rendering is the prompt.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from typing import Any, TypeVar

import tokenizers
from tokenizers import AddedToken, models

from kvrelay.text.tokenizer import Tokenizer

JOINS = re.compile(r"replace|join|lower|upper|format|reverse|striptags|title|capitalize|regex|truncate")
"""Functions by which a template could make a token of a content that does not spell it out."""

MARKERS = range(0xF0000, 0xFFFFE)
ALIAS_CHARS = range(0x100000, 0x10FFFD)
NO_TOKEN = chr(0x10FFFD)

ContentsT = TypeVar("ContentsT")
Span = tuple[int, int]


def texts_of(value: Any) -> list[str]:
    """All texts in a JSON value, keys included, in any order."""
    texts: list[str] = []
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, str):
            texts.append(each)
        elif isinstance(each, dict):
            left += each.values()
            texts += each
        elif isinstance(each, list | tuple):
            left += each
    return texts


def map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of a JSON value with changed texts."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, tuple):
        return tuple(map_texts(each, change) for each in value)
    if isinstance(value, dict):
        return {change(key): map_texts(each, change) for key, each in value.items()}
    return [map_texts(each, change) for each in value] if isinstance(value, list) else value


class ContentTokens:
    """The control tokens of one model: its special tokens, and `turn_markers`, added tokens between turns."""

    def __init__(self, tokenizer: Tokenizer, turn_markers: Collection[str], template_source: str) -> None:
        added = tokenizer.backend.get_added_tokens_decoder().values()
        self._tokens = [token for token in added if token.content and (token.special or token.content in turn_markers)]
        spellings = [token.content for token in self._tokens]
        self._first_chars = sorted({spelling[0] for spelling in spellings})
        self._beginnings = frozenset(spelling[:end] for spelling in spellings for end in range(1, len(spelling)))
        self._longest = max(map(len, spellings), default=0)
        self._spellings = _SpellingFinder(spellings)
        self._may_join = JOINS.search(template_source) is not None
        self._tokenizer = tokenizer

    def are_spelled(self, contents: Any) -> bool:
        """Returns whether one of the contents spells out a control token. Then encoding may take long."""
        texts = self._texts_with_first_chars(contents)
        return bool(texts) and any(self._spellings.find(texts))

    def encode(
        self,
        render: Callable[[ContentsT], str],
        contents: ContentsT,
        encode: Callable[[str], list[int]],
        *,
        add_special_tokens: bool,
    ) -> list[int]:
        """The token ids of what `render` makes of the contents. `encode` encodes a text as usual."""
        texts = self._texts_with_first_chars(contents)
        if not texts:
            return encode(render(contents))
        marks = _Marks(self._first_chars, texts_of(contents))
        found = zip(texts, self._spellings.find(texts), strict=True)
        marked = {text: marks.mark(text, self._spans_to_mark(text, spelled)) for text, spelled in found}
        rendered = render(map_texts(contents, lambda text: marked.get(text, text)))
        (own,) = self._spellings.find([rendered])
        if self._may_join:
            all_marked = render(map_texts(contents, marks.mark_all))
            (least,) = self._spellings.find([all_marked])
            if len(least) < len(own):
                rendered, own = all_marked, least
        text = marks.unmark(rendered)
        if self._spellings.find([text]) == [own]:
            return encode(text)
        return self._aliased.encode(text, own, add_special_tokens=add_special_tokens)

    def _texts_with_first_chars(self, contents: Any) -> list[str]:
        """The texts with a character that begins a control token. Most contents have none."""
        return [text for text in texts_of(contents) if self._has_first_char(text)]

    def _has_first_char(self, text: str) -> bool:
        for char in self._first_chars:  # noqa: SIM110 - a generator takes longer than the search
            if char in text:
                return True
        return False

    def _spans_to_mark(self, text: str, spelled: list[Span]) -> list[Span]:
        """The spellings in a content, and the beginnings of one at its end."""
        end = len(text.rstrip())  # templates strip contents
        first = max(end - self._longest + 1, spelled[-1][1] if spelled else 0)
        return spelled + [(start, end) for start in range(first, end) if text[start:end] in self._beginnings]

    @cached_property
    def _aliased(self) -> _AliasedTokenizer:
        return _AliasedTokenizer(self._tokenizer.backend, self._tokens)


class _SpellingFinder:
    """Finds control tokens as a tokenizer does, in linear time and without the GIL."""

    def __init__(self, spellings: Collection[str]) -> None:
        self._backend = tokenizers.Tokenizer(models.WordLevel({NO_TOKEN: 0}, unk_token=NO_TOKEN))
        self._backend.add_tokens([AddedToken(each, normalized=False) for each in spellings])

    def find(self, texts: list[str]) -> list[list[Span]]:
        """The spans of each text in which a control token is spelled out."""
        encodings = self._backend.encode_batch(texts, add_special_tokens=False)
        return [[span for span, token_id in zip(each.offsets, each.ids, strict=True) if token_id] for each in encodings]


class _Marks:
    """Markers of one request: one for each first character, none of them in the request's texts."""

    def __init__(self, first_chars: Collection[str], texts: list[str]) -> None:
        free = (chr(code) for code in MARKERS if not any(chr(code) in text for text in texts))
        self._marker_of = dict(zip(first_chars, free, strict=False))

    def mark(self, text: str, spans: list[Span]) -> str:
        """Marks the first characters of these spans, which are in order and may overlap."""
        pieces, end = [], 0
        for start, _ in spans:
            pieces += [text[end:start], self._marker_of[text[start]]]
            end = start + 1
        return "".join([*pieces, text[end:]])

    def mark_all(self, text: str) -> str:
        for char, marker in self._marker_of.items():
            text = text.replace(char, marker)
        return text

    def unmark(self, text: str) -> str:
        for char, marker in self._marker_of.items():
            text = text.replace(marker, char)
        return text


class _AliasedTokenizer:
    """A copy of a tokenizer in which control tokens are known by their aliases only. Clients cannot guess an alias."""

    def __init__(self, backend: tokenizers.Tokenizer, tokens: Collection[AddedToken]) -> None:
        self._backend = tokenizers.Tokenizer.from_str(backend.to_str())
        # Spellings of special tokens are text from now on. Turn markers that are not special become so.
        self._backend.add_special_tokens([_like(token, token.content, special=True) for token in tokens])
        self._backend.encode_special_tokens = True
        secret = "".join(chr(secrets.choice(ALIAS_CHARS)) for _ in range(8))
        self._aliases = {token.content: f"{secret}{chr(ALIAS_CHARS[n])}" for n, token in enumerate(tokens)}
        self._backend.add_tokens([_like(token, self._aliases[token.content], special=False) for token in tokens])
        self._ids = self._ids_of_aliases(backend)

    def _ids_of_aliases(self, backend: tokenizers.Tokenizer) -> Mapping[int, int]:
        ids = {}
        for own, alias in self._aliases.items():
            own_id, alias_id = backend.token_to_id(own), self._backend.token_to_id(alias)
            assert own_id is not None and alias_id is not None
            ids[alias_id] = own_id
        return ids

    def encode(self, text: str, own: Collection[Span], *, add_special_tokens: bool) -> list[int]:
        """`own`: where control tokens of the template are. All others are text."""
        pieces, end = [], 0
        for start, stop in own:
            pieces += [text[end:start], self._aliases[text[start:stop]]]
            end = stop
        aliased = "".join([*pieces, text[end:]])
        (encoding,) = self._backend.encode_batch_fast([aliased], add_special_tokens=add_special_tokens)
        return [self._ids.get(token_id, token_id) for token_id in encoding.ids]


def _like(token: AddedToken, content: str, *, special: bool) -> AddedToken:
    flags = {"lstrip": token.lstrip, "rstrip": token.rstrip, "single_word": token.single_word}
    return AddedToken(content, normalized=token.normalized and special, special=special, **flags)
