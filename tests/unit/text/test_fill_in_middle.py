"""Prompts around a middle, for the tokenizers of four families."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, processors

from kvrelay.text.fill_in_middle import FORMATS, FillInMiddle, FillInMiddleFormat, find_fill_in_middle
from kvrelay.text.tokenizer import Tokenizer
from tests.fakes.text_model import byte_fallback_tokenizer, byte_level_tokenizer

QWEN, STARCODER, DEEPSEEK, CODE_LLAMA = FORMATS
CODE_LLAMA_MARKERS = (CODE_LLAMA.prefix, CODE_LLAMA.suffix, CODE_LLAMA.middle, "▁<EOT>")


def tokenizer_of(backend: tokenizers.Tokenizer, *texts: str, bos: str | None = None) -> Tokenizer:
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in texts])
    if bos is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
        )
    return Tokenizer(backend)


def found_in(tokenizer: Tokenizer) -> FillInMiddle:
    found = find_fill_in_middle(tokenizer)
    assert found is not None
    return found


def encode(tokenizer: Tokenizer, prefix: str, suffix: str, *, special: bool = True) -> list[int]:
    return found_in(tokenizer).encode(prefix, suffix, add_special_tokens=special)


@pytest.mark.parametrize("form", [QWEN, STARCODER, DEEPSEEK])
@given(prefix=st.text(max_size=20), suffix=st.text(max_size=20))
def test_a_byte_level_prompt_is_the_text_with_its_markers(form: FillInMiddleFormat, prefix: str, suffix: str) -> None:
    markers = (form.prefix, form.suffix, form.middle)
    tokenizer = tokenizer_of(byte_level_tokenizer(), *markers)
    token_ids = encode(tokenizer, prefix, suffix)
    text = tokenizer.decode(token_ids, skip_special_tokens=False)
    assert text == f"{markers[0]}{prefix}{markers[1]}{suffix}{markers[2]}"
    assert token_ids == tokenizer.encode(text, add_special_tokens=False)


def test_the_beginning_of_a_text_comes_first() -> None:
    tokenizer = tokenizer_of(byte_level_tokenizer(), "<s>", *CODE_LLAMA_MARKERS, bos="<s>")
    (begin,) = tokenizer.encode("", add_special_tokens=True)
    for prefix in ("def f(", ""):
        assert encode(tokenizer, prefix, "x")[:2] == [begin, tokenizer.added_id_of("▁<PRE>")]
        assert encode(tokenizer, prefix, "x", special=False)[0] == tokenizer.added_id_of("▁<PRE>")


@given(suffix=st.text(st.characters(max_codepoint=0x2FF, exclude_categories=["Cs", "Cc"]), max_size=12))
def test_code_llamas_suffix_gets_no_space(suffix: str) -> None:
    """As `encode_infilling` in its own repository: the prefix has a space before it, and the suffix none."""
    tokenizer = tokenizer_of(byte_fallback_tokenizer(), *CODE_LLAMA_MARKERS)
    begin, hole, end = (tokenizer.added_id_of(text) or 0 for text in CODE_LLAMA_MARKERS[:3])
    token_ids = encode(tokenizer, "def", suffix)
    assert token_ids[0] == begin and token_ids[-1] == end
    middle = token_ids.index(hole)
    assert [tokenizer.token_string(each) for each in token_ids[1:middle]] == ["▁", "d", "e", "f"]
    spelled = b"".join(tokenizer.token_bytes(each) for each in token_ids[middle + 1 : -1])
    assert spelled.decode() == suffix


def test_the_middle_ends_with_the_models_own_tokens() -> None:
    tokenizer = tokenizer_of(byte_fallback_tokenizer(), *CODE_LLAMA_MARKERS)
    assert set(found_in(tokenizer).end_ids) == {tokenizer.added_id_of(text) for text in CODE_LLAMA_MARKERS}


def test_a_tokenizer_without_all_markers_has_none() -> None:
    assert find_fill_in_middle(Tokenizer(byte_level_tokenizer())) is None
    assert find_fill_in_middle(tokenizer_of(byte_level_tokenizer(), QWEN.prefix, QWEN.suffix)) is None
