"""Processes of tests that begin with the engine imported, which takes some seconds of a core in each one otherwise."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

PRELOADED = ["kvrelay.engine.make"]


def engine_context() -> ForkServerContext:
    """Processes are forked from one that has imported the engine and computed nothing: it has no threads yet."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context
