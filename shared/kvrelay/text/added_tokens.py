"""Tokens that a model's other files add to those of its `tokenizer.json`.

The files of many models disagree: a special token, or one that was added later, may be in one of them only. This module
follows transformers: if `tokenizer_config.json` has an `added_tokens_decoder`, it lists all added tokens; otherwise
`added_tokens.json` and `special_tokens_map.json` do. A token that only `tokenizer.json` names keeps the flags it has
there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import tokenizers
from tokenizers import AddedToken

FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
MORE_TOKENS = ("extra_special_tokens", "additional_special_tokens")
"""Fields with further special tokens: a list of them, or an object with their names. The first non-empty one counts."""


@dataclass(frozen=True, slots=True)
class AddedTokens:
    """The contents of the files beside `tokenizer.json`. Methods raise ValueError if a file describes no tokens."""

    config: Mapping[str, Any]
    special_tokens_map: Mapping[str, Any] = field(default_factory=dict)
    legacy: Mapping[str, Any] = field(default_factory=dict)
    """The content of `added_tokens.json`: ids by text."""

    @property
    def _is_legacy(self) -> bool:
        return "added_tokens_decoder" not in self.config

    @property
    def _fields(self) -> Mapping[str, Any]:
        return {**self.config, **self.special_tokens_map} if self._is_legacy else self.config

    def texts(self) -> dict[str, str]:
        """The texts of the named special tokens, by the names that chat templates use, such as `eos_token`."""
        more = self._more()
        named = {**self._fields, **(more if isinstance(more, dict) else {})}
        tokens = {name: _content(value) for name, value in named.items() if name.endswith("_token")}
        return {name: text for name, text in tokens.items() if text}

    def add_to(self, backend: tokenizers.Tokenizer) -> None:
        """Adds the tokens that the backend lacks, in the order of ids, and gives the others the files' flags."""
        present = backend.get_added_tokens_decoder()
        same = {_described(token) for token in present.values()}
        listed = self._of_legacy(present) if self._is_legacy else self._of_decoder()
        named = frozenset(self.texts().values())
        for token in listed:
            token.special = token.special or token.content in named
        known = {token.content for token in (*present.values(), *listed)}
        more = {token.content: token for token in self._special() if token.content not in known}
        backend.add_tokens([token for token in listed if _described(token) not in same] + list(more.values()))

    def _of_decoder(self) -> list[AddedToken]:
        decoder = self.config["added_tokens_decoder"]
        if not isinstance(decoder, dict):
            raise ValueError("added_tokens_decoder holds no object")
        return [_token(entry) for _, entry in sorted(decoder.items(), key=lambda item: _id(item[0]))]

    def _of_legacy(self, present: Mapping[int, AddedToken]) -> list[AddedToken]:
        special = {token.content for token in self._special()}
        beside = {
            _id(token_id): AddedToken(text, normalized=text not in special, special=text in special)
            for text, token_id in self.legacy.items()
        }
        tokens = {**beside, **present}
        return [tokens[token_id] for token_id in sorted(tokens)]

    def _special(self) -> list[AddedToken]:
        """Special tokens: first the names that most models have, then other names, then the unnamed ones."""
        names = [name for name in self._fields if name.endswith("_token") and name not in NAMED_TOKENS]
        values = [self._fields.get(name) for name in (*NAMED_TOKENS, *names)]
        more = self._more()
        values += more.values() if isinstance(more, dict) else more if isinstance(more, list) else []
        return [_token(value, special=True) for value in values if _content(value)]

    def _more(self) -> Any:
        return next((self._fields[name] for name in MORE_TOKENS if self._fields.get(name)), None)


def _content(value: Any) -> str | None:
    """The text of a token, which files give as a string or as an object with a `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _token(value: Any, *, special: bool | None = None) -> AddedToken:
    content = _content(value)
    if not content:
        raise ValueError(f"{value!r} describes no token")
    flags = {name: bool(value[name]) for name in FLAGS if name in value} if isinstance(value, dict) else {}
    if special is not None:
        flags["special"] = special
    return AddedToken(content, **flags)


def _described(token: AddedToken) -> tuple[Any, ...]:
    return token.content, *(getattr(token, name) for name in FLAGS)


def _id(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        raise ValueError(f"{value!r} is no id of an added token") from None
