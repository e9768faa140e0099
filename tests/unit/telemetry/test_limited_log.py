"""Warnings that others can cause in any number are written now and then, with a count."""

from __future__ import annotations

import logging

import pytest

from kvrelay.logs import LimitedLog

pytestmark = pytest.mark.unit


def test_one_line_of_each_kind_per_interval(caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    limited = LimitedLog(logging.getLogger("limited"), interval_s=5.0, clock=lambda: now)
    for number in range(10):
        limited.warning("one", "message %d", number)
        limited.warning("other", "another %d", number)
    assert caplog.messages == ["message 0", "another 0"]
    now += 5.0
    limited.warning("one", "message %d", 10)
    limited.warning("one", "message %d", 11)
    assert caplog.messages[2:] == ["message 10 (9 more since the last such line)"]
    now += 60.0
    limited.warning("one", "message %d", 12)
    assert caplog.messages[-1] == "message 12 (1 more since the last such line)"
    now += 60.0
    limited.warning("one", "message %d", 13)
    assert caplog.messages[-1] == "message 13"
