"""Texts that are too long for the context are refused before they are tokenized."""

from __future__ import annotations

import pytest

from kvrelay.text import service as text_service
from kvrelay.text.chat_template import ChatTemplate
from kvrelay.text.service import (
    LONG_TEXT_CHARS,
    MAX_CHARS_PER_TOKEN,
    ChatOptions,
    TextService,
    TextTooLong,
    check_length,
)
from kvrelay.text.tokenizer import Tokenizer
from tests.fakes.text_model import CHATML, byte_level_tokenizer

pytestmark = pytest.mark.unit

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
