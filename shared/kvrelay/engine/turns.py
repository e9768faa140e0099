"""One start at a time on a GPU: processes that share one measure their memory in turns.

What a process takes beside torch's allocator (its context, kernels, libraries) is told only as what all processes take
together, so while one measures no other may grow. What has started does not grow: it holds its pool and the memory of
its largest step from then on (`MemoryGauge.keep`). So whoever starts next finds free what nobody counts on, and two
pools never count on the same memory.

The turn is a lock on a file by the GPU's UUID in kvrelay's cache directory: the kernel gives it back with the process
that holds it, however that ends. Processes of different users, or in containers without a common cache directory, do
not wait for each other.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger(__name__)

LONGEST_WAIT_S = 1800.0
"""For the starts before, each of which reads its weights meanwhile."""
POLL_S = 0.1
SAY_EVERY_S = 60.0


class TurnNeverCame(ValueError):
    """Another process holds on to its turn; the text names it."""


@contextmanager
def turn_on_gpu(uuid: str, directory: Path, timeout_s: float = LONGEST_WAIT_S) -> Iterator[None]:
    """Waits until no other process of this machine is in here for the same GPU.

    Where the file cannot be made nobody is waited for, which is logged. Raises TurnNeverCame.
    """
    path = directory / f"gpu-{re.sub('[^A-Za-z0-9-]', '_', uuid)}.lock"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        log.warning("starts on this GPU are not taken in turns, so memory figures may mix: %s", error)
        yield
        return
    try:
        _wait_for(file, path, timeout_s)
        os.ftruncate(file, 0)
        os.pwrite(file, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(file)


def _wait_for(file: int, path: Path, timeout_s: float) -> None:
    started = time.monotonic()
    said = -SAY_EVERY_S
    while not _lock(file):
        waited_s = time.monotonic() - started
        holder = os.pread(file, 20, 0).decode() or "unknown"
        if waited_s >= timeout_s:
            raise TurnNeverCame(
                f"process {holder} has been starting on the same GPU for {waited_s:.0f} s (it holds {path}): end it"
            )
        if waited_s - said >= SAY_EVERY_S:
            log.info("waiting for process %s, which starts on the same GPU (%s)", holder, path)
            said = waited_s
        pause(POLL_S)


def pause(seconds: float) -> None:
    """Between two looks at the lock."""
    time.sleep(seconds)


def _lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
