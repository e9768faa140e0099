"""What `kvrelay up` shows of its services, excerpts of their logs, and when it starts a dead one again."""

from __future__ import annotations

import io
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from kvrelay.cli.stacks import DIED, READY, STARTING
from kvrelay.cli.supervisor import (
    HEALTHY_AFTER_S,
    MAX_ERROR_COLUMNS,
    MAX_LOG_COLUMNS,
    MAX_LOG_LINES,
    Display,
    LiveDisplay,
    RestartPauses,
    log_excerpt,
    make_display,
)

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


# -- what `kvrelay up` shows -----------------------------------------------------------------------------------------


def test_an_output_that_takes_nothing_ends_no_supervision() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb", buffering=0) as pipe, open("/dev/full", "wb", buffering=0) as full:
        for output in (pipe, full):
            Display(io.TextIOWrapper(output, write_through=True)).update("decode-0", DIED, "was killed")


def test_lines_where_there_is_no_terminal() -> None:
    out = io.StringIO()
    with make_display(out, plain=False) as display:
        display.update("router", STARTING)
        display.update("router", READY, "after 0.5 s")
        display.note("read this")
    assert type(display) is Display
    assert out.getvalue() == "router       starting\nrouter       ready     after 0.5 s\nread this\n"


def test_a_table_on_a_terminal_ends_with_the_last_state_and_keeps_notes() -> None:
    out = io.StringIO()
    with LiveDisplay(Console(file=out, force_terminal=True, width=100)) as display:
        display.update("prefill-0", STARTING, "[red]log[/red]")
        display.note("curl 'http://x' -d '[1]'")
        display.update("prefill-0", READY, "after 0.5 s")
    text = out.getvalue()
    assert "curl 'http://x' -d '[1]'" in text
    last = text[text.rindex("prefill-0") :]
    assert "ready" in last
    assert "after 0.5 s" in last


# -- how long a supervisor waits before it starts a dead service again -----------------------------------------------


FAILED, KILLED, LONG = (1.0, False), (1.0, True), (HEALTHY_AFTER_S + 1, False)


@pytest.mark.parametrize(
    ("runs", "pauses_s"),
    [
        ([FAILED] * 7, [0.5, 1, 2, 4, 8, 15, 15]),
        ([KILLED] * 5, [0.5, 1, 2, 2, 2]),  # while it serves, so it can start
        ([*[FAILED] * 6, KILLED], [0.5, 1, 2, 4, 8, 15, 2]),
        ([*[FAILED] * 3, LONG], [0.5, 1, 2, 0.5]),
    ],
)
def test_pauses_double_up_to_a_limit(runs: list[tuple[float, bool]], pauses_s: list[float]) -> None:
    pauses = RestartPauses()
    assert [pauses.after(ran_s, became_ready=ready) for ran_s, ready in runs] == pauses_s
