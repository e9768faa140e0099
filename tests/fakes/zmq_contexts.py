"""Which ZMQ contexts of this process are open, and who opened them.

A context that is left to the garbage collector can block it for ever, in a later test that has nothing to do with it.
So every test has to close the contexts that it opened.
"""

from __future__ import annotations

import functools
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable

import zmq

Context = zmq.Context[zmq.Socket[bytes]]

LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib"))
NUM_CALLERS = 6
PATIENCE_S = 40.0

_open: dict[Context, str] = {}
"""Strong references, so that the collector cannot touch a context before `assert_none_since` has seen it."""
_reported: set[Context] = set()


def watch() -> None:
    """Notes every context that is made from now on."""
    make: Callable[..., None] = zmq.Context.__init__

    @functools.wraps(make)
    def noted(self: Context, *args: object, **kwargs: object) -> None:
        make(self, *args, **kwargs)
        # pyzmq has a context of its own, which lives as long as the process, to learn when a sent frame is free.
        if not self._shadow and sys._getframe(1).f_globals["__name__"] != "zmq.utils.garbage":
            _open[self] = _callers()

    zmq.Context.__init__ = noted  # type: ignore[method-assign]


def open_contexts() -> frozenset[Context]:
    """All contexts that are open now."""
    for context in [context for context in _open if context.closed]:
        del _open[context]
    return frozenset(_open)


def assert_none_since(before: frozenset[Context]) -> None:
    """Fails if contexts are open that were not open `before`, and says which code made them. Each is reported once.

    Waits first: threads may still be closing theirs, which takes libzmq up to a handshake's time limit of 30 s.
    """
    patience = time.monotonic() + PATIENCE_S
    while open_contexts() - before - _reported and time.monotonic() < patience:
        time.sleep(0.05)
    left = open_contexts() - before - _reported
    _reported.update(left)
    places = "\n".join(_open[context] for context in left)
    assert not left, f"{len(left)} ZMQ contexts were left open. They were made in\n{places}"


def _callers() -> str:
    frames = [frame for frame in traceback.extract_stack() if not frame.filename.startswith(LIBRARIES)]
    return "".join(traceback.format_list(frames[-NUM_CALLERS - 2 : -2]))
