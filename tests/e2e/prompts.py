"""Random prompts, each known by its length and seed, and requests with them."""

from __future__ import annotations

import random
from typing import Any

from tests.fakes.stack import Stack

DEMO_VOCABULARY = 2048


def prompt_of(length: int, vocab_size: int = DEMO_VOCABULARY, *, seed: int = 0) -> list[int]:
    return random.Random(seed * 7919 + length).choices(range(4, vocab_size), k=length)


def body_of(stack: Stack, **parameters: Any) -> dict[str, Any]:
    """A greedy completion of 20 tokens."""
    values = {"model": stack.model, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return values | {"prompt": prompt_of(60), "max_tokens": 20} | parameters
