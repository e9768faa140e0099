"""How processes of ours run: never longer than their parent, on which event loop, and with which exit status."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import TypeVar

from kvrelay.config import ConfigError
from kvrelay.config.common import CommonConfig
from kvrelay.telemetry.logs import setup_logging

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None

ConfigT = TypeVar("ConfigT", bound=CommonConfig)


class StartFailed(Exception):
    """A port that is taken, a model or tokenizer that is not there or cannot be served, a size that does not fit: the
    text says all."""


def service_main(
    prog: str,
    what: str,
    load: Callable[[], ConfigT],
    run: Callable[[ConfigT], None],
    log_fields: Callable[[ConfigT], dict[str, str]],
) -> int:
    """A service's whole life: configuration, logging, `run`. `prog` and `what` name it to its user.

    Returns the exit status: 2 for a wrong configuration, 1 for a service that could not start or ended by an error.
    """
    try:
        config = load()
    except ConfigError as error:
        sys.stderr.write(f"{prog}: {error}\n")
        return 2
    setup_logging(config.log_level, config.log_format, **log_fields(config))
    config.log_values(log)
    try:
        run(config)
    except StartFailed as error:
        log.error("the %s cannot start: %s", what, error, exc_info=log.isEnabledFor(logging.DEBUG))
        return 1
    except Exception:
        log.exception("the %s ends", what)
        return 1
    return 0


def die_with_parent() -> Callable[[], None]:
    """A `preexec_fn`: the kernel kills the child as soon as the parent is gone, however it went (Linux).

    To be made and used in the parent's main thread: the kernel watches the thread that forked.
    """
    parent = os.getpid()

    def arm() -> None:
        if _libc is not None:
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:  # it went before the call
                os._exit(1)

    return arm


def settle_garbage() -> None:
    """To be called when all that stays has been made: the collector looks at that no more, and at the rest less often.

    It would go through some hundred thousand objects of the libraries again and again, for tens of milliseconds each
    time, and find nothing: what requests leave behind goes by its reference counts, but for a cycle here and there.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def event_loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, where it is installed; None is asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
