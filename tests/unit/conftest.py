from __future__ import annotations

import pytest

from kvrelay.text.tokenizer import Tokenizer
from tests.fakes.text_model import byte_fallback_tokenizer, byte_level_tokenizer


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    return Tokenizer(byte_level_tokenizer())


@pytest.fixture(scope="session")
def byte_fallback() -> Tokenizer:
    return Tokenizer(byte_fallback_tokenizer())
