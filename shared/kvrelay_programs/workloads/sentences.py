"""Random sentences of common words. A word and its space are one to two tokens of most tokenizers."""

from __future__ import annotations

import random

_TEXT = """
water river stone bird night day sea wind tree leaf house road hand eye child friend story song market city
field horse winter summer light shadow garden letter window door table bread salt fire ship island mountain
valley forest path bridge old new small large quiet bright cold warm long short near far early late open green
white dark soft hard slow quick clear deep high low walks sings finds keeps brings turns holds sees hears
opens carries builds follows leaves meets writes reads draws grows falls rests waits begins ends moves
"""
WORDS = _TEXT.split()


def sentence(draw: random.Random, num_words: int) -> str:
    """A sentence of that many words, at least two."""
    words = draw.choices(WORDS, k=max(2, num_words))
    return f"{' '.join(words).capitalize()}."


def text(draw: random.Random, num_words: int) -> str:
    """Sentences of 8 to 16 words, `num_words` in all."""
    sentences: list[str] = []
    while num_words > 0:
        length = min(num_words, draw.randint(8, 16))
        sentences.append(sentence(draw, length))
        num_words -= length
    return " ".join(sentences)
