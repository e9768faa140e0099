"""A pytest plugin that applies the time limit of a test also to calls into C that do not return.

pytest-timeout raises an exception from a signal handler. Python runs the handler between two bytecodes of the main
thread, so a call such as `zmq_ctx_term`, which the garbage collector may make at any time, can outlive the limit. For
that case a watchdog thread, which needs no GIL, ends the process `time_limit_grace` seconds after the limit and writes
the stacks of all threads to stderr.

pytest-xdist replaces a process that ended and reports the test that it ran as failed. But its schedulers run that test
again, in one process after the other, up to the limit of restarts, and the rest of its file does not run.
`EachTestOnce` does not repeat it.
"""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Iterator

import pytest
import xdist
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

END_LIMIT_S = 60.0
"""From the end of the last test to the end of the process."""
NUM_KNOWN_TESTS = 2
SHARED_STACKS = ("/demo_stack/",)
"""Folders whose files use one stack. It lives as long as its process."""
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
    if not xdist.is_xdist_controller(session) and not xdist.is_xdist_worker(session):
        faulthandler.dump_traceback_later(END_LIMIT_S, exit=True, file=session.config.stash[_STDERR])


def _limit_s(item: pytest.Item) -> float:
    """The limit that pytest-timeout applies. 0: none."""
    marker = item.get_closest_marker("timeout")
    if marker is not None:
        return float(marker.args[0] if marker.args else marker.kwargs["timeout"])
    option = item.config.getoption("timeout", None)
    return float(option if option is not None else item.config.getini("timeout") or 0)


class EachTestOnce(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
    """Whole files to each process, and all files that share a stack to one, which starts it once. A test that ended its
    process is not repeated; the others of its file run later."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return next((folder for folder in SHARED_STACKS if folder in file), file)

    def remove_node(self, node: WorkerController) -> str | None:
        """Returns the test that ran when the process ended, if it did not end by itself."""
        files: dict[str, dict[str, bool]] = self.assigned_work.pop(node)
        unfinished = [(tests, name) for tests in files.values() for name, is_done in tests.items() if not is_done]
        if not unfinished:
            return None
        tests, ended = unfinished[0]
        tests[ended] = True
        self.workqueue.update({file: tests for file, tests in files.items() if not all(tests.values())})
        for other in self.assigned_work:
            self._reschedule(other)
        return ended

    def _reschedule(self, node: WorkerController) -> None:
        super()._reschedule(node)
        # A process does not begin a test before it knows the next one, or that there is none.
        while not node.shutting_down and self._pending_of(self.assigned_work[node]) < NUM_KNOWN_TESTS:
            super()._reschedule(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> EachTestOnce | None:
    return EachTestOnce(config, log) if config.getvalue("dist") == "loadfile" else None
