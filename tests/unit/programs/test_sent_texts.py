"""What is known of a text's beginning, against a comparison with each kept text."""

from __future__ import annotations

from itertools import takewhile

from hypothesis import given
from hypothesis import strategies as st

from kvrelay_programs.content import MOST_KEPT, SentTexts

texts = st.text(alphabet="ab", max_size=8)


@given(st.lists(texts, max_size=2 * MOST_KEPT), texts)
def test_the_longest_beginning_that_one_of_the_last_texts_has(sent: list[str], text: str) -> None:
    known = SentTexts()
    for each in sent:
        known.add(each)
    expected = [len(list(takewhile(lambda pair: pair[0] == pair[1], zip(each, text, strict=False)))) for each in sent]
    assert known.num_known(text) == max(expected[-MOST_KEPT:], default=0)
