"""Excerpts of logs of services that failed to start."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.cli.supervisor import MAX_ERROR_COLUMNS, MAX_LOG_COLUMNS, MAX_LOG_LINES, log_excerpt

CONFIGURATION = f"2026-01-01T00:00:00Z INFO    kvrelay.process: configuration: model=m {'x' * 900}"
ERROR = "2026-01-01T00:00:01Z ERROR   kvrelay.process: the decode worker cannot start: no memory"


def test_the_error_comes_first_and_the_configuration_not_at_all() -> None:
    lines = [CONFIGURATION, "2026 INFO a: loads", ERROR, "Traceback: none"]
    assert log_excerpt(lines) == [ERROR, "(the last lines of the log)", "2026 INFO a: loads", "Traceback: none"]
    assert log_excerpt([CONFIGURATION, ERROR]) == [ERROR]


def test_the_last_error_of_several_and_of_other_forms() -> None:
    assert log_excerpt(["x ERROR a: first", "x ERROR a: second"])[0] == "x ERROR a: second"
    assert log_excerpt(["  File x", "ValueError: bad", "more"])[0] == "ValueError: bad"
    assert log_excerpt(['{"time": "t", "level": "info"}', '{"level": "error", "message": "m"}', "end"])[0] == (
        '{"level": "error", "message": "m"}'
    )


def test_the_end_of_a_long_error_is_kept() -> None:
    error = f"2026 ERROR   a: {'x' * 700} Raise the share"
    assert log_excerpt([error, "y" * 700]) == [error, "(the last lines of the log)", "y" * (MAX_LOG_COLUMNS - 1) + "…"]


def test_without_an_error_the_last_lines() -> None:
    assert log_excerpt([str(number) for number in range(100)]) == [str(number) for number in range(70, 100)]
    assert log_excerpt([]) == []


@given(st.lists(st.one_of(st.just(CONFIGURATION), st.just(ERROR), st.text(max_size=500))))
def test_it_is_short_and_loses_no_line_but_the_configuration(lines: list[str]) -> None:
    excerpt = log_excerpt(lines)
    assert len(excerpt) <= MAX_LOG_LINES + 1
    assert all(len(line) <= MAX_LOG_COLUMNS for line in excerpt[1:])
    assert all(len(line) <= MAX_ERROR_COLUMNS for line in excerpt[:1])
    kept = [line for line in lines if "configuration: " not in line][-MAX_LOG_LINES:]
    if ERROR in kept:
        assert "ERROR" in excerpt[0] or "rror" in excerpt[0] or "xception" in excerpt[0]
    assert len(excerpt) >= len(kept)
