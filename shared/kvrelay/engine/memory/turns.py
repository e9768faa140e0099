"""Lets processes that share a GPU start one after the other, because they measure its memory.

The memory of a process beside torch's allocator (context, kernels, libraries) is only known as a sum over all
processes, so no other process may grow while one measures. A process that has started does not grow: it holds its pool
and the memory of its largest step from then on (`CudaGauge.keep`). So the next process finds the memory free that no
other counts on, and two pools never count on the same memory.

A lock on a file in kvrelay's cache directory, named by the GPU's UUID, gives the turn. The kernel releases it when the
process ends, however that happens. Processes of different users, or in containers without a common cache directory, do
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
"""Seconds to wait for processes that started before, each of which reads its weights in its turn."""
POLL_S = 0.1
SAY_EVERY_S = 60.0


class TurnNeverCame(ValueError):
    """Another process holds its turn for too long. The text names it."""


@contextmanager
def turn_on_gpu(uuid: str, directory: Path, timeout_s: float = LONGEST_WAIT_S) -> Iterator[None]:
    """Waits until no other process of this machine holds the turn for the same GPU.

    If the file cannot be made, it logs that and does not wait. Raises TurnNeverCame.
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
    """Sleeps between two attempts to take the lock."""
    time.sleep(seconds)


def _lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
