"""What messages show of long values and texts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.excerpts import MAX_VALUE_CHARS, quoted, shortened
from kvrelay.text.request.api_error import MAX_MESSAGE_CHARS, ApiError

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(VALUES)
def test_a_value_is_shown_as_python_writes_it_if_that_is_short(value: object) -> None:
    shown = quoted(value)
    assert len(shown) <= MAX_VALUE_CHARS
    assert not isinstance(value, str) or len(repr(value)) > MAX_VALUE_CHARS or shown == repr(value)


def test_long_and_deep_values_are_shown_in_part() -> None:
    deep: list[object] = []
    for _ in range(5000):
        deep = [deep]
    for value in ("x" * 500_000, ["y" * 500_000] * 1000, {"z" * 500_000: deep}, deep, 10**4000):
        assert len(quoted(value)) <= MAX_VALUE_CHARS


@given(st.text(max_size=60), st.integers(20, 50))
def test_a_shortened_text_has_the_beginning_and_the_end(text: str, most: int) -> None:
    shown = shortened(text, most)
    if len(text) <= most:
        assert shown == text
    else:
        begin, end = shown[: most - most // 4 - 5], shown[-(most // 4) :]
        assert len(shown) == most and text.startswith(begin) and text.endswith(end) and " ... " in shown


def test_an_error_has_a_limited_message() -> None:
    assert len(ApiError("x" * 500_000).body()["error"]["message"]) == MAX_MESSAGE_CHARS
