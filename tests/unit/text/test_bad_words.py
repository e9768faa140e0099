"""The tokens of bad words."""

from __future__ import annotations

import pytest
from tokenizers import normalizers

from kvrelay.text.chat_template import ChatTemplate
from kvrelay.text.service import TextService
from kvrelay.text.tokenizer import Tokenizer as RouterTokenizer
from tests.fakes.text_model import CHATML, byte_level_tokenizer

pytestmark = pytest.mark.unit


async def test_a_word_of_which_a_tokenizer_leaves_nothing_forbids_nothing() -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Replace("\u200b", ""), normalizers.Strip()])
    service = TextService(RouterTokenizer(tokenizer), ChatTemplate(CHATML, {}))
    words = await service.encode_bad_words(["\u200b", "otter"])
    service.close()
    assert words == (tuple(tokenizer.encode("otter").ids),)
