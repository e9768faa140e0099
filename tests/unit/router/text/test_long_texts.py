"""Long texts are refused before they are tokenized whole, and are tokenized window by window."""

from __future__ import annotations

import asyncio
from itertools import chain
from unicodedata import normalize

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import normalizers

from kvrelay_router.text import spans
from kvrelay_router.text.chat_template import ChatTemplate
from kvrelay_router.text.service import ChatOptions, TextService
from kvrelay_router.text.token_bound import NFC_SHRINKS, TokenBound
from kvrelay_router.text.tokenizer import Abandoned, EncodingLimits, TextTooLong, Tokenizer
from tests.fakes.text_model import CHATML, byte_fallback_tokenizer, byte_level_tokenizer
from tests.thoroughness import examples

pytestmark = pytest.mark.unit

WORDS = "The otter lives in rivers and eats fish, 12345 of them. "


def nfc_tokenizer() -> Tokenizer:
    backend = byte_level_tokenizer()
    backend.normalizer = normalizers.NFC()
    return Tokenizer(backend)


TOKENIZERS = {"plain": Tokenizer(byte_level_tokenizer()), "nfc": nfc_tokenizer()}


@settings(max_examples=examples(500), deadline=None)
@given(
    st.sampled_from(sorted(TOKENIZERS)),
    st.lists(st.one_of(st.text(max_size=20), st.sampled_from([WORDS, "<|im_start|>", "    ", "e\u0301", "日本語"]))),
)
@example("nfc", ["\u1112\u1161\u11ab" * 50])
@example("nfc", ["e\u0301" * 50])
def test_no_text_has_fewer_tokens_than_its_bound(name: str, parts: list[str]) -> None:
    text = "".join(parts)
    tokenizer = TOKENIZERS[name]
    assert tokenizer._bound is not None
    assert tokenizer._bound.least_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False))


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=12), min_size=1, max_size=8), st.data())
def test_no_token_weighs_more_than_one(tokens: list[bytes], data: st.DataObject) -> None:
    texts = [token for token in tokens if token.isascii()]
    drawn = data.draw(st.lists(st.sampled_from(texts), max_size=30)) if texts else []
    assert TokenBound(tokens).least_tokens(b"".join(drawn).decode()) <= len(drawn)


def test_composition_leaves_a_third_of_the_bytes_of_any_character() -> None:
    chars = (chr(code) for code in range(0x80, 0x110000) if not 0xD800 <= code < 0xE000)
    for char in chars:
        composed, apart = normalize("NFC", char).encode(), normalize("NFD", char).encode()
        assert max(len(char.encode()), len(apart)) <= NFC_SHRINKS * len(composed)


def test_the_bound_is_of_use() -> None:
    tokenizer = TOKENIZERS["plain"]
    assert tokenizer._bound is not None
    for text in (WORDS * 1000, "0" * 50_000, "東京" * 10_000):
        num_tokens = len(tokenizer.encode(text, add_special_tokens=False))
        assert tokenizer._bound.least_tokens(text) > num_tokens / 40


def test_a_tokenizer_that_may_leave_out_bytes_has_no_bound() -> None:
    assert Tokenizer(byte_fallback_tokenizer())._bound is None


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.sampled_from([WORDS, "x" * 700, " ", "\n", "東京 ", "<|im_end|>", " a", "1,2"]), max_size=60))
def test_windows_have_the_tokens_of_the_text(parts: list[str]) -> None:
    text = "".join(parts)
    backend = byte_level_tokenizer()
    cache = spans.SpanCache(lambda each: backend.encode(each, add_special_tokens=False).ids, window_chars=600)
    for _ in range(2):  # the second time from the cache
        ids = backend.encode(text, add_special_tokens=False).ids
        assert cache.encode(text) == list(chain.from_iterable(cache.encode_windows(text))) == ids


def test_limits_end_the_encoding_between_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(byte_level_tokenizer())
    text = WORDS * 20_000
    num_tokens = len(tokenizer.encode(text, add_special_tokens=False))
    exact = EncodingLimits(num_tokens)
    assert len(tokenizer.encode(text, add_special_tokens=False, limits=exact)) == num_tokens
    monkeypatch.setattr(tokenizer, "_bound", None)
    encoded: list[str] = []
    assert tokenizer._spans is not None
    encode = tokenizer._spans._encode

    def counting(part: str) -> list[int]:
        encoded.append(part)
        return encode(part)

    monkeypatch.setattr(tokenizer._spans, "_encode", counting)
    with pytest.raises(TextTooLong, match="more than 1000 tokens"):
        tokenizer.encode(text, add_special_tokens=False, limits=EncodingLimits(1000))
    assert sum(map(len, encoded)) <= 2 * spans.WINDOW_CHARS < len(text) / 4
    with pytest.raises(Abandoned):
        tokenizer.encode(text, add_special_tokens=False, limits=EncodingLimits(is_abandoned=True))


async def test_a_text_that_cannot_fit_is_not_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(byte_level_tokenizer())
    service = TextService(tokenizer, ChatTemplate(CHATML, {}))
    assert tokenizer._spans is not None
    monkeypatch.setattr(tokenizer._spans, "_encode", lambda _: pytest.fail("it was tokenized"))
    text = WORDS * 20_000
    with pytest.raises(TextTooLong):
        await service.encode(text, add_special_tokens=False, max_tokens=1000)
    for content in (text, text + "<|im_start|>"):
        with pytest.raises(TextTooLong):
            await service.encode_chat([{"role": "user", "content": content}], ChatOptions(), 1000)
    service.close()


async def test_the_thread_stops_if_nobody_awaits_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(byte_level_tokenizer())
    service = TextService(tokenizer, None, num_threads=1)
    loop, began, goes_on = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
    num_windows = 0
    assert tokenizer._spans is not None

    def slow(part: str) -> list[int]:
        nonlocal num_windows
        num_windows += 1
        loop.call_soon_threadsafe(began.set)
        asyncio.run_coroutine_threadsafe(goes_on.wait(), loop).result()
        return [0] * len(part)

    monkeypatch.setattr(tokenizer._spans, "_encode", slow)
    task = asyncio.create_task(service.encode(WORDS * 20_000, add_special_tokens=False))
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    goes_on.set()
    following = "x" * 20_000  # in the same thread, after it
    assert await service.encode(following, add_special_tokens=False) == [0] * len(following)
    assert num_windows == 2
    service.close()
