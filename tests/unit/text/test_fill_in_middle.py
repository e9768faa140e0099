"""Texts become tokens: prompts around a middle, bad words, and texts that are too long for the context."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers, processors

from kvrelay.text import service as text_service
from kvrelay.text.chat_template import ChatTemplate
from kvrelay.text.fill_in_middle import FORMATS, FillInMiddle, FillInMiddleFormat, find_fill_in_middle
from kvrelay.text.service import (
    LONG_TEXT_CHARS,
    MAX_CHARS_PER_TOKEN,
    ChatOptions,
    TextService,
    TextTooLong,
    check_length,
)
from kvrelay.text.tokenizer import Tokenizer
from kvrelay.text.tokenizer import Tokenizer as RouterTokenizer
from tests.fakes.text_model import CHATML, byte_fallback_tokenizer, byte_level_tokenizer

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


# -- the tokens of bad words -----------------------------------------------------------------------------------------


async def test_a_word_of_which_a_tokenizer_leaves_nothing_forbids_nothing() -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Replace("\u200b", ""), normalizers.Strip()])
    service = TextService(RouterTokenizer(tokenizer), ChatTemplate(CHATML, {}))
    words = await service.encode_bad_words(["\u200b", "otter"])
    service.close()
    assert words == (tuple(tokenizer.encode("otter").ids),)


# -- texts that are too long for the context are refused before they are tokenized -----------------------------------


WORDS = "The otter lives in rivers and eats fish, 12345 of them. "


async def test_a_text_that_cannot_fit_is_not_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(byte_level_tokenizer())
    service = TextService(tokenizer, ChatTemplate(CHATML, {}))
    monkeypatch.setattr(tokenizer, "encode", lambda *_, **__: pytest.fail("it was tokenized"))
    text = WORDS * 20_000
    with pytest.raises(TextTooLong, match=r"to a context of 1000 tokens: at most 16384 are tokenized"):
        await service.encode(text, add_special_tokens=False, max_tokens=1000)
    for content in (text, text + "<|im_start|>"):
        with pytest.raises(TextTooLong):
            await service.encode_chat([{"role": "user", "content": content}], ChatOptions(), 1000)
    service.close()


@pytest.mark.parametrize(
    ("num_chars", "max_tokens", "fits"),
    [
        (LONG_TEXT_CHARS, 1, True),
        (LONG_TEXT_CHARS + 1, 1, False),
        (MAX_CHARS_PER_TOKEN * 4096, 4096, True),
        (MAX_CHARS_PER_TOKEN * 4096 + 1, 4096, False),
        (text_service.MAX_TEXT_CHARS, None, True),
        (text_service.MAX_TEXT_CHARS + 1, None, False),
        (text_service.MAX_TEXT_CHARS + 1, 1 << 30, False),
    ],
)
def test_the_longest_text(num_chars: int, max_tokens: int | None, fits: bool) -> None:
    if fits:
        check_length(num_chars, max_tokens)
    else:
        with pytest.raises(TextTooLong):
            check_length(num_chars, max_tokens)


async def test_threads_give_the_tokens_of_the_library() -> None:
    backend = byte_level_tokenizer()
    service = TextService(Tokenizer(backend), None)
    for text in (WORDS, WORDS * 100, WORDS * 1000):
        assert await service.encode(text, add_special_tokens=True) == backend.encode(text).ids
    service.close()
