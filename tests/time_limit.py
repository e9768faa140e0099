"""A pytest plugin that applies the time limit of a test also to calls into C that do not return.

pytest-timeout raises an exception from a signal handler. Python runs the handler between two bytecodes of the main
thread, so a call such as `zmq_ctx_term`, which the garbage collector may make at any time, can outlive the limit. For
that case a watchdog thread, which needs no GIL, ends the process `time_limit_grace` seconds after the limit and writes
the stacks of all threads to stderr.

pytest-xdist replaces a process that ended and reports the test that it ran as failed. But its schedulers run that test
again, in one process after the other, up to the limit of restarts, and the rest of its file does not run.
`EachTestOnce` (`tests/each_test_once.py`) does not repeat it. All else also works without pytest-xdist.
"""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Iterator
from typing import Any

import pytest

END_LIMIT_S = 60.0
"""From the end of the last test to the end of the process."""
_STDERR = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("time_limit_grace", "seconds after the time limit of a test until its process ends", default="60")


def pytest_configure(config: pytest.Config) -> None:
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture is None:
        config.stash[_STDERR] = os.dup(2)
        return
    with capture.global_and_fixture_disabled():  # otherwise the stacks would end in the file that captures the output
        config.stash[_STDERR] = os.dup(2)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    limit_s = _limit_s(item)
    if limit_s:
        grace_s = float(item.config.getini("time_limit_grace"))
        faulthandler.dump_traceback_later(limit_s + grace_s, exit=True, file=item.config.stash[_STDERR])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_enter_pdb() -> None:
    faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    # A process of pytest-xdist that is done waits for the others, for minutes; the controller ends it with them.
    is_controller = session.config.getoption("dist", "no") != "no"
    if not is_controller and not hasattr(session.config, "workerinput"):
        faulthandler.dump_traceback_later(END_LIMIT_S, exit=True, file=session.config.stash[_STDERR])


def _limit_s(item: pytest.Item) -> float:
    """The limit that pytest-timeout applies. 0: none."""
    marker = item.get_closest_marker("timeout")
    if marker is not None:
        return float(marker.args[0] if marker.args else marker.kwargs["timeout"])
    option = item.config.getoption("timeout", None)
    return float(option if option is not None else item.config.getini("timeout") or 0)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object | None:
    # pytest-xdist may be absent or switched off
    from tests.each_test_once import EachTestOnce

    return EachTestOnce(config, log) if config.getvalue("dist") == "loadfile" else None
