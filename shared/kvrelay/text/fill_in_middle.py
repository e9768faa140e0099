"""Prompts for text between a prefix and a suffix, by the tokens that code models are trained with for it.

The order is always prefix, suffix, middle: Bavarian et al., "Efficient Training of Language Models to Fill in the
Middle", 2022.
"""

from __future__ import annotations

import msgspec

from kvrelay.text.tokenizer import Tokenizer

# ruff: noqa: RUF001 - the markers have such characters

SENTINEL = "\u263a"
"""Keeps a tokenizer from putting a space before a text. As in Code Llama's own code, no token holds it and more."""


class FillInMiddleFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The added tokens before the prefix, the suffix and the middle. `ends`: further tokens that end the middle."""

    prefix: str
    suffix: str
    middle: str
    ends: tuple[str, ...] = ()
    spaced_prefix: bool = False  # a tokenizer that puts a space before texts does so before the prefix alone


FORMATS = (
    FillInMiddleFormat(  # Qwen2.5-Coder, CodeGemma, Granite 4
        prefix="<|fim_prefix|>",
        suffix="<|fim_suffix|>",
        middle="<|fim_middle|>",
        ends=("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>"),
    ),
    FillInMiddleFormat(  # StarCoder, Granite Code
        prefix="<fim_prefix>", suffix="<fim_suffix>", middle="<fim_middle>", ends=("<fim_pad>", "<file_sep>")
    ),
    FillInMiddleFormat(  # DeepSeek Coder
        prefix="<｜fim▁begin｜>", suffix="<｜fim▁hole｜>", middle="<｜fim▁end｜>"
    ),
    FillInMiddleFormat(  # Code Llama
        prefix="▁<PRE>", suffix="▁<SUF>", middle="▁<MID>", ends=("▁<EOT>",), spaced_prefix=True
    ),
)


class FillInMiddle:
    """Encodes for one tokenizer. `end_ids`: the tokens that end the middle, beside the end of the sequence."""

    def __init__(self, tokenizer: Tokenizer, markers: tuple[int, int, int], form: FillInMiddleFormat) -> None:
        self._tokenizer = tokenizer
        self._prefix_id, self._suffix_id, self._middle_id = markers
        self._spaced_prefix = form.spaced_prefix
        found = [tokenizer.added_id_of(text) for text in (*form.ends, form.prefix, form.suffix, form.middle)]
        self.end_ids = tuple(token_id for token_id in found if token_id is not None)

    def encode(self, prefix: str, suffix: str, *, add_special_tokens: bool) -> list[int]:
        """The prompt that the middle follows. `add_special_tokens`: it begins as the tokenizer begins a text."""
        before = self._begin() if add_special_tokens else []
        within = self._tokenizer.encode(prefix, add_special_tokens=False)
        if self._spaced_prefix:
            behind = self._encode_unspaced(suffix)
        else:
            behind = self._tokenizer.encode(suffix, add_special_tokens=False)
        return [*before, self._prefix_id, *within, self._suffix_id, *behind, self._middle_id]

    def _begin(self) -> list[int]:
        """The tokens that the tokenizer puts before a text."""
        plain = self._tokenizer.encode("a", add_special_tokens=False)
        whole = self._tokenizer.encode("a", add_special_tokens=True)
        starts = range(len(whole) - len(plain) + 1)
        return whole[: next((start for start in starts if whole[start : start + len(plain)] == plain), 0)]

    def _encode_unspaced(self, text: str) -> list[int]:
        sentinel = self._tokenizer.encode(SENTINEL, add_special_tokens=False)
        token_ids = self._tokenizer.encode(SENTINEL + text, add_special_tokens=False)
        if token_ids[: len(sentinel)] != sentinel:
            return self._tokenizer.encode(text, add_special_tokens=False)
        return token_ids[len(sentinel) :]


def find_fill_in_middle(tokenizer: Tokenizer) -> FillInMiddle | None:
    """None if the tokenizer has no tokens for it."""
    for form in FORMATS:
        prefix_id, suffix_id, middle_id = map(tokenizer.added_id_of, (form.prefix, form.suffix, form.middle))
        if prefix_id is not None and suffix_id is not None and middle_id is not None:
            return FillInMiddle(tokenizer, (prefix_id, suffix_id, middle_id), form)
    return None
